"""A run that learns to classify: its reports, on any number of ranks, and its checkpoints."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, pipeline

from payload.classification import accuracy, f1_scores, macro_f1
from payload.data.__main__ import main as data_main
from payload.errors import CheckpointError, ConfigError
from payload.evaluate.__main__ import main as evaluate_main
from payload.generate.__main__ import main as generate_main
from payload.models.gpt2 import PRESETS
from payload.models.spec import RankSetting
from payload.run_config import parse_run_config
from payload.train.models.classifier import Classifier
from payload.train.models.registry import load
from payload.train.tasks.classify import Classify
from payload.train.tasks.registry import open_task
from payload.train.weights import save_hf
from tests.support.launching import losses, metrics, mpirun, run, summary, train
from tests.train.alone import train_alone
from tests.train.test_model import make_model

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = {
    "animal": ["dog", "cat", "horse", "cow", "sheep"],
    "city": ["Paris", "London", "Rome", "Tokyo", "Cairo"],
    "food": ["bread", "apple", "soup", "rice", "cake"],
}
LEARNS = (
    "task.kind=classify",
    "model.n_layer=none",
    "model.n_head=none",
    "model.n_embd=none",
    "data.sequence_length=16",
    "optimizer.lr=3e-3",
    "batch.global_batch_size=12",
    "batch.micro_batch_size=2",
    "train.steps=12",
    "train.checkpoint_every=6",
)
LORA = ("adapter.kind=lora", "adapter.rank=4")


def texts(count: int = 120, seed: int = 1) -> list[tuple[str, str]]:
    """Lists of words of one kind."""
    chosen = random.Random(seed)
    kinds = [chosen.choice(list(WORDS)) for _ in range(count)]
    return [
        (" ".join(chosen.choices(WORDS[kind], k=chosen.randint(2, 20))), kind) for kind in kinds
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of 89 texts for training and 31 for validation."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [json.dumps({"text": text, "label": kind}) for text, kind in texts()]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    words = ["--task", "classify", "--source", "jsonl", "--input", str(folder / "rows.jsonl")]
    out = folder / "data"
    assert (
        data_main(["prepare", *words, "--val-fraction", "0.25", "--out", str(out), "--quiet"]) == 0
    )
    return out


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small GPT-2."""
    folder = tmp_path_factory.mktemp("base")
    save_hf(make_model(n_embd=32, n_head=2, n_layer=2, vocab_size=50_257), folder)
    return folder


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Path, data: Path, base: Path
) -> Path:
    """A run that learned the kinds."""
    folder = tmp_path_factory.mktemp("run") / "classifier"
    train_alone(folder, tiny_config, *LEARNS, f"data.dir={data}", f"model.init={base}")
    return folder


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    rows = [row for row in metrics(run_dir) if "val_loss" in row]
    return [{key: row[key] for key in row if key != "time_unix"} for row in rows]


def test_a_run_reports_accuracy_f1_and_confusion_over_all_validation_texts(trained: Path) -> None:
    first, last = (evaluations(trained)[place] for place in (0, -1))
    assert last["val_texts"] == 31 and sum(map(sum, last["val_confusion"])) == 31
    assert last["val_accuracy"] > 0.9 > first["val_accuracy"]
    assert last["val_loss"] < first["val_loss"]
    assert last["val_accuracy"] == accuracy(last["val_confusion"])
    assert last["val_f1"] == macro_f1(last["val_confusion"])
    assert summary(trained)["final_val_loss"] == last["val_loss"]
    tokens = [row["tokens"] for row in metrics(trained) if "loss" in row]
    assert tokens[0] <= 12 * 16 and tokens == sorted(set(tokens))


def test_scores_are_those_of_the_textbook() -> None:
    confusion = [[3, 1, 0], [2, 2, 0], [0, 0, 0]]
    assert accuracy(confusion) == 5 / 8
    assert f1_scores(confusion) == [6 / 9, 4 / 7, 0.0]
    assert macro_f1(confusion) == (6 / 9 + 4 / 7) / 3


