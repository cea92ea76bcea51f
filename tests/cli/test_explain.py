"""`explain`: every setting in 80 columns, its conflicts, and names that are nearly right."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from payload.__main__ import _run
from payload.cli import explain
from payload.config import config_conflicts
from payload.config.conflict_examples import _EXAMPLES, all_conflicts, conflicts_of
from payload.config.setting_reference import all_settings, sections
from payload.core.errors import ExitCode
from tests.support.launching import REPO
from tests.support.terminal import Terminal


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what `explain` prints."""
    assert _run(["explain", *words]) == ExitCode.OK
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [*all_settings(), *sections()])
def test_each_explanation_fits_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, name)
    assert max(map(len, out.splitlines())) <= 80 and "\x1b" not in out
    assert (REPO / re.findall(r"docs/\S+", out)[-1]).is_file()


def test_a_setting_is_explained_with_its_value_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[batch]\nmicro_batch_size = 8\n", encoding="utf-8")
    out = shown(capsys, "batch.micro_batch_size", "--config", str(config))
    words = " ".join(out.split())
    assert out.startswith("batch.micro_batch_size\n  Sequences per rank per micro-batch; lower it")
    assert 'Default 4 Values whole number, at least 1, at most 1000000, or "auto"' in words
    assert f"Unit sequences Value 8 in {config} Docs docs/" in words
    assert "batch.global_batch_size = 32 is not a multiple of micro_batch_size = 5" in words
    assert "Resume" not in words
    assert f"Value 1024 in {config}, the default" in " ".join(
        shown(capsys, "sequence_length", "--config", str(config)).split()
    )


def test_a_setting_that_a_resume_keeps_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Resume       a resumed run keeps" in shown(capsys, "model.preset")


def test_without_a_key_all_settings_are_listed_on_one_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys).splitlines()
    names = set(re.findall(r"[\w]+", " ".join(lines)))
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert {each.key for each in all_settings().values()} | set(sections()) == names


def test_a_section_and_a_key_of_several_sections_list_their_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, "batch")
    assert "batch.global_batch_size = 32\n" in out and "batch.micro_batch_size = 4\n" in out
    out = shown(capsys, "kind")
    assert [line for line in out.splitlines() if line[:1] != " "] == [
        'task.kind = "text"',
        'adapter.kind = "none"',
        'device.kind = "auto"',
        'schedule.kind = "cosine"',
        'engine.kind = "native"',
    ]


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("batch.micro_batchsize", "Did you mean batch.micro_batch_size"),
        ("mirco_batch_size", "Did you mean batch.micro_batch_size"),
        ("optimiser", "Did you mean optimizer"),
        ("lrr", "Did you mean optimizer.lr"),
        ("zzz", "explain lists all settings."),
        ("", "explain lists all settings."),
        ("\x1b[2J", "explain lists all settings."),
    ],
)
def test_an_unknown_name_is_one_line_with_near_ones(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["explain", typed]) == ExitCode.USAGE
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: no setting '") and hint in said.err
    assert said.err.count("\n") == 1 and "\x1b" not in said.err


def test_a_wrong_config_is_refused_as_by_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[train]\nsteps = 0\n", encoding="utf-8")
    assert _run(["explain", "train.steps", "--config", str(config)]) == ExitCode.CONFIG
    assert "train.steps = 0: must be at least 1" in capsys.readouterr().err


def test_json_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, "micro_batch_size", "--json"))
    assert (found["name"], found["default"], found["unit"]) == (
        "batch.micro_batch_size",
        4,
        "sequences",
    )
    assert (found["low"], found["high"], found["words"]) == (1, 10**6, ["auto"])
    assert found["conflicts"][0]["settings"] == ["batch.global_batch_size", found["name"]]
    assert [each["section"] for each in json.loads(shown(capsys, "--json"))] == list(sections())
    assert len(json.loads(shown(capsys, "kind", "--json"))) == 5


def test_each_example_is_one_conflict_whose_fix_names_a_setting() -> None:
    assert [each.settings for each in all_conflicts()] == [
        tuple(word.partition("=")[0] for word in example) for example in _EXAMPLES
    ]
    known = all_settings()
    for conflict in all_conflicts():
        assert len(conflict.settings) >= 2 and set(conflict.settings) <= set(known)
        assert all(conflict in all_of(name, conflict.message) for name in conflict.settings)


def all_of(name: str, message: str) -> list[object]:
    """Return the conflicts of a setting; `explain` shows each message once."""
    found = [each for each in all_conflicts() if name in each.settings and each.message == message]
    assert message in [each.message for each in conflicts_of(name)]
    return list(found)


def message_patterns() -> list[re.Pattern[str]]:
    """Return a pattern for each message that config_conflicts.py can return."""
    tree = ast.parse(Path(config_conflicts.__file__).read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.FunctionDef)) and isinstance(node.body[0], ast.Expr)
    }
    found = []
    inner = {
        id(part)
        for each in ast.walk(tree)
        if isinstance(each, ast.JoinedStr)
        for part in each.values
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if not (is_text or isinstance(node, ast.JoinedStr)) or id(node) in docstrings | inner:
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        words = [each.value if isinstance(each, ast.Constant) else None for each in parts]
        if sum(len(word) for word in words if isinstance(word, str)) > 30:
            texts = (".*" if word is None else re.escape(str(word)) for word in words)
            found.append(re.compile("".join(texts), re.DOTALL))
    return found


def test_every_conflict_in_the_code_has_an_example() -> None:
    messages = [each.message for each in all_conflicts()]
    patterns = message_patterns()
    without = [each.pattern for each in patterns if not any(map(each.fullmatch, messages))]
    assert len(patterns) >= 25 and without == []


@pytest.mark.processes
def test_explain_and_schema_need_only_the_standard_library() -> None:
    for words in (["explain", "distributed.strategy", "--json"], ["schema"], ["explain"]):
        program = (
            f"import sys; sys.path.insert(0, {str(REPO)!r}); sys.argv = ['tileforge', *{words!r}]\n"
            "from payload.__main__ import main\nassert main() == 0\n"
            "known = {'payload', *sys.stdlib_module_names, '__main__'}\n"
            "print(sorted({name.split('.')[0] for name in sys.modules} - known), file=sys.stderr)\n"
        )
        start = [sys.executable, "-I", "-S", "-c", program]
        done = subprocess.run(start, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stderr.strip() == "[]", done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(("colour", "is_bold"), [("", True), ("1", False)])
def test_only_a_terminal_without_no_color_gets_bold_names(
    colour: str, is_bold: bool, tmp_path: Path
) -> None:
    command = ["env", f"NO_COLOR={colour}", f"PYTHONPATH={REPO}", sys.executable]
    terminal = Terminal(
        [*command, "-m", "payload", "explain", "train.steps"], columns=80, cwd=tmp_path
    )
    try:
        terminal.read_until("docs/")
        assert ("\x1b[1mtrain.steps\x1b[0m" in terminal.raw()) == is_bold
    finally:
        terminal.close()


def test_names_are_completed() -> None:
    action = next(each for each in explain.parser(prog="x")._actions if each.dest == "key")
    names = action.completer()  # type: ignore[attr-defined]
    assert {"batch", "batch.micro_batch_size"} <= set(names)
