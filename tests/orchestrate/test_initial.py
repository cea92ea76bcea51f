"""The sizes that a plan counts with are those of the weights that the run starts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from payload.config.run_config import parse_run_config
from payload.models.gpt2.spec import PRESETS
from payload.orchestrate.runs.run_input_checks import initial_spec

SMALL = {"n_layer": 3, "n_head": 2, "n_embd": 64}
CONFIG = json.dumps({**SMALL, "model_type": "gpt2", "n_positions": 256, "vocab_size": 300})


def shape(init: str) -> tuple[dict[str, int], str | None]:
    config = parse_run_config("", overrides=[f"model.init={init}"], where="test")
    found, note = initial_spec(config, vocab_size=300)
    is_preset = init != "scratch" and not Path(init).is_dir() and note is None
    assert found.vocab_size == (50_257 if is_preset else 300)
    return {name: getattr(found, name) for name in SMALL}, note


def preset(name: str) -> dict[str, int]:
    return {key: getattr(PRESETS[name], key) for key in SMALL}


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("scratch", "gpt2"),
        ("gpt2-xl", "gpt2-xl"),
        ("openai-community/gpt2-medium", "gpt2-medium"),
    ],
)
def test_names_that_are_known_have_their_sizes(init: str, expected: str) -> None:
    assert shape(init) == (preset(expected), None)


def test_a_folder_s_own_sizes_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    assert shape(str(tmp_path)) == (SMALL, None)


def test_a_run_has_the_sizes_of_its_newest_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step_00000010"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "config.json").write_text(CONFIG)
    assert shape(str(tmp_path)) == (SMALL, None)


def test_the_weights_keep_the_context_of_their_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    overrides = [f"model.init={tmp_path}", "data.sequence_length=32"]
    config = parse_run_config("", overrides=overrides, where="test")
    found, _ = initial_spec(config, vocab_size=300)
    assert (found.sequence_length, found.context()) == (32, 256)


def test_an_unknown_name_gets_a_note_about_the_guess() -> None:
    sizes, note = shape("someone/some-gpt2")
    assert sizes == preset("gpt2")
    assert note is not None
    assert "someone/some-gpt2" in note
