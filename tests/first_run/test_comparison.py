"""Records of functions, the number of steps, and the comparison that the command prints."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from payload.config.run_config import load_run_config
from payload.core.errors import ConfigError
from payload.first_run.__main__ import CONFIG, step_settings
from payload.first_run.comparison import Shown, answers_text, scores, scores_text
from payload.first_run.function_records import (
    EXAMPLES,
    FunctionRecord,
    record_of,
    split,
    standard_library,
)
from payload.first_run.step_budget import MIN_STEPS, step_seconds, steps_within_budget
from payload.models.registry import read_spec
from payload.models.spec import ModelSpec


def _record(code: str) -> FunctionRecord | None:
    (node,) = ast.parse(code).body
    assert isinstance(node, ast.FunctionDef)
    return record_of(node)


def test_a_record_has_the_name_the_arguments_and_the_first_sentence() -> None:
    found = _record(
        "@cache\ndef cut(self, text, /, *rest, at=0, **more):\n"
        '    """Return the text before\n    the position.  More."""\n    return text[:at]\n'
    )

    assert found is not None
    assert found.answer == {
        "function": "cut",
        "arguments": ["text", "rest", "at", "more"],
        "summary": "Return the text before the position.",
    }
    assert found.code == "def cut(self, text, /, *rest, at=0, **more):\n    return text[:at]"


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    return x",
        'def f(x):\n    """Return the argument as it is."""',
        'def _f(x):\n    """Return the argument as it is."""\n    return x',
        'def f(x):\n    """Short."""\n    return x',
        'def f(x):\n    """Return the argument, without a full stop"""\n    return x',
        'def f(x):\n    """Gibt das Argument zurück, unverändert."""\n    return x',
        f'def f(x):\n    """Return the argument as it is."""\n    return {"x + " * 60}x',
    ],
)
def test_unsuitable_functions_are_left_out(code: str) -> None:
    assert _record(code) is None


@pytest.mark.slow
def test_held_out_functions_are_not_in_training_and_do_not_depend_on_the_order() -> None:
    records = list(standard_library())
    training, held_out = split(records)

    assert len(held_out) == 20 and len(training) > 500
    assert not {each.code for each in training} & {each.code for each in held_out}
    assert split(reversed(records)) == (training, held_out)
    assert not {each.code for each in records} & set(EXAMPLES)


def test_answers_are_counted_if_they_are_records_and_if_they_are_right() -> None:
    right = {"function": "f", "arguments": ["x"], "summary": "Anything."}
    records = [FunctionRecord(code="def f(x): ...", answer=right)] * 5
    answers = [
        json.dumps({**right, "summary": "Another sentence."}),
        json.dumps({**right, "arguments": []}),
        json.dumps({**right, "more": 1}),
        f"Here it is: {json.dumps(right)}",
        "[]",
    ]

    found = scores(records, answers, loss=1.5)

    assert (found.parsed, found.correct, found.total, found.loss) == (2, 1, 5, 1.5)


@pytest.mark.parametrize("columns", [120, 80, 50])
def test_the_answers_fit_the_terminal(columns: int) -> None:
    hostile = "[bold]This \x1b[2Jfunction " + "returns the given text " * 30
    shown = [Shown(code=EXAMPLES[0], before=hostile, after='{"function": "f"}')]

    text = answers_text(shown, columns=columns)

    assert max(map(len, text.splitlines())) <= max(columns, 65)
    assert "[bold]This" in text and "\x1b" not in text
    assert ("before: [bold]" in text) == (columns == 50)


def test_the_table_fits_80_columns_and_has_both_losses() -> None:
    one, other = (scores([], [], loss=loss) for loss in (2.6, 0.88))
    lines = scores_text(one, other).splitlines()

    assert max(map(len, lines)) <= 80
    assert lines[1].split()[-2:] == ["2.60", "0.88"]


SIZES = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30}
SIZES |= {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
SIZES |= {"max_position_embeddings": 8192, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    """Return the spec of the packaged model."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
    return read_spec(tmp_path)


def _measured(bf16: float, fp32: float) -> dict[str, object]:
    return {
        "measured": {"nodes": {"a": {"bf16_flops_per_s": bf16, "fp32_flops_per_s": fp32}}},
        "nodes": {"a": {"facts": {"physical_cores": 2}}},
    }


def test_a_slower_machine_trains_fewer_steps(spec: ModelSpec) -> None:
    config = load_run_config(CONFIG)
    seconds = [step_seconds(config, spec, _measured(bf16, 2e11)) for bf16 in (2.4e12, 6e11, 2e11)]

    assert seconds == sorted(seconds)
    fewest, *_, most = sorted(steps_within_budget(each, most=60) for each in seconds)
    assert MIN_STEPS <= fewest < most == 60
    assert all(
        each * steps_within_budget(each, most=60) <= 120
        or steps_within_budget(each, most=60) == MIN_STEPS
        for each in seconds
    )


@pytest.mark.parametrize("steps", [1, 3, 4, 60])
def test_any_number_of_steps_is_a_valid_run(steps: int) -> None:
    config = load_run_config(CONFIG)
    found = load_run_config(CONFIG, overrides=step_settings(config, steps))
    assert found.train.steps == steps
    assert found.schedule.warmup_steps == (0 if steps < 4 else config.schedule.warmup_steps)


@pytest.mark.parametrize("found", [{}, {"measured": None, "nodes": {}}])
def test_a_preflight_without_measurements_is_refused(
    spec: ModelSpec, found: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="measured no speed"):
        step_seconds(load_run_config(CONFIG), spec, found)
