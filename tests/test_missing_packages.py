"""Programs that start without the project's environment say in one line what to do."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.core.missing_packages import _fix, missing_package_error
from tests.support.launching import REPO

QUICKSTART = str(REPO / "payload" / "configs" / "quickstart.toml")
NEED_A_PACKAGE: Mapping[str, Sequence[str]] = {
    "payload": ("list",),
    "payload.data": ("prepare", "--source", "stdlib", "--out", "made"),
    "payload.evaluate": ("--checkpoint", "nowhere", "--data", "nowhere"),
    "payload.export": ("--help",),
    "payload.generate": ("--help",),
    "payload.kernels": (),
    "payload.orchestrate": ("plan", QUICKSTART),
    "payload.train": ("--config", QUICKSTART),
    "payload.train.reference": ("--data", "nowhere", "--model", "gpt2"),
}
"""Each program that imports an installed package, with a command line that gets to the import."""


@pytest.mark.processes
@pytest.mark.parametrize("program", NEED_A_PACKAGE)
def test_a_program_without_its_packages_prints_one_line(program: str, tmp_path: Path) -> None:
    # -S leaves out the installed packages, as for the system's python3.
    done = subprocess.run(
        [sys.executable, "-S", "-m", program, *NEED_A_PACKAGE[program]],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.BOOTSTRAP, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the package ") and sys.executable in line


def test_every_program_explains_a_missing_package() -> None:
    programs = sorted((REPO / "payload").rglob("*/__main__.py"))
    assert len(programs) > len(NEED_A_PACKAGE)
    for path in programs:
        before_imports = path.read_text(encoding="utf-8").partition("\nimport ")[0]
        assert "    explain_missing_packages()\n" in before_imports, path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the repository in a hostile folder, without an environment."""
    root = tmp_path / "it's a clone"
    (root / "bootstrap").mkdir(parents=True)
    shutil.copy(REPO / "pyproject.toml", root)
    (root / "bootstrap" / "install-payload.sh").touch()
    return root


def test_an_environment_that_has_the_package_is_to_be_activated(clone: Path) -> None:
    (clone / ".venv" / "lib" / "python3.11" / "site-packages" / "rich").mkdir(parents=True)
    assert _fix("rich", root=clone, cwd=clone, prefix=Path("/usr")) == (
        "Activate the environment: source .venv/bin/activate"
    )
    away = _fix("rich", root=clone, cwd=clone.parent, prefix=Path("/usr"))
    assert away.endswith(f"source {shlex.quote(f'{clone.name}/.venv/bin/activate')}")


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("rich.console", "orchestrate"),
        ("torch", "train"),
        ("numpy", "train"),
        ("google.cloud", "orchestrate"),
        ("pulumi_gcp", "infra"),
        ("prometheus_client", "monitor"),
        ("sklearn.svm", "train"),
    ],
)
def test_without_an_environment_the_extra_and_the_command_are_named(
    module: str, extra: str, clone: Path
) -> None:
    assert _fix(module, root=clone, cwd=clone, prefix=Path("/usr")) == (
        f"Install the extra {extra}: make setup && source .venv/bin/activate"
    )


def test_an_active_environment_without_the_extra_needs_only_the_set_up(clone: Path) -> None:
    fix = _fix("pulumi", root=clone, cwd=clone, prefix=clone / ".venv")
    assert fix == "Install the extra infra: make setup"
    outside = _fix("pulumi", root=clone, cwd=clone.parent, prefix=clone / ".venv")
    assert outside == f"Install the extra infra: make -C {shlex.quote(clone.name)} setup"


def test_another_environment_of_set_up_gets_the_extra_itself(clone: Path) -> None:
    prefix = clone / ".venv-node"
    prefix.mkdir()
    (prefix / ".tileforge-setup").touch()
    assert _fix("pulumi", root=clone, cwd=clone, prefix=prefix) == (
        "Install the extra infra: bash bootstrap/install-payload.sh "
        f"--venv {shlex.quote(str(prefix))} --extras infra"
    )


def test_an_installed_distribution_is_extended_with_pip(tmp_path: Path) -> None:
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    fix = _fix("rich", root=tmp_path, cwd=tmp_path, prefix=Path("/usr"))
    assert fix == "Install the extra orchestrate: pip install 'tileforge-train[orchestrate]'"


@pytest.mark.parametrize(
    "name", ["payload.nothing", "infra.nothing", "tkinter", "numpy.nothing", None]
)
def test_an_import_that_no_package_would_repair_keeps_its_traceback(name: str | None) -> None:
    assert missing_package_error(ModuleNotFoundError("no module", name=name)) is None
    assert missing_package_error(ImportError("no name", name="rich")) is None


def test_a_missing_part_of_a_namespace_is_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared_namespace" / "one").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    error = missing_package_error(ModuleNotFoundError("no module", name="shared_namespace.two"))
    assert error is not None and "the package shared_namespace is not installed" in str(error)


@pytest.mark.processes
def test_the_script_in_the_repository_finds_the_environment(clone: Path) -> None:
    script = clone / "bootstrap" / "tileforge"
    shutil.copy(REPO / "bootstrap" / "tileforge", script)
    missing = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert missing.returncode == ExitCode.BOOTSTRAP and "setup" in missing.stderr
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (clone / "payload").symlink_to(REPO / "payload")
    found = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert found.returncode == 0 and found.stdout.strip()
