"""The system message that a template adds to conversations without one is named before training."""

from __future__ import annotations

import os
import pty
import re
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import ExitCode
from payload.data.templates.chat_template import load_chat_template
from payload.data.templates.default_system import default_system, default_system_lines
from tests.data.running import data_command, environment, run_here
from tests.support.chat_data import PLAIN_TEMPLATE, conversations, make_tokenizer, write_rows

pytestmark = pytest.mark.processes

DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n' + 'You are a helpful assistant, trained\nby nobody.' "
    "+ '<|im_end|>\n' }}{% endif %}" + PLAIN_TEMPLATE
)
INSIDE_USER = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = 'Be kind.' %}"
    "{% set rest = messages %}{% endif %}"
    "{{ '<<SYS>>' + system + '<</SYS>>' }}{% for each in rest %}"
    "{{ '[' + each['role'] + ']' + each['content'] }}{% endfor %}"
)
DATED = (
    "{{ 'system: Today is Monday. ' }}{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] }}{% endif %}{{ '\n' }}{% for each in messages %}"
    "{% if each['role'] != 'system' %}{{ each['role'] + ': ' + each['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + PLAIN_TEMPLATE
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (DEFAULT, "You are a helpful assistant, trained\nby nobody."),
        (INSIDE_USER, "Be kind."),
        (PLAIN_TEMPLATE, None),
        (DATED, None),
        (NO_SYSTEM, None),
        ("no message at all", None),
        ("{{ messages[0]['content'] }}", None),
    ],
)
def test_the_default_is_what_the_template_adds_in_place_of_a_given_message(
    source: str, expected: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(source, encoding="utf-8")
    template = load_chat_template(file, tokenizer=make_tokenizer(tmp_path / "model"))
    assert default_system(template, {}) == expected
    lines = default_system_lines(template, {})
    assert len(lines) == (expected is not None)
    assert all("\n" not in line and len(line) < 300 for line in lines)


@pytest.mark.parametrize("task", ["chat", "preference"])
def test_prepare_and_its_dry_run_print_one_line(task: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": each} for each in conversations(20)]
    if task == "preference":
        rows = [{"prompt": f"a {n}", "chosen": "b", "rejected": "c"} for n in range(20)]
    write_rows(tmp_path / "rows.jsonl", rows)
    for name, template, count in (("with", DEFAULT, 1), ("without", PLAIN_TEMPLATE, 0)):
        model = make_tokenizer(tmp_path / name, template=template)
        words = ("--task", task, "--input", tmp_path / "rows.jsonl", "--tokenizer", model)
        for more in ([], ["--dry-run"]):
            done = run_here("prepare", *words, "--out", tmp_path / f"out-{name}", *more)
            assert done.returncode == ExitCode.OK, done.stderr
            line = 'own system message to conversations without one: "You are a helpful assistant'
            assert done.stderr.count(line) == count


def test_the_lines_of_prepare_fit_a_terminal_and_stay_whole_in_a_pipe(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"messages": each} for each in conversations(20)])
    model = make_tokenizer(tmp_path / "model", template=DEFAULT)
    words = ("--task", "chat", "--input", "rows.jsonl", "--tokenizer", model, "--out", "out")
    command = data_command("prepare", *words)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(command[0], command, environment({"COLUMNS": "80"}))
    printed = b""
    try:
        while part := os.read(terminal, 4096):
            printed += part
    except OSError:  # the end of a terminal's output
        pass
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, printed
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", printed.decode())
    lines = [line.rstrip() for line in plain.replace("\r", "\n").split("\n")]
    assert any(line.startswith("thoughts: ") for line in lines)
    # A path or another word longer than a line stays whole, and so does the next command.
    next_command = lines[lines.index("next:") :]
    others = [line for line in lines if len(line) > 80 and str(tmp_path) not in line]
    assert [line for line in others if line not in next_command] == []
    piped = run_here(
        "prepare",
        *words[:2],
        "--input",
        tmp_path / "rows.jsonl",
        *words[4:6],
        "--out",
        tmp_path / "again",
    )
    (thoughts,) = [line for line in piped.stderr.splitlines() if line.startswith("thoughts: ")]
    assert len(thoughts) > 80
