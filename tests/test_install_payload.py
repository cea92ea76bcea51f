"""bootstrap/install-payload.sh, run for real on locks of a few tiny packages; no network."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bootstrap" / "install-payload.sh"
CLOSED = "http://127.0.0.1:9"
"""An address that refuses: no index can be reached there."""


def make_wheel(folder: Path, name: str, version: str, *, requires: Sequence[str] = ()) -> Path:
    """A wheel with one empty module."""
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
    path = folder / "requirements.lock"
    path.write_text("# A lock\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def install(*arguments: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script where no package index can be reached."""
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
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def installed(venv: Path) -> set[str]:
    """`name==version` of the packages in an environment, but for pip's own."""
    folders = venv.glob("lib/python*/site-packages/*.dist-info")
    found = {folder.name.removesuffix(".dist-info").replace("-", "==") for folder in folders}
    return {each for each in found if each.partition("==")[0] not in ("pip", "setuptools")}


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

    first = install(*options, "--extras", "train", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert installed(tmp_path / "v") == {"alpha==1.0", "beta==1.0"}

    again = install(*options, "--extras", "train", cwd=tmp_path)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    # What an environment has, stays; and what it has then is enough for the smaller request.
    assert install(*options, "--extras", "dev", cwd=tmp_path).returncode == 0
    assert installed(tmp_path / "v") == {"alpha==1.0", "beta==1.0", "gamma==1.0"}
    assert install(*options, "--extras", "train", cwd=tmp_path).stderr == ""


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
    assert "removing what the lock no longer has: beta" in changed.stderr
    assert installed(tmp_path / ".venv") == {"alpha==2.0"}


def test_an_interrupted_set_up_is_done_again_once_for_two_that_come_at_once(
    tmp_path: Path,
) -> None:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "alpha", "1.0")
    lock = write_lock(tmp_path, "alpha==1.0  # train", "beta==1.0  # train")
    options: list[str | Path] = ["--lock", lock, "--wheelhouse", wheels, "--extras", "train"]
    broken = install(*options, cwd=tmp_path)
    assert broken.returncode == 30
    assert "beta" in broken.stderr
    make_wheel(wheels, "beta", "1.0")
    command: list[str | Path] = ["bash", SCRIPT, "--python", sys.executable, *options]
    both = [
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("installing 2 packages" in each for each in said) == 1
    assert installed(tmp_path / ".venv") == {"alpha==1.0", "beta==1.0"}


def test_a_cuda_build_is_announced_with_its_size_before_it_is_installed(tmp_path: Path) -> None:
    links = tmp_path / "links"
    make_wheel(links, "torch", "2.13.0", requires=["nvidia-cublas==13.0", "filelock"])
    make_wheel(links, "filelock", "4.0")
    cuda = make_wheel(links, "nvidia_cublas", "13.0")
    with zipfile.ZipFile(cuda, "a") as wheel:
        wheel.writestr("weight.bin", os.urandom(60_000_000))
    make_wheel(links, "api", "1.0")
    lock = write_lock(
        tmp_path, "torch==2.13.0  # train", "filelock==4.0  # train", "api[grpc]==1.0  # train"
    )
    done = install(
        "--lock",
        lock,
        "--extras",
        "train",
        "--torch-index",
        CLOSED,
        cwd=tmp_path,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(links),
    )
    assert done.returncode == 0, done.stderr
    assert "api==1.0" in installed(tmp_path / ".venv")
    lines = done.stderr.splitlines()
    (note,) = [i for i, line in enumerate(lines) if "only as a CUDA build: 2 packages, 0.1" in line]
    (act,) = [i for i, line in enumerate(lines) if "installing torch==2.13.0, CUDA build" in line]
    assert note < act
    assert f"{CLOSED} cannot be reached" in done.stderr
    assert "nvidia_cublas==13.0" in installed(tmp_path / ".venv")


def test_a_cpu_build_on_the_plain_index_is_taken_without_ado(tmp_path: Path) -> None:
    links = tmp_path / "links"
    make_wheel(links, "torch", "2.13.0+cpu")
    lock = write_lock(tmp_path, "torch==2.13.0  # train")
    done = install(
        "--lock",
        lock,
        "--extras",
        "train",
        "--torch-index",
        CLOSED,
        cwd=tmp_path,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(links),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert done.returncode == 0, done.stderr
    assert "CUDA" not in done.stderr
    assert installed(tmp_path / ".venv") == {"torch==2.13.0+cpu"}
    # What runs import is compiled, also where no process after this one may.
    assert list((tmp_path / ".venv").glob("lib/python*/site-packages/__pycache__/torch.*.pyc"))


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
    assert "Python 3.11 or newer is needed, found: Python 3.9.2." in refused.stderr


def test_a_python_without_venv_is_told_the_package_that_has_it(tmp_path: Path) -> None:
    refused = install("--python", python_without_venv(tmp_path / "p"), cwd=tmp_path)
    assert refused.returncode == 30
    assert "apt-get install python3-venv" in refused.stderr


def test_another_python_than_the_environments_is_not_ignored(tmp_path: Path) -> None:
    write_program(tmp_path / ".venv" / "bin" / "python", 'echo "Python 3.99.0"')
    refused = install("--python", sys.executable, cwd=tmp_path)
    assert refused.returncode == 2
    assert ".venv was made with Python 3.99.0, --python names Python 3." in refused.stderr
    assert "choose another --venv" in refused.stderr


def test_a_full_disk_is_found_before_anything_is_installed(tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "df", 'printf "h\\n/dev/x 9 9 1200000 1%% /\\n"')
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    refused = install(cwd=tmp_path, PATH=path)
    assert refused.returncode == 30
    assert ".venv has 1 GB free and needs 3 GB" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--extras", "trian"], "unknown extra 'trian'"),
        (["--nonsense"], "unknown argument '--nonsense'"),
        (["--venv"], "--venv needs a value"),
        (["--lock", "none.lock"], "'none.lock' does not exist"),
        (["--wheelhouse", "none"], "'none' is no folder"),
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
        if not line.startswith("#"):
            pin, extras = line.split("  # ")
            requirement = Requirement(pin)
            for extra in extras.split(", "):
                name = requirement.name.lower()
                locked.setdefault((extra, name), []).append(str(requirement.specifier)[2:])
    for extra in ("train", "orchestrate", "infra", "dev", "intel", "ccl"):
        wanted = list(groups[extra])
        if "tileforge[trainer]" in wanted:
            wanted = [line for line in wanted if "tileforge" not in line] + groups["trainer"]
        for requirement in map(Requirement, wanted):
            versions = locked[extra, requirement.name.lower()]
            assert all(version in requirement.specifier for version in versions)


def test_the_script_is_clean_for_shellcheck() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    subprocess.run([shellcheck, SCRIPT, ROOT / ".ci" / "run"], check=True)
