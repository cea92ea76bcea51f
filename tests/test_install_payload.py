"""Runs bootstrap/install-payload.sh on locks of a few tiny packages, without a network."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from bootstrap.make_lock import read_lock
from tests.support.sampled import sampled
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bootstrap" / "install-payload.sh"
CLOSED = "http://127.0.0.1:9"
"""An address that refuses connections, so no index can be reached."""
TORCH_BUILDS = (
    *("torch==2.13.0  # train", "torch==2.13.0+cpu  # train"),
    "nvidia_cublas==13.0  # train-cuda",
)


def make_wheel(folder: Path, name: str, version: str, *, requires: Sequence[str] = ()) -> Path:
    """Write a wheel with one empty module."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def write_lock(folder: Path, *lines: str) -> Path:
    """Write a lock with these lines, and with the hashes of all these wheels below the folder."""
    text = "# A lock\n"
    for line in lines:
        name, version = re.split(r"[=\[]", line)[0], line.split(" ")[0].rpartition("==")[2]
        text += f"{line}\n"
        for wheel in sorted(folder.rglob(f"{name}-{version}-*.whl")):
            text += f"    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    path = folder / "requirements.lock"
    path.write_text(text, encoding="utf-8")
    return path


def install(*arguments: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script without a reachable package index."""
    return subprocess.run(
        ["bash", SCRIPT, "--python", sys.executable, *arguments],
        cwd=cwd,
        env={
            **os.environ,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": CLOSED,
            "PIP_RETRIES": "0",
            "PIP_FIND_LINKS": "",
            **env,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def install_torch(
    lock: Path, links: Path, *arguments: str, cwd: Path, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the script for the extra `train`, with packages only from a folder of links."""
    return install(
        *("--lock", lock, "--extras", "train", "--torch-index", CLOSED),
        *arguments,
        cwd=cwd,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(links),
        **env,
    )


def installed(venv: Path) -> set[str]:
    """Return `name==version` of the packages in an environment, except pip's."""
    folders = venv.glob("lib/python*/site-packages/*.dist-info")
    found = {folder.name.removesuffix(".dist-info").replace("-", "==") for folder in folders}
    return {each for each in found if each.partition("==")[0] not in ("pip", "setuptools")}


@pytest.mark.slow
def test_it_installs_the_extras_asked_for_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    wheels = tmp_path / "it's a wheelhouse"
    for name in ("alpha", "beta", "gamma"):
        make_wheel(wheels, name, "1.0")
    lock = write_lock(
        tmp_path,
        "alpha==1.0  # dev, train",
        "beta==1.0 ; python_version >= '3.11'  # train",
        "gamma==1.0  # dev",
        "delta==1.0 ; sys_platform == 'nowhere'  # train",
    )
    options: list[str | Path] = ["--lock", lock, "--wheelhouse", wheels, "--venv", tmp_path / "v"]

    # In a folder with modules of another user, which an empty entry of the path would import.
    cloned = tmp_path / "cloned"
    cloned.mkdir()
    for name in ("hashlib", "venv", "pip", "ensurepip", "importlib", "json", "re", "ssl"):
        (cloned / f"{name}.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")

    first = install(*options, "--extras", "train", cwd=cloned, PYTHONPATH=":/opt/x")
    assert first.returncode == 0, first.stderr
    assert installed(tmp_path / "v") == {"alpha==1.0", "beta==1.0"}
    assert not (tmp_path / "sprung").exists()

    again = install(*options, "--extras", "train", cwd=cloned)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert not (tmp_path / "sprung").exists()

    # Installed packages stay, and are then sufficient for the smaller request.
    assert install(*options, "--extras", "dev", cwd=tmp_path).returncode == 0
    assert installed(tmp_path / "v") == {"alpha==1.0", "beta==1.0", "gamma==1.0"}
    assert install(*options, "--extras", "train", cwd=tmp_path).stderr == ""


@pytest.mark.slow
def test_a_changed_lock_changes_versions_and_removes_what_it_no_longer_has(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "alpha", "1.0")
    make_wheel(wheels, "alpha", "2.0")
    make_wheel(wheels, "beta", "1.0")
    options: list[str | Path] = [
        "--lock",
        tmp_path / "requirements.lock",
        "--wheelhouse",
        wheels,
        "--extras",
        "train",
    ]
    write_lock(tmp_path, "alpha==1.0  # train", "beta==1.0  # train")
    assert install(*options, cwd=tmp_path).returncode == 0
    write_lock(tmp_path, "alpha==2.0  # train")
    changed = install(*options, cwd=tmp_path)
    assert changed.returncode == 0, changed.stderr
    assert "removing packages that are not in the lock: beta" in changed.stderr
    assert installed(tmp_path / ".venv") == {"alpha==2.0"}


@pytest.mark.slow
def test_an_interrupted_set_up_is_done_again_once_for_two_that_come_at_once(
    tmp_path: Path,
) -> None:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "alpha", "1.0")
    beta = make_wheel(wheels, "beta", "1.0")
    lock = write_lock(tmp_path, "alpha==1.0  # train", "beta==1.0  # train")
    options: list[str | Path] = ["--lock", lock, "--wheelhouse", wheels, "--extras", "train"]
    beta.rename(tmp_path / beta.name)
    broken = install(*options, cwd=tmp_path)
    assert broken.returncode == 30
    assert "beta" in broken.stderr
    (tmp_path / beta.name).rename(beta)
    command: list[str | Path] = ["bash", SCRIPT, "--python", sys.executable, *options]
    both = [
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=DEADLINE_S)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("installing the packages for" in each for each in said) == 1
    assert installed(tmp_path / ".venv") == {"alpha==1.0", "beta==1.0"}