@pytest.mark.ranks
@pytest.mark.parametrize(("adapter", "ranks"), [((), 3), (LORA, 2)])
def test_any_number_of_ranks_learns_and_reports_the_same(
    tmp_path: Path,
    tiny_config: Path,
    data: Path,
    base: Path,
    adapter: tuple[str, ...],
    ranks: int,
) -> None:
    settings = (*LEARNS, *adapter, f"data.dir={data}", f"model.init={base}")
    weighted = (
        *settings,
        "task.class_weights=balanced",
        "train.steps=4",
        "schedule.warmup_steps=0",
    )
    train(tmp_path / "several", tiny_config, *weighted, num_ranks=ranks)
    train_alone(tmp_path / "one", tiny_config, *weighted)
    wanted, found = evaluations(tmp_path / "one"), evaluations(tmp_path / "several")
    assert found[0] == wanted[0]
    assert found[-1]["val_confusion"] == wanted[-1]["val_confusion"]
    assert losses(tmp_path / "several") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.ranks
def test_evaluate_gives_equal_numbers_on_one_two_and_three_ranks(
    trained: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--checkpoint", str(trained), "--data", str(data), "--json")
    assert evaluate_main(words, {}) == 0
    found = [json.loads(capsys.readouterr().out.splitlines()[-1])]
    for ranks in (2, 3):
        done = run(mpirun(ranks, "-m", "payload.evaluate", *words))
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert [row.pop("world_size") for row in found] == [1, 2, 3]
    assert found[0] == found[1] == found[2]
    assert found[0]["labels"] == sorted(WORDS) and found[0]["val_texts"] == 31


def test_a_resumed_run_is_the_unbroken_one(
    tmp_path: Path,
    tiny_config: Path,
    data: Path,
    base: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    settings = (*LEARNS, f"data.dir={data}", f"model.init={base}", "train.checkpoint_every=2")
    for adapter in ((), LORA):
        whole, parts = (tmp_path / f"{name}{len(adapter)}" for name in ("whole", "parts"))
        steady = (*settings, *adapter, "schedule.kind=constant")
        train_alone(whole, tiny_config, *steady, "train.steps=4")
        train_alone(parts, tiny_config, *steady, "train.steps=2")
        # Said of every new run, and of none that goes on.
        assert caplog.messages.count("score     starts from the labels' names") == 2
        caplog.clear()
        train_alone(parts, tiny_config, *steady, "train.steps=4")
        assert not any(line.startswith("score") for line in caplog.messages)
        assert losses(parts) == losses(whole)
        names = ("adapter_model.safetensors" if adapter else "model.safetensors",)
        for name in (*names, "optimizer.safetensors"):
            place = Path("checkpoints", "step_00000004", name)
            assert (parts / place).read_bytes() == (whole / place).read_bytes()


def test_transformers_gives_the_checkpoints_labels_from_its_folder_alone(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [text for text, _ in texts(12, seed=5)]
    (tmp_path / "in.txt").write_text("\n".join(asked) + "\n")
    words = ["--classify", "--checkpoint", str(trained), "--input", str(tmp_path / "in.txt")]
    assert generate_main([*words, "--json"]) == 0
    ours = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    folder = trained / "checkpoints" / "step_00000012"
    theirs: Any = pipeline("text-classification", model=str(folder), top_k=None)
    for asking in (1, 4):
        for found, wanted in zip(ours, theirs(asked, batch_size=asking), strict=True):
            assert found["label"] == wanted[0]["label"]
            scores = {each["label"]: each["score"] for each in wanted}
            assert found["scores"] == pytest.approx(scores, abs=1e-5)
    assert AutoTokenizer.from_pretrained(folder).pad_token_id == theirs.model.config.pad_token_id


def test_an_adapters_checkpoint_gives_labels_too(
    tmp_path: Path,
    tiny_config: Path,
    data: Path,
    base: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = (*LEARNS, *LORA, f"data.dir={data}", f"model.init={base}", "optimizer.lr=0.02")
    train_alone(tmp_path, tiny_config, *settings, "train.steps=20")
    last = evaluations(tmp_path)[-1]
    capsys.readouterr()
    # The run reads 16 tokens of a text; a text is longer, and the model's context would hold it.
    words = ["--checkpoint", str(tmp_path), "--data", str(data), "--sequence-length", "16"]
    assert evaluate_main([*words, "--json"], {}) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["confusion"] == last["val_confusion"] and found["accuracy"] > 0.9
    assert (
        generate_main(
            ["--classify", "--checkpoint", str(tmp_path), "--prompt", "cow dog sheep cow horse"]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("animal\t")


def test_texts_of_a_step_are_together_with_those_of_their_length(data: Path) -> None:
    config = parse_run_config("", overrides=[f"data.dir={data}", *LEARNS], where="test")
    train_texts = open_task(config).train
    chosen = np.random.default_rng(0).permutation(train_texts.num_samples())[:12]
    arranged = train_texts.arranged(chosen)
    assert sorted(arranged) == sorted(chosen)
    sizes = [train_texts.num_tokens(arranged[place : place + 1]) for place in range(12)]
    assert sizes == sorted(sizes)
    batch = train_texts.batch(arranged[:3])
    assert batch.tokens.shape == (3, sizes[2]) and batch.weight == 3


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("task.kind=text",), "was prepared with --task classify"),
        (
            ("task.class_weights=1,2",),
            "task.class_weights = '1,2': use none, balanced, or 3 numbers",
        ),
        (("task.class_weights=1,2,-1",), "or 3 numbers above 0"),
        (("task.class_weights=heavy",), "use none, balanced, or 3 numbers"),
    ],
)
def test_a_config_that_does_not_suit_the_data_is_refused(
    data: Path, overrides: tuple[str, ...], problem: str
) -> None:
    config = parse_run_config("", overrides=[f"data.dir={data}", *LEARNS, *overrides], where="test")
    with pytest.raises(ConfigError, match=problem):
        open_task(config)


def test_a_classifier_of_other_labels_is_refused(
    trained: Path, data: Path, tiny_config: Path, tmp_path: Path
) -> None:
    config = parse_run_config("", overrides=[f"data.dir={data}", *LEARNS], where="test")
    task = open_task(config)
    assert isinstance(task, Classify)
    model = load(trained / "checkpoints" / "step_00000012")
    assert task.fitted(model, seed=1, init="x") is model
    assert isinstance(model, Classifier)
    model.labels = ("a", "b", "c")
    with pytest.raises(CheckpointError, match="'x': it classifies into a, b, c, the data's labels"):
        task.fitted(model, seed=1, init="x")


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("--classify",), 2, "--classify needs texts: --input FILE"),
        (("--classify", "--chat"), 2, "--classify takes texts from --input or --prompt alone"),
        (("--input", "x"), 2, "Add --classify"),
        (("--classify", "--input", "nowhere"), 10, "--input nowhere: No such file"),
        ((), 10, "it is a classifier"),
    ],
)
def test_generate_refuses_what_does_not_go_together(
    trained: Path,
    words: tuple[str, ...],
    code: int,
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert generate_main(["--checkpoint", str(trained), *words]) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and problem in said


def test_a_language_model_gives_no_labels(
    base: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate_main(["--classify", "--checkpoint", str(base), "--prompt", "x"]) == 10
    assert "it is a language model without labels" in capsys.readouterr().err
    assert evaluate_main(["--checkpoint", str(base), "--data", str(data)], {}) == 10
    assert torch.is_grad_enabled()


def test_a_plan_counts_a_classifier_without_logits() -> None:
    base = PRESETS["gpt2"]
    config = parse_run_config("[task]\nkind = 'classify'", where="test")
    spec = config.adapted(base)
    assert spec.num_params() == base.num_params() + 2 * base.width()
    assert spec.flops_per_token() == base.flops_per_token() - 6 * base.embedding_size()
    for kernels in (False, True):
        setting = RankSetting(
            micro_batch_size=8, dtype="bf16", kernels=kernels, alone=True, accumulates=False
        )
        assert spec.memory_bytes(setting) < base.memory_bytes(setting)
    lora = parse_run_config(
        "[task]\nkind = 'classify'\n[model]\ninit = 'x'\n[adapter]\nkind = 'lora'", where="test"
    ).adapted(base)
    adapter = lora.num_trainable_params() - 2 * base.width()
    assert adapter == sum(16 * (each.inputs + each.outputs) for each in base.linears())
    assert lora.num_params() == spec.num_params() + adapter
