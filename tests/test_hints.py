"""The commands in messages: each is run in a shell, as a user would, and works."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from payload.core.suggested_commands import command
from payload.run_record.run_files import RunPaths
from payload.run_record.suggested_run_commands import run_command

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]
_ASK = (
    "import sys; from payload.core.suggested_commands import command; print(command(*sys.argv[1:]))"
)


def hint(*words: str, cwd: Path, python: str | Path = sys.executable, **env: str) -> str:
    """Return the hint that a process started in `cwd` with `python` prints."""
    return subprocess.run(
        [python, "-c", _ASK, *words],
        cwd=cwd,
        env=shell_environment(**env),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def shell_environment(**env: str) -> dict[str, str]:
    """Return the environment of a shell in which no virtual environment is active."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "PATH": "/usr/bin:/bin", **env}


def typed(line: str, *, cwd: Path, **env: str) -> str:
    """Run the line in a shell in `cwd` and return its output."""
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env=shell_environment(**env),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


@pytest.fixture
def linked_checkout(tmp_path: Path) -> Path:
    """Return a checkout at a hostile path whose `.venv` is this environment."""
    folder = tmp_path / "it's a $(checkout)"
    folder.mkdir()
    (folder / "payload").symlink_to(ROOT / "payload")
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def test_a_hint_names_the_environments_python_where_it_is_not_active(tmp_path: Path) -> None:
    environment = tmp_path / "a b"
    environment.symlink_to(sys.prefix)
    shell = {"PYTHONPATH": str(ROOT)}
    line = hint("orchestrate", "--help", cwd=tmp_path, python=environment / "bin/python", **shell)
    assert line.endswith(" 'a b/bin/python' -m payload.orchestrate --help")
    assert "usage:" in typed(line, cwd=tmp_path)


def test_a_hint_says_python_where_the_environment_is_active() -> None:
    active = {"PATH": f"{Path(sys.prefix, 'bin')}:/usr/bin:/bin"}
    line = hint("orchestrate", "list", cwd=ROOT, **active)
    assert line == "python -m payload.orchestrate list"
    assert "usage:" in typed(f"{line} --help", cwd=ROOT, **active)


def test_a_hint_in_the_checkout_is_short() -> None:
    line = hint("data", "--help", cwd=ROOT)
    assert "PYTHONPATH" not in line and "cd " not in line
    assert "usage:" in typed(line, cwd=ROOT)


def test_a_hint_works_in_another_folder_where_the_package_is_on_no_path(tmp_path: Path) -> None:
    """As after `PYTHONPATH=... python -m payload...`, which sets the variable for one command."""
    other = tmp_path / "x y"
    other.mkdir()
    line = hint("data", "--help", cwd=other, PYTHONPATH=f"{ROOT}:/not here")
    assert "usage:" in typed(line, cwd=other)


def test_a_hint_of_make_in_another_folder_goes_to_the_checkout_first(tmp_path: Path) -> None:
    line = hint("orchestrate", "--help", cwd=ROOT, TILEFORGE_SHELL_FOLDER=str(tmp_path))
    assert line.startswith(f"cd {ROOT} && ")
    assert "usage:" in typed(line, cwd=tmp_path)
    assert "cd " not in hint("orchestrate", cwd=ROOT, TILEFORGE_SHELL_FOLDER=str(ROOT))


def test_a_hint_quotes_what_a_shell_would_take_apart(linked_checkout: Path) -> None:
    python = linked_checkout / ".venv" / "bin" / "python"
    shell = {"PYTHONPATH": str(linked_checkout)}
    words = ("orchestrate", "list", "--runs-dir", "it's $(here); a b")
    line = hint(*words, cwd=linked_checkout, python=python, **shell)
    assert ".venv/bin/python -m payload.orchestrate" in line
    (linked_checkout / words[-1]).mkdir()
    typed(line, cwd=linked_checkout)


def test_no_message_names_a_command_in_words_of_its_own() -> None:
    """All suggested `python -m payload...` commands are from one module."""
    found = []
    for path in sorted((ROOT / "payload").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "python" not in text or "-m" not in text:
            continue  # few files remain to parse
        tree = ast.parse(text)
        prose = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "python -m" in node.value
            and id(node) not in prose
        ]
    assert found == []


def test_no_message_installs_a_package_by_the_program_s_name() -> None:
    """The owner of a name on the public index controls what `pip install NAME` runs."""
    found = [
        f"{path.relative_to(ROOT)}: {match.group()!r}"
        for folder in ("payload", "infra", "bootstrap", "docs")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".sh", ".md", ".toml", ".yaml")
        for match in _INSTALLS_OURS.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "tileforge-train"


_INSTALLS_OURS = re.compile(r"pip install[\s\w=.'\"-]{0,60}?['\"\s]tileforge\b")


def test_a_hint_of_this_process_names_the_program() -> None:
    assert command("orchestrate", "up").endswith("-m payload.orchestrate up")


def test_a_hint_about_a_run_names_the_folder_of_runs_unless_it_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("status", RunPaths(Path("runs/one"))).endswith("orchestrate status one")
    below = run_command("run --resume", RunPaths(tmp_path / "my runs" / "one"))
    assert below.endswith("orchestrate run --resume one --runs-dir 'my runs'")
    outside = run_command("stop", RunPaths(tmp_path.parent / "one"))
    assert outside.endswith(f"orchestrate stop one --runs-dir {tmp_path.parent}")
