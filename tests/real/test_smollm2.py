"""A pretrained model, end to end: loss, continued pretraining, equal tokens, a chat, GGUF."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from payload.core.errors import ExitCode
from payload.data.tokenizers.gguf import gguf_tokenizer_folder
from payload.evaluate.__main__ import main as evaluate
from payload.export.__main__ import main as export
from payload.generate.__main__ import main as generate
from payload.models.gguf import read_gguf
from payload.models.registry import read_spec
from tests.support.launching import REPO, rank_env
from tests.support.smollm2 import kept, smollm2_folder, smollm2_gguf
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("one_thread")]

LENGTH = 128
NUM_VAL_TOKENS = 1024
STEPS = 30
PROMPT = "The capital of France is"
HARNESS = (
    "lm-eval==0.4.13",
    "chardet==7.7.0",
    "colorama==0.4.6",
    "DataProperty==1.1.1",
    "jsonlines==4.0.0",
    "lxml==6.1.3",
    "mbstrdecoder==1.1.5",
    "more-itertools==11.2.1",
    "pathvalidate==3.3.1",
    "portalocker==4.4.2",
    "pytablewriter==1.2.1",
    "sacrebleu==2.6.0",
    "tabledata==1.3.5",
    "tabulate==0.10.0",
    "tcolorpy==0.1.7",
    "typepy==2.0.0",
    "zstandard==0.25.0",
)
CAPITALS = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/capitals.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2_folder()


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data folder of docstrings of the standard library, by the model's tokenizer."""
    import argparse
    import asyncio
    import collections
    import decimal
    import inspect
    import logging
    import pathlib
    import subprocess
    import typing
    import unittest

    root = tmp_path_factory.mktemp("real")
    texts = root / "texts"
    texts.mkdir()
    modules = (argparse, asyncio, collections, decimal, logging, pathlib, subprocess, typing)
    for module in (*modules, unittest):
        found = [inspect.getdoc(each) or "" for _, each in sorted(vars(module).items())]
        (texts / f"{module.__name__}.txt").write_text("\n\n".join(found), encoding="utf-8")
    out = root / "data"
    command = ["-m", "payload.data", "prepare", "--source", "text", "--input", str(texts)]
    command += ["--tokenizer", str(model), "--val-fraction", "0.25", "--out", str(out)]
    run(command)
    return out


@pytest.fixture(scope="module")
def trained(model: Path, data: Path, large_folder: Path) -> Path:
    """Return a run of thirty small steps from the model's weights."""
    folder = large_folder / "run"
    config = folder.with_suffix(".toml")
    config.write_text(
        f"""
        [data]
        dir = "{data}"
        sequence_length = {LENGTH}
        [model]
        init = "{model}"
        [batch]
        global_batch_size = 2
        micro_batch_size = 2
        [optimizer]
        lr = 3e-5
        [schedule]
        warmup_steps = 3
        [train]
        steps = {STEPS}
        eval_tokens = {LENGTH}
        checkpoint_every = 0
        """,
        encoding="utf-8",
    )
    run(["-m", "payload.train", "--config", str(config), "--run-dir", str(folder)])
    return folder


