"""The project's processes in a folder with another user's modules."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from payload.config.store_address import StoreAddress, parse_store_address
from payload.core.python_processes import SAFE_PATH, code_environment, code_path, module_command
from payload.launch.environment import Rendezvous, common_environment, launcher_environment
from payload.launch.launcher import Job, Reach
from payload.launch.launchers.registry import find
from payload.launch.plan_record import rank_arguments
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.storage.isolated_reader import watched_store
from payload.storage.store_access import check_store_access
from payload.supervise.shared_folders import _FolderProbe

REPO = Path(__file__).resolve().parents[1]
_BY_THE_LAUNCHER = {
    "payload/launch/agent_launcher.py",
    "payload/launch/launchers/torchrun.py",
    "payload/launch/plan_record.py",
    "payload/orchestrate/preflight/cluster_trial.py",
}
"""Command lines of launchers and ranks: `common_environment` has `SAFE_PATH` for them."""
_PRINTED = {"payload/core/suggested_commands.py"}


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder current that has modules with the names of ours and of the standard library.

    Returns the file that they write when one is imported.
    """
    sprung, folder = tmp_path / "sprung", tmp_path / "cloned"
    code = f"open({str(sprung)!r}, 'a').write(__name__)\nraise SystemExit(9)\n"
    for name in ("payload/__init__.py", "json.py", "argparse.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)
    monkeypatch.chdir(folder)
    # As `tileforge` and a checkout's `python -m payload` run: no variable has the code's location.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return sprung


@pytest.fixture
def store(tmp_path: Path) -> StoreAddress:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "run.toml").write_text("x")
    return parse_store_address(str(folder), setting="test")


@pytest.mark.processes
def test_the_store_helpers_take_no_code_from_the_current_folder(
    trap: Path, store: StoreAddress
) -> None:
    with watched_store(store, env=os.environ, say=print) as reader:
        assert [each.name for each in reader.entries()] == ["run.toml"]
    check_store_access(store, env=os.environ)
    assert not trap.exists()


@pytest.mark.processes
def test_a_look_at_a_shared_folder_takes_no_code_from_the_current_folder(
    trap: Path, tmp_path: Path
) -> None:
    probe = _FolderProbe(str(tmp_path), os.environ)
    try:
        process = probe._process
        assert process is not None and process.stdout is not None
        os.set_blocking(process.stdout.fileno(), True)
        assert process.stdout.readline() == b"\n"
    finally:
        probe.close()
    assert not trap.exists()


@pytest.mark.processes
def test_what_a_launcher_starts_takes_no_code_from_the_current_folder(trap: Path) -> None:
    there = common_environment(
        run_id="r",
        run_dir="/r",
        rendezvous=Rendezvous(address="127.0.0.1", port=1, interfaces={}),
        malloc="default",
        tcmalloc=None,
        oversubscribed=False,
        python_path=code_path({}),
    )
    done = subprocess.run(
        [sys.executable, *rank_arguments(Path("/r"))[:2], "--help"],
        env={**os.environ, **there},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, trap.exists()) == (0, False)


@pytest.mark.processes
@pytest.mark.parametrize("module", ["payload.supervise", "payload.orchestrate.sites.allocation"])
def test_a_module_takes_no_code_from_the_current_folder(trap: Path, module: str) -> None:
    done = subprocess.run(
        module_command(module, "--help"),
        env=code_environment({**os.environ, "PYTHONPATH": f"/absent{os.pathsep}"}),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, trap.exists()) == (0, False)


def test_the_code_is_first_on_the_path_and_an_empty_entry_is_not_handed_on() -> None:
    root = str(REPO)
    assert code_path({}) == root
    assert code_path({"PYTHONPATH": f":/a::{root}:"}) == f"{root}:/a"
    assert code_environment({"A": "b"}) == {"A": "b", "PYTHONPATH": root}
    assert SAFE_PATH == {"PYTHONSAFEPATH": "1"}


