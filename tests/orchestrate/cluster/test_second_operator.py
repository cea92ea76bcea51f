"""Another user follows and stops a run, with another machine, home, folder and key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.core.errors import INTERRUPTED, ExitCode
from payload.run_record.run_files import RunPaths
from payload.run_record.run_identity import known_identity
from tests.orchestrate.cluster.operating import Operator, wait_for_nobody
from tests.orchestrate.cluster.separate import SeparateNodes
from tests.orchestrate.sshd import make_key
from tests.support.launching import summary
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.sshd, pytest.mark.ranks]

LONG = ("train.steps=100000", "train.checkpoint_every=0")


class Colleague(Operator):
    """Has the inventory, and a key of her own."""

    def __init__(self, folder: Path, nodes: SeparateNodes) -> None:
        folder.mkdir()
        self.public = make_key(folder / "own_key")
        super().__init__(folder, nodes)
        self._key = ["--ssh-key", str(folder / "own_key")]
        (folder / "home").mkdir()
        self._secrets = {"HOME": str(folder / "home")}

    def let_in(self) -> None:
        """Every node's administrator adds her key."""
        for i in range(len(self.nodes.inventory.nodes)):
            with (self.nodes.home_of(i) / ".ssh" / "authorized_keys").open("a") as keys:
                keys.write(f"{self.public}\n")


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Operator]:
    """The operator who has started run `one`, and then disconnected."""
    with SeparateNodes(tmp_path, num_nodes=2) as nodes:
        operator = Operator(tmp_path, nodes)
        code, said = operator.do(*operator.run_words("one", *LONG), "--detach")
        assert code == ExitCode.OK, said
        yield operator


@pytest.mark.seeds
def test_a_second_operator_attaches_and_stops_with_the_inventory_and_a_key_of_her_own(
    first: Operator, tmp_path: Path
) -> None:
    colleague = Colleague(tmp_path / "second", first.nodes)
    code, said = colleague.do(*colleague.on_cluster("attach"))
    assert code == ExitCode.SSH_AUTH, said
    colleague.let_in()
    following = colleague.start(*colleague.on_cluster("attach"))
    colleague.wait_for_a_step()
    os.killpg(following.pid, 2)
    said = "".join(following.communicate(timeout=DEADLINE_S))
    assert following.returncode == INTERRUPTED and "detached; run one continues" in said, said
    # Her copy has the address from now on.
    code, said = colleague.do("stop", "one")
    assert code == ExitCode.OK and "status           stopped" in said, said
    wait_for_nobody(colleague)
    steps = summary(colleague.paths("one").root)["steps"]
    assert steps > 0 and colleague.paths("one").checkpoint(steps).is_dir()
    # The operator who started it sees the same.
    code, said = first.do("collect", "one")
    assert code == ExitCode.OK and summary(first.paths("one").root)["steps"] == steps, said


def test_a_second_operator_stops_a_run_that_she_has_never_seen(
    first: Operator, tmp_path: Path
) -> None:
    metrics = first.nodes.home_of(0) / "tileforge" / "runs" / "one" / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and bool(metrics.read_bytes()),
        what="the first step",
    )
    colleague = Colleague(tmp_path / "second", first.nodes)
    colleague.let_in()
    code, said = colleague.do(*colleague.on_cluster("stop"))
    assert code == ExitCode.OK and "run one: saving and stopping" in said, said
    wait_for_nobody(colleague)
    result = summary(colleague.paths("one").root)
    assert result["status"] == "stopped"
    assert colleague.paths("one").checkpoint(result["steps"]).is_dir()
    assert known_identity(colleague.paths("one")) == known_identity(first.paths("one"))
    # Another run with that id is neither loaded with this run's weights nor overwritten.
    there = first.nodes.home_of(0) / "tileforge" / "runs" / "one"
    (colleague.folder / "runs").rename(colleague.folder / "earlier")
    before = known_identity(RunPaths(there))
    code, said = colleague.do(*colleague.run_words("one", "train.steps=3"))
    assert code == ExitCode.CONFIG and "two runs with the same name" in said, said
    assert str(before.identity) in said and not colleague.paths("one").root.exists()
    assert known_identity(RunPaths(there)) == before
    assert summary(there)["steps"] == result["steps"]
    (colleague.folder / "earlier").rename(colleague.folder / "runs")
    code, said = colleague.do(*colleague.on_cluster("stop"))
    assert code == ExitCode.USAGE and "no run is active on test. Choose a run: stop RUN." in said, (
        said
    )
    code, said = colleague.do("stop", "--inventory", "local")
    assert code == ExitCode.USAGE and "this is the machine of the command" in said, said
