"""Skips the tests of this folder, with a reason, if nodes in namespaces cannot be created."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from tests.orchestrate.cluster.operating import Operator
from tests.orchestrate.cluster.separate import SeparateNodes
from tests.support.left_out import leave_out

STEPS = 6

_SETPRIV = ("setpriv", "--pdeathsig=KILL", "--")
_UNSHARE = (*_SETPRIV, "unshare", "--mount", "--pid", "--fork", "--mount-proc", "true")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out this folder's tests unless root may make namespaces."""
    mine = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if mine and not _can_make_nodes():
        leave_out(
            config,
            items,
            mine,
            folder="tests/orchestrate/cluster",
            why="of runs over several nodes: they need root on Linux with the right to make mount "
            "and process namespaces.",
        )


def _can_make_nodes() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    return subprocess.run(_UNSHARE, check=False).returncode == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Two nodes, and an operator who has trained run `far` on them until it finished."""

    operator: Operator
    said: str
    """The command's output."""

    def on_head(self, name: str) -> Path:
        """Return the path of the run's file on the head."""
        return self.operator.nodes.home_of(0) / "tileforge" / "runs" / "far" / name

    def forget_others(self) -> None:
        """Remove, here and on the head, all other runs and the weights that they were given."""
        for far in (self.operator.paths("far").root, self.on_head("").parent / "far"):
            for other in far.parent.glob("[!.]*"):
                if other.is_symlink():  # `latest`
                    other.unlink()
                    other.symlink_to(far.name)
                elif other != far:
                    shutil.rmtree(other)
        shutil.rmtree(self.on_head("../../weights").resolve(), ignore_errors=True)


@pytest.fixture
def trained(trained_once: Trained) -> Iterator[Trained]:
    """For tests that look at a run's leftovers: each test finds no other run."""
    yield trained_once
    trained_once.forget_others()


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("trained")
    with SeparateNodes(folder, num_nodes=2) as nodes:
        operator = Operator(folder, nodes)
        words = operator.run_words("far", f"train.steps={STEPS}")
        words.remove("--quick")
        code, said = operator.do(*words)
        assert code == ExitCode.OK, said
        yield Trained(operator=operator, said=said)