def test_an_empty_entry_is_not_handed_on_where_the_package_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("payload.core.python_processes.sysconfig.get_path", lambda name: str(REPO))
    assert code_path({"PYTHONPATH": ":/a"}) is None
    assert code_environment({"PYTHONPATH": ":/a::/b:"}) == {"PYTHONPATH": "/a:/b"}
    assert code_environment({"PYTHONPATH": ":", "A": "b"}) == {"A": "b"}


@pytest.mark.processes
def test_the_command_takes_no_code_through_an_empty_entry_of_pythonpath(
    trap: Path, tmp_path: Path
) -> None:
    console = tmp_path / "bin" / "tileforge"
    console.parent.mkdir()
    console.symlink_to(REPO / "bootstrap" / "tileforge")
    said, python = tmp_path / "said", console.with_name("python")
    python.write_text(f'#!/bin/sh\nprintf \'%s\\n\' "$PYTHONPATH" "$@" >{said}\n')
    python.chmod(0o755)
    for given, handed_on in ((":/opt/x", ":/opt/x"), ("/a b::*:", ":/a b:*"), (":", "")):
        subprocess.run(
            [console, "status", "a b"], env={**os.environ, "PYTHONPATH": given}, check=True
        )
        assert said.read_text() == f"{REPO}{handed_on}\n-P\n-m\npayload\nstatus\na b\n"
    python.unlink()
    python.symlink_to(sys.executable)
    env = {**os.environ, "PYTHONPATH": ":/opt/x"}
    done = subprocess.run([console, "--version"], env=env, capture_output=True, check=False)
    assert (done.returncode, trap.exists()) == (0, False), done.stderr


@pytest.mark.processes
def test_mpirun_takes_no_options_from_the_current_folder(trap: Path, tmp_path: Path) -> None:
    tool = tmp_path / "evil.sh"
    tool.write_text(f'#!/bin/sh\n: >{trap}\nexec "$@"\n')
    tool.chmod(0o755)
    Path("mpiexec.conf").write_text(f'-gtool "{tool}:all"\n-genv LD_PRELOAD ./evil.so\n')
    (tmp_path / "hosts").write_text("127.0.0.1\n")
    mpirun, reach = find("mpirun"), Reach(interface="lo")
    job = Job(
        executable=str(Path(sys.executable).with_name("mpirun")),
        python="/bin/echo",
        rank_arguments=("done",),
        environment={},
        world_size=1,
        ranks_per_node=1,
        nodes=1,
        hosts=tmp_path / "hosts",
        folder=tmp_path,
        rendezvous=Rendezvous(address="127.0.0.1", port=1, interfaces={}),
        reach=reach,
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = launcher_environment(os.environ, {"PATH": path, **mpirun.settings(reach)})
    done = subprocess.run(mpirun.argv(job), env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, trap.exists()) == ("done\n", "", False)


@pytest.mark.processes
def test_a_launcher_is_asked_for_its_version_outside_of_the_current_folder(
    trap: Path, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\npwd >{tmp_path}/where\necho slurm 23.11\n")
    program.chmod(0o755)
    path = f"{os.path.relpath(program.parent)}:{os.environ['PATH']}"
    found = LocalAccess({**os.environ, "PATH": path}).executable(find("srun"))
    assert Path(found).resolve() == program
    assert (tmp_path / "where").read_text() == "/\n"


@pytest.mark.parametrize("script", sorted((REPO / "bootstrap").glob("*.sh")), ids=lambda s: s.name)
def test_a_script_that_starts_python_looks_for_no_module_in_the_current_folder(
    script: Path,
) -> None:
    text = script.read_text(encoding="utf-8")
    starts = re.search(r"python3?\"? -", text)
    said = re.search("^export PYTHONSAFEPATH=1", text, re.M)
    assert starts is None or (said is not None and said.start() < starts.start())


def test_every_module_is_started_by_module_words() -> None:
    """`-m` without `-P` before it: the current folder's modules come first."""
    found = set()
    for path in sorted((REPO / "payload").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List | ast.Tuple):
                words = [each.value if isinstance(each, ast.Constant) else 0 for each in node.elts]
                if "-m" in words and "-P" not in words:
                    found.add(path.relative_to(REPO).as_posix())
    assert found == _BY_THE_LAUNCHER | _PRINTED
