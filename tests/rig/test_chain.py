"""From the first boot of machines to collected results, without leaks on the way."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from payload.core.errors import INTERRUPTED, ExitCode
from payload.run_record.run_files import RunPaths
from tests.orchestrate.operator import Operator, finish
from tests.rig.conftest import FEW_STEPS as STEPS
from tests.rig.leftovers import CANARIES, HOME, assert_nothing_is_left, marked
from tests.rig.machine import Machine
from tests.rig.sweep import (
    files_in,
    files_on,
    holders,
    key_needles,
    mode_of,
    processes_of,
    writable_by_others,
)
from tests.support.launching import losses, metrics, summary

pytestmark = [pytest.mark.rig, pytest.mark.timeout(1800)]

ENDLESS = ("train.steps=100000", "train.checkpoint_every=0")
OPERATOR_KEY = ".cluster/rig/id_ed25519"
HOST_KEYS = tuple(f"etc/ssh/ssh_host_{kind}_key" for kind in ("ecdsa", "ed25519"))
# Some files that the search must find.
SWEPT = (
    "var/lib/cloud/seed/nocloud/user-data",
    "var/lib/cloud/seed/nocloud/meta-data",
    "var/lib/tileforge/bootstrap.json",
    "var/log/cloud-init.log",
    "var/log/tileforge-bootstrap.log",
    "run/cloud-init/instance-data.json",
    f"{HOME}/.ssh/authorized_keys",
    f"{HOME}/tileforge/runs/one/inventory.json",
    f"{HOME}/tileforge/runs/one/plan.json",
)


def test_three_machines_from_nothing_train_what_one_machine_trains(
    operator: Operator,
    machines: list[Machine],
    operator_key: Path,
    trained_by_mpirun: RunPaths,
) -> None:
    assert [(m.bootstrap_state() or {})["ok"] for m in machines] == [True, True, True]
    code, output = operator.do(*operator.on_cluster("preflight"), "--json")
    assert code == ExitCode.OK, output
    far = trained_by_mpirun
    result = summary(far.root)
    assert (result["world_size"], result["nodes"], result["status"]) == (3, 3, "finished")
    assert result["ranks_identical"] is True
    assert (far.checkpoint(STEPS) / "model.safetensors").exists()
    assert all(far.rank_log(rank).exists() for rank in range(3))
    assert_nothing_is_left(machines, operator_key)
    arguments = operator.local_words("near", f"train.steps={STEPS}", "launch.ranks_per_node=3")
    code, output = operator.do(*arguments)
    assert code == ExitCode.OK, output
    assert summary(operator.paths("near").root)["world_size"] == 3
    assert losses(far.root) == pytest.approx(losses(operator.paths("near").root), rel=1e-5)


def test_attach_sees_the_end_of_a_run_whose_operator_was_killed(
    operator: Operator, machines: list[Machine], operator_key: Path
) -> None:
    steps = 200
    killed = operator.start(*operator.run_words("kept", f"train.steps={steps}"))
    operator.wait_for_a_step("kept")
    killed.send_signal(signal.SIGKILL)
    finish(killed)
    there = machines[0].root / HOME / "tileforge/runs/kept"
    assert len(metrics(there)) < steps
    code, output = operator.do("attach", "kept")
    assert code == ExitCode.OK, output
    # `losses` checks that every step appears once, in order.
    assert len(losses(operator.paths("kept").root)) == steps
    assert summary(operator.paths("kept").root)["status"] == "finished"
    assert_nothing_is_left(machines, operator_key)


def test_no_secret_is_anywhere_but_in_its_own_file_and_stop_leaves_no_process(
    operator: Operator, machines: list[Machine], operator_key: Path
) -> None:
    code, output = operator.do(*operator.run_words("one", *ENDLESS), "--detach")
    assert code == ExitCode.OK, output
    follower = operator.start("attach", "one")
    operator.wait_for_a_step("one")
    run_key = files_in_run_key(machines[0])["id_ed25519"]
    needles = {
        "a private key's first line": b"PRIVATE KEY-----",
        **{name: value.encode() for name, value in CANARIES.items()},
        **key_needles("operator's key", operator_key.read_bytes()),
        **key_needles("run's key", run_key.read_bytes()),
    }
    allowed = {str(run_key.relative_to(machines[0].root)), *HOST_KEYS}
    for machine in machines:
        assert set(marked(machine))
        for process in processes_of(machine):
            seen = process.command.encode() + process.environment
            assert not [name for name, value in needles.items() if value in seen], process.command
        files = dict(files_on(machine))
        assert set(SWEPT) <= set(files)
        assert set(holders(files.items(), needles)) == allowed
        allowed = set(HOST_KEYS)
    # The same search finds planted secrets.
    told = Path(f"/proc/{follower.pid}/environ").read_bytes()
    assert all(value.encode() in told for value in CANARIES.values())
    typed = Path(f"/proc/{follower.pid}/cmdline").read_bytes()
    assert typed and not [name for name, value in needles.items() if value in typed]
    assert_modes(operator, machines, operator_key)
    code, output = operator.do("stop", "one")
    assert code == ExitCode.OK and "no process of the run is left on any node" in output, output
    code, output = finish(follower)
    assert code == INTERRUPTED, output
    assert_nothing_is_left(machines, operator_key)
    for machine in machines:
        assert set(holders(files_on(machine), needles)) == set(HOST_KEYS)
    assert set(holders(files_in(operator.folder), needles)) == {OPERATOR_KEY}
    assert len(losses(operator.paths("one").root)) == summary(operator.paths("one").root)["steps"]


def files_in_run_key(head: Machine) -> dict[str, Path]:
    """Return the head's key files of run `one`."""
    (folder,) = (head.root / HOME / ".ssh/tileforge").glob("one.*")
    return {path.name: path for path in folder.iterdir()}


def assert_modes(operator: Operator, machines: list[Machine], operator_key: Path) -> None:
    """Only owners can read keys, and other users cannot write files of a run."""
    of_run = files_in_run_key(machines[0])
    assert {name: mode_of(path) for name, path in of_run.items()} == {
        "id_ed25519": "600",
        "id_ed25519.pub": "644",
        "known_hosts": "600",
        "ssh_config": "600",
    }
    assert mode_of(of_run["id_ed25519"].parent) == "700"
    for machine in machines:
        ssh = machine.root / HOME / ".ssh"
        assert (mode_of(ssh), mode_of(ssh / "authorized_keys")) == ("700", "600")
        assert not writable_by_others(machine.root / HOME / "tileforge")
    assert (mode_of(operator_key.parent), mode_of(operator_key)) == ("700", "600")
    assert not writable_by_others(operator.folder / "runs")
