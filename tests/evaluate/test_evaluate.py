"""`python -m payload.evaluate` returns transformers' loss, on one rank and on two."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.llama_cpp import add_tokenizer
from payload.core.errors import ExitCode
from payload.evaluate.__main__ import main
from payload.train.models.hf_weights import save_hf
from tests.generate.models import make_model
from tests.support.data_folders import make_data_folder
from tests.support.launching import mpirun, run

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 64
TOKENS = 1_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "model"
    folder.mkdir()
    save_hf(make_model(sequence_length=LENGTH), folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data_folder(tmp_path_factory.mktemp("evaluate") / "data", num_val_tokens=TOKENS)


def evaluate(checkpoint: Path, data: Path, *arguments: str) -> int:
    return main(["--checkpoint", str(checkpoint), "--data", str(data), *arguments], {})


def last_line(printed: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return row


def losses_of_transformers(checkpoint: Path, data: Path, *, length: int) -> list[float]:
    """Return transformers' summed loss of each block, including the token after it."""
    from transformers import GPT2LMHeadModel

    model: Any = GPT2LMHeadModel.from_pretrained(checkpoint)
    tokens = torch.from_numpy(np.fromfile(data / "val.bin", dtype="<u2").astype(np.int64))
    found = []
    for start in range(0, len(tokens) - 1, length):
        block = tokens[start : start + length + 1]
        with torch.inference_mode():
            logits = model(block[None, :-1]).logits[0]
        sums = torch.nn.functional.cross_entropy(logits.double(), block[1:], reduction="sum")
        found.append(float(sums))
    return found


@pytest.mark.parametrize(
    ("length", "max_tokens"),
    [(64, None), (32, None), (64, 200), pytest.param(64, 64, marks=pytest.mark.slow)],
)
def test_the_loss_is_that_of_transformers_over_all_blocks_or_the_first_whole_ones(
    checkpoint: Path,
    data: Path,
    length: int,
    max_tokens: int | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = losses_of_transformers(checkpoint, data, length=length)
    limit = [] if max_tokens is None else ["--max-tokens", str(max_tokens)]
    assert evaluate(checkpoint, data, "--json", "--sequence-length", str(length), *limit) == 0
    row = last_line(capsys.readouterr().out)
    # 999 targets: a block of the last 39, or of the last 7.
    count = len(expected) if max_tokens is None else max_tokens // length
    assert row["val_tokens"] == (TOKENS - 1 if max_tokens is None else count * length)
    assert row["val_loss"] == pytest.approx(sum(expected[:count]) / row["val_tokens"], abs=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(row["val_loss"]))


def test_without_json_the_result_is_for_people(
    checkpoint: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(checkpoint, data) == ExitCode.OK
    out = capsys.readouterr().out
    assert "all 999 tokens of" in out and "perplexity" in out and "blocks of 64" in out


def test_the_default_length_is_the_run_s_and_other_settings_are_noted(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = tmp_path / "trained"
    shutil.copytree(checkpoint, trained)
    config = "[data]\nsequence_length = 32\n"
    state = {"config_toml": config, "dtype": "fp32"}
    (trained / "trainer.json").write_text(json.dumps(state))
    assert evaluate(trained, data) == ExitCode.OK
    out = capsys.readouterr().out
    assert "blocks of 32" in out and "note" not in out
    (trained / "trainer.json").write_text(json.dumps(state | {"dtype": "bf16"}))
    assert evaluate(trained, data, "--sequence-length", "64") == ExitCode.OK
    out = capsys.readouterr().out
    assert "blocks of 64" in out
    assert "the run's own evaluations used: --sequence-length 32 --dtype bf16\n" in out
    assert evaluate(trained, data, "--dtype", "bf16") == ExitCode.OK
    assert "note" not in capsys.readouterr().out
    assert evaluate(trained, data, "--json") == ExitCode.OK
    row = last_line(capsys.readouterr().out)
    assert (row["sequence_length"], row["trained_sequence_length"]) == (32, 32)


def test_bf16_comes_close_to_fp32(
    checkpoint: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for dtype in ("fp32", "bf16"):
        assert evaluate(checkpoint, data, "--json", "--dtype", dtype) == ExitCode.OK
        found.append(last_line(capsys.readouterr().out)["val_loss"])
    assert found[0] != found[1] == pytest.approx(found[0], rel=0.01)


@pytest.mark.ranks
def test_two_ranks_find_what_one_finds(
    checkpoint: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(checkpoint, data, "--json") == ExitCode.OK
    rows = [last_line(capsys.readouterr().out)]
    program = ["-m", "payload.evaluate", "--checkpoint", str(checkpoint), "--data", str(data)]
    done = run(mpirun(2, *program, "--json"))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, "rank 0 alone prints the result"
    rows.append(last_line(done.stdout))
    assert [row["world_size"] for row in rows] == [1, 2]
    assert rows[0]["val_tokens"] == rows[1]["val_tokens"] == 999
    assert rows[1]["val_loss"] == pytest.approx(rows[0]["val_loss"], rel=1e-9)


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the single error line of a user's mistake."""
    assert main(arguments, {}) == ExitCode.CONFIG
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_wrong_length_names_the_longest(
    checkpoint: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--checkpoint", str(checkpoint), "--data", str(data)]
    line = complaint([*arguments, "--sequence-length", "65"], capsys)
    assert "context is 64 tokens" in line
    assert "less than one block" in complaint([*arguments, "--max-tokens", "63"], capsys)


def test_folders_that_do_not_fit_are_refused(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = make_data_folder(tmp_path / "short", num_val_tokens=64)
    other = tmp_path / "other"
    other.mkdir()
    save_hf(make_model(sequence_length=LENGTH, vocab_size=100), other)
    for model, folder, expected in (
        (checkpoint, short, "has fewer than the"),
        (checkpoint, tmp_path / "none", "none"),
        (tmp_path / "none", data, "the folder does not exist"),
        (other, data, "Prepare the text with the model's tokenizer"),
    ):
        line = complaint(["--checkpoint", str(model), "--data", str(folder)], capsys)
        assert expected in line


def test_data_of_another_tokenizer_is_refused_with_the_command_that_makes_it_right(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_hf(make_model(sequence_length=LENGTH), tmp_path)
    add_tokenizer(tmp_path)
    line = complaint(["--checkpoint", str(tmp_path), "--data", str(data)], capsys)
    assert f"--data = '{data}' was prepared with the tokenizer gpt2, but --model = " in line
    assert (
        f"-m payload.data prepare --source 'random phrases' --input PATH --tokenizer {tmp_path}"
        in line
    )


def test_weights_with_nan_are_one_clear_error(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(sequence_length=LENGTH)
    with torch.no_grad():
        model.ln_f.weight[3] = torch.nan
    save_hf(model, tmp_path)
    assert evaluate(tmp_path, data) == ExitCode.CONFIG
    assert "Training diverged" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--max-tokens", "0"], ["--dtype", "fp8"], ["--data"]])
def test_a_wrong_argument_is_a_usage_error(wrong: list[str], checkpoint: Path, data: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        evaluate(checkpoint, data, *wrong)
    assert ended.value.code == ExitCode.USAGE
