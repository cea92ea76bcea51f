"""Fixtures that several folders share, parallel groups of tests, and the list of skipped tests."""

from __future__ import annotations

import gc
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from payload.machines.core_speed import has_bf16
from tests.support import fork_server, groups, started_processes, stress, timed_groups
from tests.support.accelerate_state import forget_accelerate
from tests.support.data_folders import make_data_folder
from tests.support.launching import TINY_RUN
from tests.support.left_out import leave_out, notes
from tests.support.long_tests import require_marks_in_files
from tests.support.machine_speed import use_table_of_speeds
from tests.support.memory_folder import use_memory, use_own_state
from tests.support.prometheus import leave_out_without_prometheus
from tests.support.small_disk import SmallDisk


@pytest.fixture(autouse=True)
def accelerate_forgets() -> Iterator[None]:
    """Reset Accelerate's state: the tests of a worker train with several precisions."""
    yield
    forget_accelerate()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a vocabulary of 512."""
    return make_data_folder(tmp_path_factory.mktemp("data") / "tiny", vocab_size=512)


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """A run.toml that trains 20 steps in seconds."""
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(TINY_RUN.format(data=tiny_data), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def promtool() -> str:
    """Prometheus's checker; its tests are skipped if Prometheus is missing."""
    found = shutil.which("promtool")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def large_folder() -> Iterator[Path]:
    """A folder on the disk, for gigabytes: `tmp_path` may be in memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def own_bases(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept the tests' models as bases of adapters that no run made."""
    monkeypatch.setenv("TILEFORGE_ADAPTER_BASE", str(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the ranks do: matmuls on several threads sum in another order.

    With small models they also need several times the processor time, waiting for each other.
    """
    import torch  # takes seconds, and most tests do not need it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system of some megabytes, for a test to fill."""
    with SmallDisk(tmp_path / "small") as disk:
        yield disk


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable garbage collection, for tests that parse deeply nested input.

    Finalizers that run just below the recursion limit fail, and pytest then fails the test.
    """
    gc.disable()  # without collecting first, which takes 0.2 s with the libraries loaded
    yield
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--stress`."""
    stress.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Use temporary folders in memory, keep compiled modules, spin less, and enable Ctrl-C.

    Background processes of a shell ignore Ctrl-C, and so do their children.
    """
    for plugin in (groups, started_processes, stress, timed_groups):
        config.pluginmanager.register(plugin)
    use_memory()
    use_own_state()
    use_table_of_speeds()
    # Containers set it. Each of the thousands of processes would compile the payload itself: half
    # of the 0.5 s of processor time in which a command of the operator starts.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Before torch is loaded. At the end of each parallel region libgomp's threads spin on a core
    # that the other worker needs: with small models that is most of the processor time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fork_server.remember_environment()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest groups first, and skip tests that mount file systems if impossible."""
    require_marks_in_files(items)
    items.sort(key=lambda item: groups.place_of(item.nodeid))
    leave_out_without_prometheus(config, items)
    if has_bf16() is False or platform.machine() != "x86_64":
        leave_out(
            config,
            items,
            [item for item in items if item.get_closest_marker("bf16")],
            folder="tests, marked bf16",
            why="of kernels for layers: torch has no bf16 matmuls of blocks for this CPU.",
        )
    if not (sys.platform == "linux" and os.geteuid() == 0):
        leave_out(
            config,
            items,
            [item for item in items if "small_disk" in getattr(item, "fixturenames", ())],
            folder="tests/support/small_disk.py",
            why="that fill a disk: they need root on Linux, to mount one.",
        )


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, and collect rarely.

    Collection is a sixth of the processor time of the tests that start no process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the list of skipped tests from a worker of pytest-xdist."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = notes(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive the list from a worker."""
    notes(node.config).update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the skipped tests at the end of the output."""
    for folder, note in sorted(notes(config).items()):
        terminalreporter.section(folder, yellow=True, bold=True)
        terminalreporter.write_line(note, yellow=True, bold=True)
