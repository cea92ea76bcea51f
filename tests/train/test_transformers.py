"""transformers loads a run's checkpoint directly: weights, context, tokenizer, offline."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from payload.core.errors import CheckpointError
from payload.data.tokenizers.gpt2 import gpt2_encoding
from payload.data.writing.encoder_choice import TRICKY_TEXTS
from payload.data.writing.meta import write_meta
from payload.formats.checkpoint_listing import manifest_problems
from payload.formats.data_folder import load_meta
from payload.formats.hf_folder import TOKENIZER_FILES
from payload.run_record.run_files import RunPaths
from tests.support.data_folders import make_data_folder
from tests.support.launching import TINY_RUN
from tests.support.waiting import DEADLINE_S
from tests.train.alone import train_alone

ONE_STEP = ("train.steps=1", "train.eval_tokens=64")
HOSTILE = [
    *TRICKY_TEXTS,
    "Grüße, 世界! \U0001f600\U0001f3fd",
    "\x1b[31m\x00\x7f\x9b",
    "\\u0000 \\n ${HOME} $(rm -rf /) '; DROP TABLE",
    "\u202ertl\u202c a\u0300\u0301\u0302 \ufffd\ufeff",
    "a<|endoftext|><|endoftext|> <|endoftext",
]
READER = """
import json, sys
from transformers import AutoTokenizer
folder, texts = sys.argv[1], json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = [tokenizer(text)["input_ids"] for text in texts]
said = None
if sys.argv[2:] == ["pipeline"]:
    from transformers import pipeline
    generate = pipeline("text-generation", folder)
    said = generate("def main", max_new_tokens=5, do_sample=False)[0]["generated_text"]
json.dump({"size": len(tokenizer), "ids": ids, "back": [tokenizer.decode(i) for i in ids],
           "said": said, "longest": tokenizer.model_max_length}, sys.stdout)
"""


def config_for(folder: Path, data: Path) -> Path:
    path = folder / "config.toml"
    path.write_text(TINY_RUN.format(data=data), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def gpt2_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data_folder(tmp_path_factory.mktemp("data") / "gpt2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, gpt2_data: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = config_for(folder, gpt2_data)
    train_alone(folder / "run", config, "data.sequence_length=64", *ONE_STEP)
    return RunPaths(folder / "run").checkpoint(1)


def read_offline(folder: Path, texts: list[str], *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", READER, str(folder), *words],
        input=json.dumps(texts),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [(), pytest.param(("pipeline",), marks=pytest.mark.slow)],
    ids=["AutoTokenizer", "pipeline"],
)
def test_auto_tokenizer_and_pipeline_take_a_checkpoint_offline_with_tiktokens_ids(
    checkpoint: Path, words: tuple[str, ...]
) -> None:
    result = read_offline(checkpoint, HOSTILE, *words)
    assert result["size"] == 50257
    assert result["longest"] == 64
    for text, found, back in zip(HOSTILE, result["ids"], result["back"], strict=True):
        assert found == gpt2_encoding().encode(text, allowed_special="all"), repr(text)
        assert back == text
    if words:
        assert result["said"].startswith("def main") and result["said"] != "def main"


def test_the_tokenizer_s_files_are_in_the_manifest(checkpoint: Path) -> None:
    assert not manifest_problems(checkpoint)
    (checkpoint / "tokenizer.json").rename(checkpoint / "away")
    assert manifest_problems(checkpoint) == ["tokenizer.json: missing."]
    (checkpoint / "away").rename(checkpoint / "tokenizer.json")


def test_a_model_s_own_tokenizer_and_sampling_are_copied_and_a_resume_keeps_it(
    tmp_path: Path, checkpoint: Path, gpt2_data: Path
) -> None:
    init, config = tmp_path / "init", config_for(tmp_path, gpt2_data)
    shutil.copytree(checkpoint, init)
    (init / "manifest.json").unlink()
    (init / "chat_template.jinja").write_text("{{ messages }}")
    own = json.loads((init / "tokenizer_config.json").read_text()) | {"model_max_length": 17}
    (init / "tokenizer_config.json").write_text(json.dumps(own))
    sampling = {"do_sample": True, "temperature": 0.6, "eos_token_id": [50256, 11]}
    (init / "generation_config.json").write_text(json.dumps(sampling))
    run = tmp_path / "run"
    train_alone(run, config, f"model.init={init}", *ONE_STEP)
    shutil.rmtree(init)
    train_alone(run, config, f"model.init={init}", *ONE_STEP, "train.steps=2")
    for step in (1, 2):
        written = RunPaths(run).checkpoint(step)
        assert (written / "chat_template.jinja").read_text() == "{{ messages }}"
        assert json.loads((written / "tokenizer_config.json").read_text()) == own
        assert json.loads((written / "generation_config.json").read_text()) == sampling
        assert (written / "tokenizer.json").read_bytes() == (
            checkpoint / "tokenizer.json"
        ).read_bytes()


def test_a_model_without_a_tokenizer_gets_the_one_of_the_data(
    tmp_path: Path, checkpoint: Path, gpt2_data: Path
) -> None:
    init = tmp_path / "init"
    init.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, init)
    train_alone(tmp_path / "run", config_for(tmp_path, gpt2_data), f"model.init={init}", *ONE_STEP)
    written = RunPaths(tmp_path / "run").checkpoint(1)
    assert (written / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("size", [512, 50257])
def test_data_of_another_vocabulary_never_gets_gpt2s_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    data = make_data_folder(tmp_path / "data", vocab_size=size)
    if size == 50257:
        meta = replace(load_meta(data), tokenizer="another", tokenizer_sha256="0" * 64)
        write_meta(data, meta)
    run = tmp_path / "run"
    train_alone(run, config_for(tmp_path, data), *ONE_STEP)
    written = RunPaths(run).checkpoint(1)
    assert not [name for name in TOKENIZER_FILES if (written / name).exists()]
    assert "checkpoints will have no tokenizer" in caplog.text


def test_a_model_is_not_trained_on_data_of_another_tokenizer(
    tmp_path: Path, checkpoint: Path
) -> None:
    data = make_data_folder(tmp_path / "data")
    meta = replace(load_meta(data), tokenizer="another", tokenizer_sha256="0" * 64)
    write_meta(data, meta)
    with pytest.raises(CheckpointError, match="prepared with the tokenizer another") as caught:
        train_alone(
            tmp_path / "run", config_for(tmp_path, data), f"model.init={checkpoint}", *ONE_STEP
        )
    assert f"--tokenizer gpt2 --out {data}-gpt2" in str(caught.value)


def test_a_shorter_training_sequence_leaves_the_weights_their_context(
    tmp_path: Path, checkpoint: Path, gpt2_data: Path
) -> None:
    """transformers' generate continues past data.sequence_length, up to the context's end."""
    run, config = tmp_path / "run", config_for(tmp_path, gpt2_data)
    short = (f"model.init={checkpoint}", "data.sequence_length=8", "train.eval_tokens=64")
    train_alone(run, config, *short, "train.steps=1")
    train_alone(run, config, *short, "train.steps=2")
    for step in (1, 2):
        model: Any = transformers.GPT2LMHeadModel.from_pretrained(RunPaths(run).checkpoint(step))
        assert model.config.n_positions == 64
        made = model.generate(
            model.dummy_inputs["input_ids"][:1, :4], max_new_tokens=40, eos_token_id=None
        )
        assert made.shape == (1, 44)
