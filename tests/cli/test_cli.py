"""`tileforge`: help on one screen, working examples, and completion in a real shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.cli.commands import BY_NAME, COMMANDS, Command, help_text
from payload.cli.completion import SHELLS, command_parser
from payload.core.errors import ExitCode
from payload.core.suggested_commands import CONSOLE
from tests.support.launching import REPO
from tests.support.terminal import Terminal

pytestmark = pytest.mark.processes


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """An environment's bin folder as `make setup` leaves it, at a hostile path."""
    folder = tmp_path / "it's a $(bin)"
    folder.mkdir()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    (folder / "tileforge").symlink_to(REPO / "bootstrap" / "tileforge")
    return folder


def tileforge(bin_folder: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Type the command in `cwd`, with its folder on PATH."""
    return subprocess.run(
        ["tileforge", *words],
        cwd=cwd,
        env=os.environ | {"PATH": f"{bin_folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_help_fits_on_one_screen_and_names_every_command(
    bin_folder: Path, tmp_path: Path
) -> None:
    done = tileforge(bin_folder, "--help", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stdout == help_text("tileforge")
    # A terminal of 24 lines, with the prompt in the last one.
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    columns = [column for line in lines for column in (line[:40], line[40:])]
    assert {
        column.split()[0] for column in columns if column[:3].strip() and column[:2] == "  "
    } == set(BY_NAME)
    assert all(len(row.summary) <= 26 for row in COMMANDS)


@pytest.mark.parametrize("name", ["compare", "chat"])
def test_the_help_of_a_second_command_of_a_program_shows_that_command(
    name: str, bin_folder: Path, tmp_path: Path
) -> None:
    done = tileforge(bin_folder, name, "--help", cwd=tmp_path)
    assert done.stdout.startswith(f"usage: tileforge {name} ")
    assert f"Example: tileforge {name} " in done.stdout
    if name == "compare":
        assert "--track" not in done.stdout and "--out" not in done.stdout
    if name == "compare":
        done = tileforge(bin_folder, name, "one", "other", cwd=tmp_path)
        assert "RuntimeWarning" not in done.stderr and "no run 'one'" in done.stderr
    done = tileforge(bin_folder, name, "--bogus", cwd=tmp_path)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.endswith(f"tileforge {name}: error: unrecognized arguments: --bogus\n")


def test_every_package_with_a_command_line_has_a_command() -> None:
    programs = {path.parent.name for path in (REPO / "payload").glob("*/__main__.py")}
    # Runs start the first two, `make run` the third; users do not.
    started = {"supervise", "kernels", "first_run"}
    assert {row.package for row in COMMANDS} == (programs - started) | {"cli"}


def test_a_package_has_no_verb_that_the_one_command_lacks() -> None:
    known = command_parser(BY_NAME["run"]).format_help()
    verbs = [line.split()[0] for line in known.splitlines() if line.startswith("    ")]
    rows = {row.name for row in COMMANDS if row.package == "orchestrate"}
    assert rows == {verb for verb in verbs if verb in BY_NAME} and len(rows) >= 15


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: str(row.name))
def test_a_command_s_help_has_an_example_that_can_be_typed(
    row: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CONSOLE, "/bin/tileforge")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.chdir(REPO)
    parser = command_parser(row)
    with pytest.raises(SystemExit):
        parser.parse_args([*row.arguments, "--help"])
    assert parser.parse_args(example_in(capsys.readouterr().out))


def example_in(shown: str) -> list[str]:
    """Return the arguments of the first example in a help text."""
    heading, _, rest = shown.partition("xample")
    assert heading, "the help has no example"
    # A list has one example a line; a single example can span lines.
    text = rest.splitlines()[1] if rest.startswith("s:") else rest.partition("\n\n")[0]
    found = re.search(r"tileforge ([^)|]*)|-m payload\.\w+ (.*)", " ".join(text.split()))
    assert found, text
    if found[2] is not None:
        return shlex.split(found[2])
    name, *words = shlex.split(found[1])
    return [*BY_NAME[name].arguments, *words]


def test_help_loads_no_library(bin_folder: Path, tmp_path: Path) -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv = ['tileforge', '--help']\n"
        "try:\n    runpy.run_module('payload', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "known = {'payload', *sys.stdlib_module_names}\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} - known), file=sys.stderr)\n"
    )
    start = [sys.executable, "-S", "-c", program]
    done = subprocess.run(start, cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "['__main__']" or done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "also"),
    [
        ("run --help", "rich"),
        ("generate --help", "rich"),
        (
            "list --runs-dir none",
            "payload.launch.exports payload.orchestrate.runs.resolved_plan "
            "payload.estimates.run_time",
        ),
    ],
)
def test_a_quick_command_imports_no_slow_library(
    arguments: str, also: str, bin_folder: Path, tmp_path: Path
) -> None:
    slow = {"torch", "numpy", "paramiko", "google", "huggingface_hub", *also.split()}
    program = (
        "import runpy, sys\n"
        "try:\n    runpy.run_module('payload', run_name='__main__', alter_sys=True)\n"
        f"finally:\n    print(sorted({slow} & set(sys.modules)), file=sys.stderr)\n"
    )
    start = [sys.executable, "-c", program, *arguments.split()]
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(start, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]", done.stderr


def test_a_command_does_what_its_module_does_in_any_folder(
    bin_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "payload").mkdir()  # not ours
    done = tileforge(bin_folder, "list", "--runs-dir", "none", cwd=tmp_path)
    assert "none" in done.stdout + done.stderr
    done = tileforge(bin_folder, "status", "--runs-dir", "none", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    done = tileforge(bin_folder, "run", "--help", cwd=tmp_path)
    assert done.stdout.startswith("usage: tileforge run ")


@pytest.mark.parametrize(
    ("word", "fix"),
    [("trainn", "Did you mean train?"), ("x;y", "tileforge --help lists all commands.")],
)
def test_an_unknown_command_is_one_line(
    word: str, fix: str, bin_folder: Path, tmp_path: Path
) -> None:
    done = tileforge(bin_folder, word, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"error: no command {word!r}. {fix}\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_code_for_the_command(
    shell: str, bin_folder: Path, tmp_path: Path
) -> None:
    done = tileforge(bin_folder, "completion", shell, cwd=tmp_path)
    assert done.returncode == 0 and "tileforge" in done.stdout
    assert tileforge(bin_folder, "completion", "dash", cwd=tmp_path).returncode == 2


_BEGIN = {
    "bash": "export PATH={path} PS1='> '\nbind 'set enable-bracketed-paste off'\n"
    'eval "$(tileforge completion bash)"\necho ready\n',
    "zsh": "export PATH={path} PS1='> '\nautoload -Uz compinit && compinit -u\n"
    'eval "$(tileforge completion zsh)"\necho ready\n',
    "fish": "set -gx PATH (string split : {path})\n"
    "tileforge completion fish | source\necho ready\n",
}
"""A shell's own start file with completion set up as docs/guides/first_steps.md shows."""


@pytest.fixture
def terminal(
    request: pytest.FixtureRequest,
    bin_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Terminal]:
    """An interactive shell, the test's parameter, with completion."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "ZDOTDIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(home))
    rc = home / ".zshrc"
    text = _BEGIN[request.param].format(path=shlex.quote(f"{bin_folder}:/usr/bin:/bin"))
    rc.write_text(text, encoding="utf-8")
    command = {
        "bash": ["bash", "--noprofile", "--rcfile", str(rc), "-i"],
        "zsh": ["zsh", "-i"],
        "fish": ["fish", "--no-config", "-i", "-C", f"source {rc}"],
    }[request.param]
    opened = Terminal(command, columns=200, cwd=tmp_path)
    opened.read_until("ready")
    yield opened
    opened.close()


_COMPLETED = [
    ("tileforge pref", "tileforge preflight "),
    ("tileforge run --inv", "tileforge run --inventory "),
    ("tileforge prepare --source std", "tileforge prepare --source stdlib "),
    ("tileforge data ver", "tileforge data verify "),
    ("tileforge up --help-", "tileforge up --help-all "),
    ("tileforge explain schedule.w", "tileforge explain schedule.warmup_steps "),
]
_COMPLETED_TOO = [
    ("tileforge train --con", "tileforge train --config "),
    ("tileforge prepare --sou", "tileforge prepare --source "),
    ("tileforge export --format g", "tileforge export --format gguf "),
    ("tileforge completion f", "tileforge completion fish "),
    ("tileforge schema inv", "tileforge schema inventory "),
]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [*_COMPLETED, *(pytest.param(*each, marks=pytest.mark.slow) for each in _COMPLETED_TOO)],
)
@pytest.mark.parametrize("terminal", ["bash"], indirect=True)
def test_the_tab_key_completes_in_bash(terminal: Terminal, typed: str, completed: str) -> None:
    terminal.press(f"{typed}\t")
    assert completed in terminal.read_until(completed)


@pytest.mark.parametrize("terminal", ["zsh", "fish"], indirect=True)
def test_the_tab_key_completes_in_other_shells(terminal: Terminal) -> None:
    for typed, completed in (
        ("tileforge pref", "preflight"),
        ("tileforge run --inv", "--inventory"),
        ("tileforge prepare --source std", "stdlib"),
    ):
        before = len(terminal.raw())
        terminal.press(f"{typed}\t")
        # These shells draw the line again, with colours in it.
        terminal.read_until(completed, after=before)
        terminal.press("\x15")  # Ctrl-U empties the line
