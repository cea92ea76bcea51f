"""A user's mistake ends in one line and the designed exit code, with no traceback."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from payload.config.run_config import load_run_config
from payload.run_record.run_files import RunPaths
from payload.train.ranks.world import World
from payload.train.setup import find_start
from payload.train.tasks.registry import open_task
from tests.support.data_folders import make_data_folder
from tests.support.launching import PYTHON, rank_env, run, train_program

pytestmark = pytest.mark.processes

Spoil = Callable[[Path], list[str]]


def _config(text: str) -> Spoil:
    def spoil(folder: Path) -> list[str]:
        path = folder / "run.toml"
        path.write_text(path.read_text() + text)
        return []

    return spoil


def _truncated_bin(folder: Path) -> list[str]:
    path = folder / "data" / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    return []


def _no_meta(folder: Path) -> list[str]:
    (folder / "data" / "meta.json").unlink()
    return []


def _init(folder: Path, *, vocab_size: int) -> list[str]:
    from payload.models.gpt2.spec import Gpt2Spec
    from payload.train.families.gpt2.model import GPT
    from payload.train.models.hf_weights import save_hf

    (folder / "init").mkdir()
    shape = Gpt2Spec(n_layer=2, n_head=2, n_embd=32, sequence_length=32, vocab_size=vocab_size)
    save_hf(GPT(shape), folder / "init")
    return [f"model.init={folder / 'init'}"]


def _other_vocabulary(folder: Path) -> list[str]:
    return _init(folder, vocab_size=99)


def _damaged_init(folder: Path) -> list[str]:
    words = _init(folder, vocab_size=512)
    (folder / "init" / "model.safetensors").write_bytes(b"not safetensors")
    return words


def _sets(*overrides: str) -> Spoil:
    return lambda _folder: list(overrides)


@pytest.mark.parametrize(
    ("spoil", "message", "exit_code"),
    [
        (_config("[nonsense]\n"), "unknown section: 'nonsense'", 10),
        (_config("= 3\n"), "not valid TOML", 10),
        (_sets("train.steps=many"), "train.steps = 'many': must be a whole number", 10),
        (_sets("batch.micro_batch_size=3"), "is not a multiple of micro_batch_size = 3", 10),
        (
            _sets("data.dir=/nowhere"),
            "data folder /nowhere does not exist. Make it with: ",
            10,
        ),
        (_no_meta, "it is incomplete", 10),
        (_truncated_bin, "has 39,998 bytes, but meta.json lists 40,000", 10),
        (_sets("data.sequence_length=50000"), "fewer than data.sequence_length + 1", 10),
        (
            _sets("model.init=/no/such/model"),
            "model.init = '/no/such/model': the folder does not exist",
            10,
        ),
        (
            _other_vocabulary,
            "its vocabulary has 99 tokens, but the tokenizer of the data has 512",
            10,
        ),
        (_damaged_init, "not a safetensors file", 10),
        (
            _sets("engine.kind=ipex"),
            "pip install torch==2.8.0 intel-extension-for-pytorch==2.8",
            10,
        ),
        (_sets("optimizer.lr=1e6", "optimizer.grad_clip=0"), "Training diverged", 40),
    ],
)
def test_one_line_and_the_designed_exit_code(
    tmp_path: Path, tiny_config: Path, spoil: Spoil, message: str, exit_code: int
) -> None:
    data = make_data_folder(tmp_path / "data", vocab_size=512)
    config = tmp_path / "run.toml"
    original = tiny_config.read_text()
    config.write_text(original.replace(original.split('"')[1], str(data)))
    overrides = spoil(tmp_path)
    result = run([*PYTHON, *train_program(tmp_path / "run", config, *overrides)])
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert message in errors[0]
    assert result.returncode == exit_code
    assert "Traceback" not in result.stderr


def test_a_missing_config_and_a_missing_run_folder_say_what_to_name(tmp_path: Path) -> None:
    neither = run([*PYTHON, "-m", "payload.train"])
    assert neither.returncode == 2
    assert "--config FILE" in neither.stderr
    absent = run([*PYTHON, "-m", "payload.train", "--run-dir", str(tmp_path / "x")])
    assert absent.returncode == 10
    assert "No such file or directory" in absent.stderr


@pytest.mark.parametrize("backend", ["ccl", "nccl"])
def test_backends_that_are_not_here_are_refused_before_training(
    tmp_path: Path, tiny_config: Path, backend: str
) -> None:
    words = train_program(tmp_path / "run", tiny_config, f"distributed.backend={backend}")
    result = run([*PYTHON, *words])
    assert result.returncode == 10
    assert f"distributed.backend = '{backend}'" in result.stderr
    assert "gloo" in result.stderr


def test_compiling_without_a_compiler_is_refused_before_training(
    tmp_path: Path, tiny_config: Path
) -> None:
    words = train_program(tmp_path / "run", tiny_config, "engine.compile=true")
    result = run([*PYTHON, *words], env={**rank_env(), "PATH": str(tmp_path)})
    assert result.returncode == 10
    assert "apt-get install g++" in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.seed=5", "run.seed = 5, but the run's checkpoint was trained with 1337"),
        ("optimizer.name=muon", "optimizer.name = 'muon', but .* was trained with 'adamw'"),
        ("model.n_layer=3", "model.n_layer = 3, but"),
        ("data.sequence_length=16", "data.sequence_length = 16, but"),
    ],
)
def test_a_resume_that_would_be_another_run_is_refused(
    trained_run: Path, tiny_config: Path, change: str, message: str
) -> None:
    words = train_program(trained_run, tiny_config, "train.steps=6", change)
    result = run([*PYTHON, *words])
    assert result.returncode == 10
    assert re.search(message, result.stderr), result.stderr


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = train_program(folder, tiny_config, "train.steps=3")
    assert run([*PYTHON, *words]).returncode == 0
    return folder


def test_sizes_that_the_initial_weights_do_not_have_are_refused(
    trained_run: Path, tiny_config: Path, tmp_path: Path
) -> None:
    words = train_program(tmp_path, tiny_config, f"model.init={trained_run}", "model.n_layer=3")
    result = run([*PYTHON, *words])
    assert result.returncode == 10
    assert "model.n_layer = 3, but the weights of model.init have 2" in result.stderr


def test_a_preset_and_a_bias_that_the_initial_weights_do_not_have_are_said_to_be_unused(
    trained_run: Path, tiny_config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    others = ("model.n_layer=none", "model.preset=gpt2-medium", "model.bias=false")
    for changes in ((), ("model.n_layer=none", "model.preset=gpt2"), others):
        config = load_run_config(tiny_config, overrides=[f"model.init={trained_run}", *changes])
        task = open_task(config)
        caplog.clear()
        with caplog.at_level("INFO", logger="payload.train"):
            find_start(config, task, paths=RunPaths(tmp_path), world=World.from_env({}))
        said.append([text for text in caplog.messages if text.startswith("note: ")])
    assert said == [
        [],
        [],
        [
            'note: not used: model.preset = "gpt2-medium" and model.bias = false; the weights of '
            "model.init have 2 layers, 2 heads and width 32, with biases"
        ],
    ]


def test_an_error_is_left_in_the_runs_files_too(tmp_path: Path, tiny_config: Path) -> None:
    words = train_program(tmp_path / "run", tiny_config, "data.sequence_length=50000")
    assert run([*PYTHON, *words]).returncode == 10
    assert not (tmp_path / "run").exists(), "a start that is refused makes no run folder"
    (tmp_path / "run").mkdir()  # as `orchestrate run` does
    assert run([*PYTHON, *words]).returncode == 10
    record = json.loads((tmp_path / "run" / "exits" / "rank_0000.json").read_text())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert record["exit_code"] == 10
    assert (summary["status"], summary["exit_class"]) == ("failed", "config")
    assert summary["error"] == record["error"]
