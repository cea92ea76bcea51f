"""A hostile node: a real sshd whose programs return the answers that a test has written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.orchestrate.sshd import Sshd

STRINGS = (
    "",
    " ",
    ".",
    "..",
    "/",
    "//",
    "/..",
    "/var/../etc",
    "../../etc/passwd",
    "/etc/passwd",
    "/var/op/.ssh",
    "~/.ssh",
    "a/b",
    "latest",
    "-oProxyCommand=x",
    "--",
    "$(touch x)",
    "`id`",
    "; id #",
    "a b",
    "a\n",
    "a\nb",
    "a\r\nb",
    "a\0b",
    "\x1b]52;c;ZXZpbA==\x07",
    "\x1b[2J\x9b31m",
    "\u202eexe.txt",
    "\u00e4",
    "x" * 4096,
    "x" * 70_000,
    "ssh-ed25519 " + "A" * 68 + " tileforge-run:one\nssh-ed25519 " + "B" * 68 + " theirs",
)
VALUES: tuple[Any, ...] = (
    *STRINGS,
    None,
    True,
    0,
    -1,
    2**63,
    10**30,
    0.5,
    1e308,
    [],
    [None],
    [[]],
    ["/etc/passwd"],
    ["x"] * 100_001,
    {},
    {"": None},
    {"/etc/passwd": "x"},
    {"../../x": {"offset": 0, "content": ""}},
)

PUBLIC = f"ssh-ed25519 {'A' * 68} tileforge-run:one"
LOOK = {
    "home": "/home/trainer",
    "lacking": ["/opt/x"],
    "tcmalloc": "libtcmalloc.so.4",
    "port": 20_001,
    "running": "one",
    "missing": ["payload/__init__.py"],
    "has": ["data/0/meta.json"],
}

# Programs named in answers.json return those answers; all other commands run normally.
_COMMAND = """\
#!{python}
import json, os, sys
asked = os.environ["SSH_ORIGINAL_COMMAND"]
with open({answers!r}, "rb") as file:
    answers = json.load(file)
for words, answer in answers.items():
    if words in asked:
        sys.stdin.buffer.read()
        sys.stdout.write(answer + "\\n")
        sys.exit()
os.execv("/bin/sh", ["sh", "-c", asked])
"""


def command_of(folder: Path) -> str:
    """Return the line of sshd_config by which a node answers as `folder`/answers.json says."""
    program, answers = folder / "lie", folder / "answers.json"
    answers.write_text("{}", encoding="utf-8")
    text = _COMMAND.format(python=sys.executable, answers=str(answers))
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    return f"ForceCommand {program}"


def lie(node: Sshd, **answers: Any) -> None:
    """Let `node` answer for the remote programs of these names from now on."""
    said = {f"{name}.py": json.dumps(answer) for name, answer in answers.items()}
    path = node.folder.parent / "answers.json"
    path.write_text(json.dumps(said), encoding="utf-8")


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a folder but the cluster's keys."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".cluster" not in path.parts
    }
