"""A run of the task classify: its reports and its checkpoints."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from payload.config.run_config import parse_run_config
from payload.core.errors import CheckpointError, ConfigError, DataError
from payload.data.reading.blocks import Indices
from payload.evaluate.__main__ import main as evaluate_main
from payload.evaluate.classify import open_texts
from payload.export.__main__ import main as export_main
from payload.formats.data_folder import DataMeta, load_meta
from payload.formats.hf_folder import label_names
from payload.generate.__main__ import main as generate_main
from payload.models.gpt2.spec import PRESETS
from payload.models.spec import RankSetting
from payload.orchestrate.runs.run_input_checks import tokens_of_data
from payload.run_record.classification import accuracy, f1_scores, macro_f1
from payload.train.losses.classification import Classification
from payload.train.models.classifier import Classifier, saved_labels
from payload.train.models.loading import load
from payload.train.tasks.classify import Classify
from payload.train.tasks.registry import open_task
from payload.train.tasks.sample_order import similar_lengths
from tests.support.launching import losses, metrics, summary
from tests.train.alone import train_alone
from tests.train.task_runs import (
    CLASSIFY,
    LORA,
    classify_base,
    classify_data,
    classify_texts,
    evaluations,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classify_data(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = classify_base(tmp_path_factory.mktemp("base"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 50256}')
    return folder


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Path, data: Path, base: Path
) -> Path:
    """Return the folder of a trained run."""
    folder = tmp_path_factory.mktemp("run") / "classifier"
    train_alone(folder, tiny_config, *CLASSIFY, f"data.dir={data}", f"model.init={base}")
    return folder


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


def test_a_resumed_run_is_the_unbroken_one(
    tmp_path: Path,
    tiny_config: Path,
    data: Path,
    base: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    settings = (*CLASSIFY, f"data.dir={data}", f"model.init={base}", "train.checkpoint_every=2")
    for adapter in ((), LORA):
        whole, parts = (tmp_path / f"{name}{len(adapter)}" for name in ("whole", "parts"))
        steady = (*settings, *adapter, "schedule.kind=constant")
        train_alone(whole, tiny_config, *steady, "train.steps=4")
        train_alone(parts, tiny_config, *steady, "train.steps=2")
        # Logged by every new run, not by a resumed one.
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
    asked = [text for text, _ in classify_texts(12, seed=5)]
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
    assert not (folder / "generation_config.json").exists()  # a classifier generates nothing


@pytest.mark.slow
def test_an_adapters_checkpoint_gives_labels_too(
    tmp_path: Path,
    tiny_config: Path,
    data: Path,
    base: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = (*CLASSIFY, *LORA, f"data.dir={data}", f"model.init={base}", "optimizer.lr=0.02")
    train_alone(tmp_path, tiny_config, *settings, "train.steps=20")
    last = evaluations(tmp_path)[-1]
    capsys.readouterr()
    # The run reads 16 tokens of a text; this text is longer, and fits the model's context.
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


def probabilities(
    where: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, float]]:
    """Return each text's probabilities as `generate --classify` prints them."""
    capsys.readouterr()
    words = ["--classify", "--checkpoint", str(where), "--input", str(texts), "--json"]
    assert generate_main(words) == 0
    return [json.loads(line)["scores"] for line in capsys.readouterr().out.splitlines()]


