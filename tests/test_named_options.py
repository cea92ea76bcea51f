"""Every command and option that a message or a docs page names exists."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from payload.cli.commands import BY_NAME
from payload.report.__main__ import compare_parser
from tests.cli.parsers import all_parsers, options_of
from tests.support.named_options import (
    PROGRAMS,
    command_calls,
    declared_options,
    mentions,
    named_commands,
    named_modules,
    texts_of,
)

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = {
    "apptainer": "homepath",
    "find and tar": "no-same-owner type",
    "gcloud": "billing-account disk global key key-file keyring location member no-auto-delete "
    "no-deletion-protection recursive role",
    "gcloud iap": "listen-on-stdin verbosity",
    "mpirun and numactl": "membind",
    "nvidia-smi": "gpu-reset",
    "pip": "dest extra-index-url no-build-isolation",
    "pulumi": "event-log exclude-protected local no-select non-interactive path replace show-name "
    "show-urns skip-preview target-dependents",
    "cloud-init": "long",
    "CSS variables of the report": "c1 compute",
    "slurm": "allocations batch cpu-bind cpus-per-task distribution exclusive gpus-per-node hint "
    "job-name jobs kill-on-bad-exit me mem mpi nodelist noheader ntasks ntasks-per-node open-mode "
    "option output overcommit overlap parsable parsable2 requeue signal time",
    "timeout": "kill-after",
    "torchrun": "local-addr log-dir master-addr master-port max-restarts nnodes node-rank "
    "nproc-per-node rdzv-backend rdzv-conf rdzv-endpoint rdzv-id signals-to-handle",
    "uv": "constraints default-index extra fork-strategy no-annotate no-config no-header "
    "no-strip-extras output-file python-version universal",
}
"""Options of other programs, and CSS variables, without the dashes."""
_FOREIGN_OPTIONS = frozenset(f"--{name}" for names in FOREIGN.values() for name in names.split())
_NOT_COMMANDS = frozenset({"and", "or"})
"""Words that follow the name of the project in a sentence."""


def python_files() -> list[Path]:
    """Return every Python file that prints messages."""
    tops = ("payload", "infra", "bootstrap")
    return [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]


def pages() -> list[Path]:
    """Return the pages of the root, except the history, and the docs pages."""
    names = ("README.md", "CONTRIBUTING.md", "AGENTS.md")
    return [*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """Return the options of each command by its name, and by its program and verb."""
    found: dict[str, set[str]] = {}
    for name, parser in all_parsers().items():
        found[name] = options_of(parser)
        program, _, verb = name.partition(" ")
        if verb and program in ("cli", "orchestrate"):
            found[verb] = found[name]
    return found | {"prepare": found["data prepare"], "compare": options_of(compare_parser())}


def test_every_option_in_a_message_exists(options: dict[str, set[str]]) -> None:
    """Without a command, in any of our programs or in the list of other programs' options."""
    files = python_files()
    scripts = sorted((ROOT / "bootstrap").glob("*.sh"))
    declared = {each for path in (*files, *scripts) for each in declared_options(path)}
    declared.update(*options.values())
    commands, used, wrong = {*options, *PROGRAMS}, set(), []
    for path in files:
        for line, text in (*texts_of(path), *command_calls(path)):
            where = f"{path.relative_to(ROOT)}:{line}"
            for each in mentions(text, where=where, commands=commands):
                if each.option in _FOREIGN_OPTIONS and each.command not in options:
                    used.add(each.option)
                elif each.option not in options.get(each.command or "", declared):
                    wrong.append(each)
    assert wrong == []
    assert _FOREIGN_OPTIONS - used == set(), "these options are no longer named"


def test_every_command_in_a_message_exists() -> None:
    wrong = [
        (f"{path.relative_to(ROOT)}:{line}", name)
        for path in python_files()
        for line, text in texts_of(path)
        for name in (*named_commands(text), *named_modules(text))
        if not _exists(name)
    ]
    assert wrong == []


def test_every_command_and_its_options_in_the_docs_exist(options: dict[str, set[str]]) -> None:
    wrong = []
    for path in pages():
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for number, line in enumerate(text.splitlines(), start=1):
            where = f"{path.name}:{number}"
            wrong += [
                (where, f"{each.command} {each.option}")
                for each in mentions(line, where=where, commands={*options, *PROGRAMS})
                if each.option not in options.get(each.command or "", {each.option})
            ]
            names = (*named_commands(line), *named_modules(line))
            wrong += [(where, name) for name in names if not _exists(name)]
    assert wrong == []


def _exists(name: str) -> bool:
    if name.startswith("payload."):
        return find_spec(name) is not None
    return name in BY_NAME or name in _NOT_COMMANDS


@pytest.mark.parametrize(
    ("text", "command", "option"),
    [
        ("Use run --resume RUN --grce 3.", "run", "--grce"),
        ("error: {}. Type: tileforge data prepare --source {} --outt x", "data prepare", "--outt"),
        ("`prepare --task chat` wrote it; --nothing", None, "--nothing"),
        ("gcloud compute list --project {}", "gcloud", "--project"),
    ],
)
def test_an_option_belongs_to_the_command_before_it(
    text: str, command: str | None, option: str
) -> None:
    names = {"run", "data prepare", "prepare", "list", *PROGRAMS}
    found = {each.option: each.command for each in mentions(text, where="x", commands=names)}
    assert found[option] == command