def run(command: Sequence[str], *, threads: str = "1", deadline_s: float = DEADLINE_S) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPO,
        env=rank_env(OMP_NUM_THREADS=threads),
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def loss_of(checkpoint: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    arguments = ["--checkpoint", str(checkpoint), "--data", str(data), "--json"]
    arguments += ["--sequence-length", str(LENGTH), "--max-tokens", str(NUM_VAL_TOKENS)]
    assert evaluate(arguments, {}) == ExitCode.OK
    row: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return row


def of_transformers(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.mark.slow
def test_the_loss_is_that_of_transformers(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = loss_of(model, data, capsys)
    tokens = np.fromfile(data / "val.bin", dtype="<u2").astype(np.int64)
    reference, losses = of_transformers(model), []
    for start in range(0, NUM_VAL_TOKENS, LENGTH):
        block = torch.from_numpy(tokens[start : start + LENGTH + 1])
        with torch.inference_mode():
            logits = reference(block[None, :-1]).logits[0]
        losses.append(float(torch.nn.functional.cross_entropy(logits.double(), block[1:])))
    assert row["val_tokens"] == NUM_VAL_TOKENS
    assert row["val_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


@pytest.mark.seeds
def test_continued_pretraining_lowers_the_loss_on_text_that_was_held_out(
    model: Path, trained: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = (loss_of(each, data, capsys)["val_loss"] for each in (model, trained))
    assert after < before


@pytest.mark.seeds
def test_the_checkpoint_gives_the_same_greedy_tokens_in_transformers(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    (checkpoint,) = (trained / "checkpoints").glob("step_*")
    arguments = ["--checkpoint", str(trained), "--prompt", PROMPT, "--max-new-tokens", "24"]
    assert generate([*arguments, "--temperature", "0", "--num-samples", "1", "--json"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokens = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    whole = of_transformers(checkpoint).generate(tokens, max_new_tokens=24, do_sample=False)
    expected = tokenizer.decode(whole[0, tokens.shape[1] :], skip_special_tokens=True)
    assert sample["text"] == expected and sample["num_tokens"] > 3


def test_a_chat_turn_gets_an_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n"))
    arguments = ["--checkpoint", str(model), "--chat", "--temperature", "0", "--json"]
    assert generate(arguments) == ExitCode.OK
    row = json.loads(capsys.readouterr().out)
    assert row["text"] == "The capital of France is Paris."


@pytest.mark.seeds
def test_lm_evaluation_harness_takes_a_checkpoint_by_the_documented_command(
    trained: Path, tmp_path: Path
) -> None:
    page = (REPO / "docs" / "guides" / "models.md").read_text(encoding="utf-8")
    (line,) = [each for each in page.splitlines() if each.startswith("lm_eval ")]
    (checkpoint,) = (trained / "checkpoints").glob("step_*")
    named = "pretrained=runs/latest/checkpoints/best"
    assert named in line and " --tasks arc_easy,hellaswag " in line
    line = line.replace(named, f"pretrained={checkpoint}").replace("arc_easy,hellaswag", "capitals")
    (tmp_path / "capitals.yaml").write_text(CAPITALS.format(folder=tmp_path), encoding="utf-8")
    names = ["Paris", "Rome", "Oslo", "Madrid", "Berlin"]
    countries = ["France", "Italy", "Norway", "Spain", "Germany"]
    rows = [
        {"country": each, "choices": names, "answer": place} for place, each in enumerate(countries)
    ]
    (tmp_path / "capitals.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    harness = kept("lm-eval-0.4.13", install_harness)
    words = [*shlex.split(line)[1:], "--include_path", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words, "--output_path", str(tmp_path / "out")],
        cwd=tmp_path,
        env=rank_env(
            PYTHONPATH=f"{harness}:{REPO}",
            OMP_NUM_THREADS="2",
            HF_HUB_OFFLINE="1",
            HF_DATASETS_OFFLINE="1",
            HF_HOME=str(tmp_path / "home"),
        ),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (result,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(result.read_text())["results"]["capitals"]["acc,none"] >= 0.8


def install_harness(folder: Path) -> None:
    """Install the harness and its additional dependencies into `folder`."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, *HARNESS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_published_gguf_file_has_its_sizes_and_its_tokens(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants
    from tokenizers import Tokenizer

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    assert read_gguf(smollm2_gguf()).settings() == read_spec(model).settings()
    assert read_gguf(smollm2_gguf()).num_params() == read_spec(model).num_params()
    text = "In 1984, it's\n\n    x = 1e-5  # Grüße, 世界!"
    own, found = (
        Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
        for folder in (model, gguf_tokenizer_folder(smollm2_gguf()))
    )
    assert found == own


@pytest.mark.slow
def test_a_gguf_of_it_gives_the_same_greedy_tokens_in_transformers(
    model: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    file = tmp_path / "out.gguf"
    assert export(["--checkpoint", str(model), "--format", "gguf", "--out", str(file)]) == 0
    tokens = AutoTokenizer.from_pretrained(model)(PROMPT, return_tensors="pt")["input_ids"]
    # The weights are already in bf16, so the export rounds nothing.
    found, expected = (
        each.generate(tokens, max_new_tokens=24, do_sample=False)
        for each in (of_transformers(tmp_path, gguf_file=file.name), of_transformers(model))
    )
    assert torch.equal(found, expected)