def test_transformers_loads_the_folder_of_an_adapter_as_it_loads_pefts(
    tmp_path: Path,
    tiny_config: Path,
    data: Path,
    base: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = (*CLASSIFY, *LORA, f"data.dir={data}", f"model.init={base}", "optimizer.lr=0.02")
    train_alone(tmp_path / "run", tiny_config, *settings, "train.steps=4")
    folder = tmp_path / "run" / "checkpoints" / "step_00000004"
    texts, file = [text for text, _ in classify_texts(6, seed=5)], tmp_path / "in.txt"
    file.write_text("\n".join(texts) + "\n")
    ours = probabilities(folder, file, capsys)
    config = AutoConfig.from_pretrained(folder / "classifier_config.json")
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # As for a folder of PEFT: the number of labels is an option, and the labels have no names.
    options = {"num_labels": 3}
    counted = AutoModelForSequenceClassification.from_pretrained(folder, **options)
    out = tmp_path / "merged"
    words = ["--checkpoint", str(folder), "--merge", "--dtype", "fp32", "--out", str(out)]
    assert export_main(words) == 0
    names = {f"LABEL_{number}": label for number, label in enumerate(ours[0])}
    models: tuple[tuple[Any, dict[str, Any]], ...] = (
        (model, {}),
        (counted, {}),
        (str(folder), {"model_kwargs": options}),
        (str(out), {}),
    )
    for each, more in models:
        theirs: Any = pipeline(
            "text-classification", model=each, tokenizer=tokenizer, top_k=None, **more
        )
        for scores, wanted in zip(theirs(texts), ours, strict=True):
            found = {names.get(each["label"], each["label"]): each["score"] for each in scores}
            assert found == pytest.approx(wanted, abs=1e-5)


def test_an_adapter_of_an_older_version_keeps_its_labels_in_config_json(
    tmp_path: Path,
    tiny_config: Path,
    data: Path,
    base: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    settings = (*CLASSIFY, *LORA, f"data.dir={data}", f"model.init={base}")
    train_alone(new, tiny_config, *settings, "train.steps=1")
    folder = old / "checkpoints" / "step_00000001"
    shutil.copytree(new, old)
    (folder / "classifier_config.json").rename(folder / "config.json")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("classifier_config.json", "config.json"))
    (tmp_path / "in.txt").write_text("cow dog\n")
    found = [probabilities(each, tmp_path / "in.txt", capsys) for each in (new, old)]
    assert found[0] == found[1]
    assert label_names(folder, num_labels=3) == tuple(found[0][0])
    train_alone(old, tiny_config, *settings, "train.steps=2")
    assert (old / "checkpoints" / "step_00000002" / "classifier_config.json").exists()


def test_a_plan_counts_the_tokens_that_training_counts(data: Path) -> None:
    words = [f"data.dir={data}", *CLASSIFY, "data.sequence_length=64"]
    config = parse_run_config("", overrides=words, where="test")
    mean = open_task(config).mean_tokens()
    tokens = tokens_of_data(config)
    assert tokens == round(mean * config.batch.global_batch_size) < config.tokens_per_step()
    absent = replace(config, data=replace(config.data, dir=str(data / "absent")))
    assert tokens_of_data(absent) is None
    # `finetune` counts the texts before it prepares them.
    assert tokens_of_data(absent, expected_mean=mean) == tokens


def opened(data: Path) -> Classify:
    config = parse_run_config("", overrides=[f"data.dir={data}", *CLASSIFY], where="test")
    task = open_task(config)
    assert isinstance(task, Classify)
    return task


def test_texts_of_a_step_are_together_with_those_of_their_length_if_padding_is_computed(
    data: Path,
) -> None:
    train_texts = opened(data).train
    chosen = np.random.default_rng(0).permutation(train_texts.num_samples())[:12]
    arranged = train_texts.arrange_samples(chosen, micro_batch_size=3)
    assert sorted(arranged) == sorted(chosen)
    sizes = [train_texts.num_tokens(arranged[place : place + 1]) for place in range(12)]
    assert sizes == sorted(sizes)
    batch = train_texts.batch(arranged[:3])
    assert batch.tokens.shape == (3, sizes[2]) and batch.weight == 3


def test_micro_batches_of_packed_texts_have_about_the_same_number_of_tokens(
    data: Path, base: Path
) -> None:
    task = opened(data)
    task.adapt_model(load(base), seed=1, init="x")
    chosen = np.random.default_rng(0).permutation(task.train.num_samples())[:24]
    arranged = task.train.arrange_samples(chosen, micro_batch_size=6)
    assert sorted(arranged) == sorted(chosen)
    longest = max(task.train.num_tokens(arranged[place : place + 1]) for place in range(24))
    shares = [task.train.num_tokens(part) for part in np.split(arranged, 4)]
    assert max(shares) - min(shares) <= longest
    by_length = similar_lengths(chosen, lengths_of(task, chosen))
    sorted_shares = [task.train.num_tokens(part) for part in np.split(by_length, 4)]
    assert max(shares) - min(shares) < (max(sorted_shares) - min(sorted_shares)) / 4


def lengths_of(task: Classify, chosen: Indices) -> Indices:
    return np.array(
        [task.train.num_tokens(chosen[place : place + 1]) for place in range(len(chosen))]
    )


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("task.kind=text",), "was prepared with --task classify"),
        (
            ("task.class_weights=1,2",),
            "task.class_weights = '1,2': use 'none', 'balanced', or 3 positive numbers",
        ),
        (("task.class_weights=1,2,-1",), "or 3 positive numbers"),
        (("task.class_weights=heavy",), "use 'none', 'balanced', or 3 positive numbers"),
    ],
)
def test_a_config_that_does_not_suit_the_data_is_refused(
    data: Path, overrides: tuple[str, ...], problem: str
) -> None:
    config = parse_run_config(
        "", overrides=[f"data.dir={data}", *CLASSIFY, *overrides], where="test"
    )
    with pytest.raises(ConfigError, match=problem):
        open_task(config)