@pytest.mark.slow
def test_a_cuda_build_is_announced_with_its_size_before_it_is_installed(tmp_path: Path) -> None:
    links = tmp_path / "links"
    make_wheel(links, "torch", "2.13.0", requires=["nvidia-cublas==13.0", "filelock"])
    make_wheel(links, "filelock", "4.0")
    cuda = make_wheel(links, "nvidia_cublas", "13.0")
    with zipfile.ZipFile(cuda, "a") as wheel:
        wheel.writestr("weight.bin", os.urandom(60_000_000))
    make_wheel(links, "api", "1.0")
    make_wheel(tmp_path / "on an index out of reach", "torch", "2.13.0+cpu")
    others = ("filelock==4.0  # train", "api[grpc]==1.0  # train")
    lock = write_lock(tmp_path, *TORCH_BUILDS, *others)
    # Without a terminal there is no prompt.
    unasked = install_torch(lock, links, cwd=tmp_path)
    assert unasked.returncode == 30
    assert "needs your confirmation: --torch-cuda" in unasked.stderr.splitlines()[-1]
    # The index is looked for before the environment, which takes longer, is made.
    assert not (tmp_path / ".venv" / "bin").exists() and "creating" not in unasked.stderr
    done = install_torch(lock, links, "--torch-cuda", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "api==1.0" in installed(tmp_path / ".venv")
    lines = done.stderr.splitlines()
    (note,) = [i for i, line in enumerate(lines) if "only as a CUDA build: 2 packages, 0.1" in line]
    (act,) = [i for i, line in enumerate(lines) if "installing torch==2.13.0, CUDA build" in line]
    assert note < act
    assert f"{CLOSED} cannot be reached" in done.stderr
    assert "nvidia_cublas==13.0" in installed(tmp_path / ".venv")


@pytest.mark.slow
def test_a_machine_with_a_gpu_takes_the_cuda_build_unasked_and_looks_for_no_other(
    tmp_path: Path,
) -> None:
    links = tmp_path / "links"
    make_wheel(links, "torch", "2.13.0", requires=["nvidia-cublas==13.0"])
    make_wheel(links, "nvidia_cublas", "13.0")
    make_wheel(tmp_path / "on an index out of reach", "torch", "2.13.0+cpu")
    lock = write_lock(tmp_path, *TORCH_BUILDS)
    done = install_torch(lock, links, "--torch-gpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "NOTE" not in done.stderr and CLOSED not in done.stderr
    assert installed(tmp_path / ".venv") == {"torch==2.13.0", "nvidia_cublas==13.0"}


@pytest.mark.seeds
@pytest.mark.slow
def test_a_cpu_build_on_the_plain_index_is_taken_without_ado(tmp_path: Path) -> None:
    links = tmp_path / "links"
    make_wheel(links, "torch", "2.13.0+cpu")
    lock = write_lock(tmp_path, "torch==2.13.0  # train", "torch==2.13.0+cpu  # train")
    done = install_torch(lock, links, cwd=tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr
    assert "CUDA" not in done.stderr
    assert installed(tmp_path / ".venv") == {"torch==2.13.0+cpu"}
    # Modules that runs import are compiled, also if later processes must not compile.
    assert list((tmp_path / ".venv").glob("lib/python*/site-packages/__pycache__/torch.*.pyc"))


@pytest.mark.slow
@pytest.mark.parametrize("build", sampled(("2.13.0", "2.13.0+cpu"), sample=("2.13.0",)))
def test_a_wheelhouse_with_either_build_of_torch_is_enough(build: str, tmp_path: Path) -> None:
    """As on the rig's machines and on nodes without internet: no downloads and no prompts."""
    wheels = tmp_path / "wheels"
    needs = ["nvidia-cublas==13.0"] if build == "2.13.0" else []
    make_wheel(wheels, "torch", build, requires=needs)
    make_wheel(wheels if needs else tmp_path / "elsewhere", "nvidia_cublas", "13.0")
    lock = write_lock(tmp_path, *TORCH_BUILDS)
    options: list[str | Path] = ["--lock", lock, "--wheelhouse", wheels, "--extras", "train"]
    if needs:
        write_program(tmp_path / "bin" / "df", 'printf "h\\n/dev/x 9 9 8000000 1%% /\\n"')
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        refused = install(*options, cwd=tmp_path, PATH=path)
        assert refused.returncode == 30
        assert "has 8 GB free, but needs 9 GB for the CUDA build of torch" in refused.stderr
    done = install(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "NOTE" not in done.stderr
    cuda = {"nvidia_cublas==13.0"} if needs else set()
    assert installed(tmp_path / ".venv") == {f"torch=={build}"} | cuda


def test_the_extras_with_different_torch_do_not_mix(tmp_path: Path) -> None:
    refused = install("--extras", "train,intel", cwd=tmp_path)
    assert refused.returncode == 2
    assert "different versions of torch" in refused.stderr
    assert not (tmp_path / ".venv").exists()


def old_python(folder: Path) -> Path:
    return write_program(folder / "python", '[[ $1 == --version ]] && echo "Python 3.9.2"')


def python_without_venv(folder: Path) -> Path:
    return write_program(
        folder / "python", f'[[ "$*" == *ensurepip* ]] && exit 1\nexec {sys.executable} "$@"'
    )


def write_program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_an_old_python_is_refused_with_what_it_is_and_what_to_do(tmp_path: Path) -> None:
    refused = install("--python", old_python(tmp_path), cwd=tmp_path)
    assert refused.returncode == 30
    assert "Python 3.11 or newer is required, found: Python 3.9.2." in refused.stderr


def test_a_python_without_venv_is_told_the_package_that_has_it(tmp_path: Path) -> None:
    refused = install("--python", python_without_venv(tmp_path / "p"), cwd=tmp_path)
    assert refused.returncode == 30
    assert "apt-get install python3-venv" in refused.stderr


def test_another_python_than_the_environments_is_not_ignored(tmp_path: Path) -> None:
    write_program(tmp_path / ".venv" / "bin" / "python", 'echo "Python 3.99.0"')
    refused = install("--python", sys.executable, cwd=tmp_path)
    assert refused.returncode == 2
    assert ".venv has Python 3.99.0, but --python " in refused.stderr
    assert "use another folder: --venv DIR" in refused.stderr


def test_a_full_disk_is_found_before_anything_is_installed(tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "df", 'printf "h\\n/dev/x 9 9 1200000 1%% /\\n"')
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    refused = install(cwd=tmp_path, PATH=path)
    assert refused.returncode == 30
    assert ".venv has 1 GB free, but needs 3 GB" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--extras", "trian"], "unknown extra 'trian'"),
        (["--nonsense"], "unknown argument '--nonsense'"),
        (["--venv"], "--venv needs a value"),
        (["--lock", "none.lock"], "'none.lock' does not exist"),
        (["--wheelhouse", "none"], "'none' is not a folder"),
        (["--wheelhouse", ".", "--download", "x"], "--wheelhouse and --download exclude"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(arguments: list[str], says: str, tmp_path: Path) -> None:
    refused = install(*arguments, cwd=tmp_path)
    assert refused.returncode == 2
    assert says in refused.stderr


def test_the_lock_has_every_package_of_pyproject_at_an_allowed_version() -> None:
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["optional-dependencies"]
    locked: dict[tuple[str, str], list[str]] = {}
    for line in (ROOT / "bootstrap" / "requirements.lock").read_text("utf-8").splitlines():
        if not line.startswith(("#", " ")):
            pin, extras = line.split("  # ")
            requirement = Requirement(pin)
            for extra in extras.split(", "):
                name = requirement.name.lower()
                locked.setdefault((extra, name), []).append(str(requirement.specifier)[2:])
    for extra in ("train", "orchestrate", "infra", "dev", "intel", "ccl"):
        wanted = list(groups[extra]) + (project["dependencies"] if extra != "ccl" else [])
        if "tileforge-train[trainer]" in wanted:
            wanted = [line for line in wanted if "tileforge" not in line] + groups["trainer"]
        for requirement in map(Requirement, wanted):
            versions = locked[extra, requirement.name.lower()]
            assert all(version in requirement.specifier for version in versions)


@pytest.mark.slow
def test_a_wheel_that_the_lock_does_not_know_is_refused(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "alpha", "1.0")
    lock = write_lock(tmp_path, "alpha==1.0  # train")
    make_wheel(wheels, "alpha", "1.0", requires=["evil"])
    options: list[str | Path] = ["--lock", lock, "--wheelhouse", wheels, "--extras", "train"]
    refused = install(*options, cwd=tmp_path)
    assert refused.returncode == 30
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert installed(tmp_path / ".venv") == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(("alpha", "torch"), sample=("torch",)))
def test_an_index_that_shadows_a_package_gets_nothing_installed(name: str, tmp_path: Path) -> None:
    """Dependency confusion: the same name and version on an index that pip.conf adds."""
    make_wheel(tmp_path / "ours", name, "1.0")
    lock = write_lock(tmp_path, f"{name}==1.0  # train", f"{name}==1.0+cpu  # train")
    make_wheel(tmp_path / "theirs", name, "1.0", requires=["evil"])
    make_wheel(tmp_path / "theirs", name, "1.0+cpu", requires=["evil"])
    refused = install_torch(lock, tmp_path / "theirs", cwd=tmp_path)
    assert refused.returncode == 30
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert installed(tmp_path / ".venv") == set()


@pytest.mark.slow
@pytest.mark.parametrize("build", sampled(("2.13.0", "2.13.0+cpu"), sample=("2.13.0",)))
def test_the_downloaded_wheels_of_the_lock_are_enough_for_a_set_up(
    build: str, tmp_path: Path
) -> None:
    """setuptools is in no output of `pip freeze` on Python 3.11, but in the lock."""
    index, wheels = tmp_path / "index", tmp_path / "wheels"
    needs = ["nvidia-cublas==13.0"] if build == "2.13.0" else []
    make_wheel(index, "torch", build, requires=needs)
    make_wheel(index if needs else tmp_path / "elsewhere", "nvidia_cublas", "13.0")
    if needs:
        make_wheel(tmp_path / "elsewhere", "torch", "2.13.0+cpu")
    for name in ("alpha", "setuptools", "other"):
        make_wheel(index, name, "99.0")
    lock = write_lock(
        tmp_path, *TORCH_BUILDS, "alpha==99.0  # train", "setuptools==99.0  # train",
        "other==99.0  # dev",
    )  # fmt: skip
    done = install_torch(lock, index, "--download", str(wheels), "--torch-cuda", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / ".venv").exists()
    expected = {"alpha", "setuptools", "torch", *(["nvidia_cublas"] if needs else [])}
    assert {path.name.partition("-")[0] for path in wheels.iterdir()} == expected
    assert f"{CLOSED} cannot be reached" in done.stderr
    size, following = done.stderr.splitlines()[-2:]
    assert size.startswith(f"setup: {wheels} is complete: {len(expected)} wheels, ")
    start = "setup: next, on the machine without internet: "
    command = following.removeprefix(f"{start}bash bootstrap/install-payload.sh ").split()
    offline = install("--lock", lock, *command, cwd=tmp_path)
    assert offline.returncode == 0, offline.stderr
    assert {f"torch=={build}", "alpha==99.0"} <= installed(tmp_path / ".venv")


@pytest.mark.slow
def test_a_set_up_from_wheels_names_all_that_are_missing_and_the_command_that_downloads_them(
    tmp_path: Path,
) -> None:
    wheels, names = tmp_path / "wheels", [f"p{number}" for number in range(8)]
    for name in names:
        make_wheel(tmp_path / "index", name, "1.0")
    alpha = make_wheel(wheels, "alpha", "1.0")
    alpha.rename(wheels / "alpha-1.0-cp39-cp39-none.whl")
    make_wheel(wheels, "torch", "2.13.0+cpu")
    torch = "torch==2.13.0  # train", "torch==2.13.0+cpu  # train"
    lock = write_lock(tmp_path, *torch, *(f"{name}==1.0  # train" for name in ("alpha", *names)))
    options = ("--lock", lock, "--wheelhouse", wheels, "--extras", "train")
    refused = install(*options, cwd=tmp_path)
    assert refused.returncode == 30
    last = refused.stderr.splitlines()[-1]
    python = ".".join(map(str, sys.version_info[:2]))
    assert last.startswith(f"error: {wheels} has no wheels for Python {python} on ")
    assert ": alpha==1.0, p0==1.0, p1==1.0, p2==1.0, p3==1.0 and 4 more. " in last
    assert last.endswith("install-payload.sh --extras train --download DIR")
    assert install("--from-make", *options, cwd=tmp_path).stderr.rstrip().endswith(": make wheels")


@pytest.mark.slow
def test_a_package_that_no_index_has_is_named_in_the_last_line(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, "alpha==1.0  # train")
    refused = install_torch(lock, tmp_path, cwd=tmp_path)
    assert refused.returncode == 30
    last = refused.stderr.splitlines()[-1]
    assert last == (
        f"error: pip could not install alpha==1.0, one of the packages of {lock}; "
        "its output is above."
    )


@pytest.mark.slow
def test_a_package_without_a_hash_is_refused(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, "alpha==1.0  # train")
    make_wheel(tmp_path / "wheels", "alpha", "1.0")
    options: list[str | Path] = ["--lock", lock, "--wheelhouse", tmp_path / "wheels"]
    refused = install(*options, "--extras", "train", cwd=tmp_path)
    assert refused.returncode == 30
    assert "Hashes are required" in refused.stderr


def test_every_package_of_the_lock_has_hashes_but_for_intels_own() -> None:
    lines, hashes = read_lock((ROOT / "bootstrap" / "requirements.lock").read_text("utf-8"))
    names = {re.split(r"[=\[]", line)[0] for each in lines.values() for line in each}
    hashed = {pin.partition("==")[0] for pin in hashes}
    assert names - hashed == {"oneccl_bind_pt"}
    # torch's CPU builds: Linux on two architectures, for each Python.
    assert len(hashes["torch==2.13.0+cpu"]) == 8
    assert len(hashes["torch==2.8.0+cpu"]) == 6
    assert not set(hashes["torch==2.13.0+cpu"]) & set(hashes["torch==2.13.0"])


@pytest.mark.slow
def test_ctrl_c_while_the_environment_is_made_leaves_no_traceback(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "alpha", "1.0")
    lock = write_lock(tmp_path, "alpha==1.0  # train")
    options: list[str | Path] = ["--lock", lock, "--wheelhouse", wheels, "--extras", "train"]
    process = subprocess.Popen(
        ["bash", SCRIPT, "--python", sys.executable, *options],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A background job of a shell ignores SIGINT, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until((tmp_path / ".venv" / "pyvenv.cfg").exists, what="the environment's first file")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "setup: interrupted; run the same command again to resume"
    assert "Traceback" not in said
    again = install(*options, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert installed(tmp_path / ".venv") == {"alpha==1.0"}


def test_messages_name_what_make_can_pass(tmp_path: Path) -> None:
    old = install("--from-make", "--python", old_python(tmp_path), cwd=tmp_path)
    assert "or use: PYTHON=PYTHON" in old.stderr
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {"PYTHON", "VENV", "TORCH_INDEX", "WHEELHOUSE", "TORCH_CUDA"}
    assert all(f"\n{name} ?=" in make for name in named)


@pytest.mark.slow
def test_set_up_says_every_15_s_that_it_is_at_work(tmp_path: Path) -> None:
    """A fake slow pip; the script's clock counts, so it is sped up."""
    slow = write_program(
        tmp_path / "python",
        f'[[ "$*" == "-m venv"* ]] && sleep 16\nexec {sys.executable} "$@"',
    )
    make_wheel(tmp_path / "wheels", "alpha", "1.0")
    lock = write_lock(tmp_path, "alpha==1.0  # train")
    done = install(
        *("--lock", lock, "--wheelhouse", tmp_path / "wheels", "--extras", "train"),
        *("--python", slow),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "setup: creating .venv: 15 s" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to leave files of root's")
@pytest.mark.parametrize(
    ("what", "mine"),
    [
        *((what, False) for what in (".venv", "data", "runs")),
        (".venv", True),
        *(pytest.param(what, True, marks=pytest.mark.slow) for what in ("data", "runs")),
    ],
)
def test_what_sudo_left_behind_is_named_with_its_remedy_and_ones_own_is_not(
    what: str, mine: bool, tmp_path: Path
) -> None:
    reachable = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        reachable.chmod(0o777)
        (reachable / what).mkdir()
        left = reachable / what / ".tileforge-setup.stamp"
        left.mkdir()
        if mine:
            os.chown(left, 65534, 65534)
            os.chown(left.parent, 65534, 65534)
            left.chmod(0o555)
        lock = write_lock(tmp_path, "alpha==1.0  # train")
        shutil.copy(SCRIPT, reachable)
        shutil.copy(lock, reachable)
        options = ("--python", "/usr/bin/python3", "--writable", "data", "--writable", "runs")
        nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        done = subprocess.run(
            [*nobody, "bash", "install-payload.sh", "--extras", "train", *options],
            cwd=reachable,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        shutil.rmtree(reachable)
    if mine:
        assert "another user" not in done.stderr
        return
    assert done.returncode == 30
    assert f"{what}: not writable for " in done.stderr and "another user created it" in done.stderr
    assert f"Change the owner: sudo chown -R nobody {what}" in done.stderr


def test_make_says_the_exit_code_of_what_failed() -> None:
    """make exits with 2, whatever failed."""
    python = Path(sys.prefix)
    done = subprocess.run(
        ["make", "run", f"VENV={python}", "CONFIG=missing.toml", "--old-file=data"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "MAKEFLAGS"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    code, last = done.stderr.splitlines()[-2:]
    assert code.startswith("make run: exit code ")
    assert last.endswith(f"Error {code.split()[4]}")


def test_the_script_is_clean_for_shellcheck() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    subprocess.run([shellcheck, SCRIPT, ROOT / ".ci" / "run"], check=True)