def test_a_classifier_of_other_labels_is_refused(
    trained: Path, data: Path, tiny_config: Path, tmp_path: Path
) -> None:
    config = parse_run_config("", overrides=[f"data.dir={data}", *CLASSIFY], where="test")
    task = open_task(config)
    assert isinstance(task, Classify)
    model = load(trained / "checkpoints" / "step_00000012")
    assert task.adapt_model(model, seed=1, init="x") is model
    assert isinstance(model, Classifier)
    model.labels = ("a", "b", "c")
    with pytest.raises(CheckpointError, match="'x': its labels are a, b, c, but the labels"):
        task.adapt_model(model, seed=1, init="x")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("problem_type", "multi_label_classification", "only classifiers that assign exactly one"),
        ("problem_type", "regression", "only classifiers that assign exactly one label to a text"),
        ("num_labels", 3, "but id2label has 2 labels"),
    ],
)
def test_a_classifier_of_another_kind_is_refused(key: str, value: object, problem: str) -> None:
    config = {"id2label": {"0": "a", "1": "b"}, "num_labels": 2}
    assert saved_labels(config, where="x") == ("a", "b")
    with pytest.raises(CheckpointError, match=f"x: {key} = .*{problem}"):
        saved_labels({**config, key: value}, where="x")


def test_a_classifier_is_evaluated_only_on_texts_with_its_labels(trained: Path, data: Path) -> None:
    model = load(trained / "checkpoints" / "step_00000012")
    assert isinstance(model, Classifier)
    meta = load_meta(data)
    assert meta.classify is not None
    others = replace(meta, classify=replace(meta.classify, labels=("x", "y", "z")))
    with pytest.raises(DataError, match="its labels are x, y, z, but the classifier has"):
        open_texts(data, others, model, sequence_length=16)
    chats = replace(meta, task="chat", classify=None)
    with pytest.raises(DataError, match="prepared with --task chat, but the model is a classifier"):
        open_texts(data, chats, model, sequence_length=16)


def with_padding(data: Path, pad_token: int) -> DataMeta:
    """Return a folder's meta.json with another padding token."""
    meta = load_meta(data)
    assert meta.classify is not None
    return replace(meta, classify=replace(meta.classify, pad_token=pad_token))


def test_a_classifier_that_fills_texts_up_otherwise_is_refused_in_its_own_words(
    trained: Path, data: Path
) -> None:
    model = load(trained / "checkpoints" / "step_00000012")
    task = Classify(data, with_padding(data, 7), sequence_length=16, loss=Classification())
    problem = "'x': its padding token is 50256, but the padding token of the data is 7"
    with pytest.raises(CheckpointError, match=problem):
        task.adapt_model(model, seed=1, init="x")


def test_an_evaluation_fills_texts_up_as_the_model_does(trained: Path, data: Path) -> None:
    model = load(trained / "checkpoints" / "step_00000012")
    assert isinstance(model, Classifier)
    first = np.arange(8)
    wanted, found = (
        open_texts(data, meta, model, sequence_length=16).gather(first)[0]
        for meta in (load_meta(data), with_padding(data, 7))
    )
    assert (wanted == model.pad_token).any() and torch.equal(found, wanted)


def test_a_resumed_adapter_takes_no_other_labels_of_the_same_number(
    data: Path, base: Path, tiny_config: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(data, other)
    meta = (other / "meta.json").read_text()
    (other / "meta.json").write_text(meta.replace('"animal"', '"zoo"'))
    settings = (*CLASSIFY, *LORA, f"model.init={base}")
    train_alone(tmp_path / "run", tiny_config, *settings, f"data.dir={data}", "train.steps=1")
    resumed = (*settings, f"data.dir={other}", "train.steps=2")
    words = r"classifier_config\.json: its labels are animal, .* zoo.*\. Resume with the data that "
    with pytest.raises(CheckpointError, match=rf"{words}the run started with\.$"):
        train_alone(tmp_path / "run", tiny_config, *resumed)


def test_a_checkpoint_of_ours_may_have_another_number_of_labels_of_its_base(
    trained: Path, data: Path, tmp_path: Path
) -> None:
    """As in adapters of older versions; a model in `model.init` is still rejected."""
    own = tmp_path / "own"
    shutil.copytree(trained / "checkpoints" / "step_00000012", own)
    path = own / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_labels": 2}))
    task = Classify(data, load_meta(data), sequence_length=16, loss=Classification())
    task.require_matching_checkpoint(own)
    load(own)
    (own / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match="num_labels = 2, but id2label has 3 labels"):
        load(own)


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("--classify",), 2, "--classify needs texts: --input FILE"),
        (("--classify", "--chat"), 2, "--classify reads texts only from --input or --prompt"),
        (("--input", "x"), 2, "Add --classify"),
        (("--classify", "--prompt", " "), 10, "--prompt is empty, and has no label"),
        (("--classify", "--input", "nowhere"), 10, "--input nowhere: No such file"),
        ((), 10, ": a classifier, which cannot continue a text"),
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
    assert "a language model without labels" in capsys.readouterr().err
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
