"""Classifiers: transformers and PEFT load them with equal labels, losses and gradients."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from benchmarks.architecture_cases import CASES
from payload.config.training_sections import AdapterSection
from payload.core.errors import CheckpointError
from payload.formats.data_folder import ClassifyRecord
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.models.registry import spec_of
from payload.train.losses.classification import Classification
from payload.train.models.base import trainable
from payload.train.models.classifier import Classifier, last_tokens
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import build, load
from payload.train.models.lora import add_adapter, save_adapter
from payload.train.tasks.classify import start_note
from tests.support.slow_imports import peft
from tests.train.test_kernels import bf16

LABELS = ("bad", "fair", "good")
PAD = 1
RAW: dict[str, Mapping[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "n_positions": 64,
        "vocab_size": 100,
    },
    "llama": CASES["llama"],
    "untied": {**CASES["llama"], "tie_word_embeddings": False},
    "gemma3_text": CASES["gemma3_text"],
    "stablelm": {**CASES["llama"], "model_type": "stablelm"},
}
"""Native GPT-2, native decoders with and without a separate head, and transformers' layers."""


def classifier(name: str, seed: int = 0) -> Classifier:
    """Return a random classifier whose labels differ from text to text."""
    torch.manual_seed(seed)
    model = Classifier(build(spec_of(RAW[name], where="test")), labels=LABELS, pad_token=PAD)
    with torch.no_grad():
        model.score.weight.normal_(std=1.0)
    return model


def padded() -> tuple[Tensor, Tensor]:
    """Return padded texts of 9, 4 and 1 tokens, and their labels."""
    tokens = torch.randint(2, 90, (3, 9), generator=torch.Generator().manual_seed(3))
    tokens[1, 4:], tokens[2, 1:] = PAD, PAD
    return tokens, torch.tensor([2, 0, 1])


def many_padded() -> tuple[Tensor, Tensor]:
    """Return 24 padded texts of 1 to 40 tokens, most of them short, and their labels.

    One text has the padding token in its middle.
    """
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 90, (24, 40), generator=generator)
    lengths = [40, 1, 1, *(2 + 3 * text % 17 for text in range(21))]
    for row, length in enumerate(lengths):
        tokens[row, length:] = PAD
    tokens[0, 20] = PAD
    return tokens, torch.randint(3, (24,), generator=generator)


def their_logits(model: Any, tokens: Tensor) -> Tensor:
    found: Tensor = model(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits
    return found


@pytest.mark.parametrize("name", RAW)
def test_transformers_loads_a_classifier_and_gives_its_logits_and_labels(
    name: str, tmp_path: Path
) -> None:
    model = classifier(name).eval()
    save_hf(model, tmp_path)
    theirs, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info.values()), info
    assert theirs.config.id2label == dict(enumerate(LABELS))
    tokens, _ = padded()
    ours = model.class_logits(tokens)
    torch.testing.assert_close(ours, their_logits(theirs.eval(), tokens), rtol=1e-4, atol=1e-5)
    again = load(tmp_path).eval()
    assert isinstance(again, Classifier) and again.labels == LABELS
    assert torch.equal(again.class_logits(tokens), ours)


@pytest.mark.parametrize("name", RAW)
def test_the_spec_counts_a_classifiers_parameters(name: str) -> None:
    model = classifier(name)
    assert model.spec.num_params() == sum(each.numel() for each in model.parameters())
    if name != "stablelm":  # transformers' layers, whose sizes have no kinds.
        sizes = sum(each.elements for each in model.spec.gradient_sizes())
        assert sizes == model.spec.num_params()


@pytest.mark.parametrize("name", RAW)
def test_padding_changes_neither_loss_nor_gradients(name: str) -> None:
    model = classifier(name)
    tokens, labels = padded()
    model(tokens, labels).backward()
    whole = {
        key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None
    }
    assert set(whole) == {key for key, _ in trainable(model)}
    model.zero_grad()
    for row, length in enumerate((9, 4, 1)):
        (model(tokens[row : row + 1, :length], labels[row : row + 1]) / 3).backward()
    largest = max(float(each.norm()) for each in whole.values())
    for key, each in model.named_parameters():
        assert each.grad is not None
        assert (each.grad - whole[key]).norm() <= 1e-5 * largest, key


@pytest.mark.parametrize("adapter", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3_text"])
def test_packed_texts_have_the_loss_and_gradients_of_padded_ones(name: str, adapter: bool) -> None:
    model = classifier(name)
    if adapter:
        add_adapter(model, AdapterSection(kind="lora", rank=4, alpha=8), seed=1)
        with torch.no_grad():
            for _, parameter in trainable(model):
                parameter.normal_(std=0.3)
    tokens, labels = many_padded()
    shapes: list[tuple[int, ...]] = []
    run = model.body.hidden

    def seen(tokens: Tensor, *inputs: Any, **options: Any) -> Tensor:
        shapes.append(tuple(tokens.shape))
        return run(tokens, *inputs, **options)

    model.body.hidden = seen  # type: ignore[method-assign]
    found = []
    for packs in (True, False):
        model.body.packs_documents = packs
        loss = model(tokens, labels)
        loss.backward()
        grads = {key: each.grad.clone() for key, each in trainable(model) if each.grad is not None}
        assert set(grads) == {key for key, _ in trainable(model)}
        found.append((loss.detach(), grads))
        model.zero_grad()
    (packed_loss, packed_grads), (loss, grads) = found
    torch.testing.assert_close(packed_loss, loss, rtol=1e-5, atol=1e-6)
    largest = max(float(each.norm()) for each in grads.values())
    for key, each in grads.items():
        assert (packed_grads[key] - each).norm() <= 1e-5 * largest, key
    assert shapes[1] == tuple(tokens.shape)
    assert math.prod(shapes[0]) <= 1.05 * int((tokens != PAD).sum()) < 0.5 * tokens.numel()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_kernels_compute_packed_texts_as_near_to_fp32_as_padded_ones(
    library: Library, name: str
) -> None:
    model = classifier(name).eval()
    tokens, _ = many_padded()
    with torch.inference_mode():
        exact = model.class_logits(tokens)
        model.kernels = Kernels(library)
        errors = []
        for packs in (True, False):
            model.body.packs_documents = packs
            torch.testing.assert_close(model.class_logits(tokens), exact, rtol=1e-5, atol=1e-5)
            with bf16():
                errors.append(float((model.class_logits(tokens) - exact).norm()))
    assert 0 < errors[0] <= 1.5 * errors[1]


def test_class_weights_weigh_as_in_torch() -> None:
    model = classifier("gpt2").eval()
    model.objective = Classification((1.0, 5.0, 0.5))
    tokens, labels = padded()
    losses = -model.class_logits(tokens).log_softmax(-1)[torch.arange(3), labels]
    weights = torch.tensor([1.0, 5.0, 0.5])[labels]
    torch.testing.assert_close(model(tokens, labels), (losses * weights).sum() / weights.sum())


@pytest.mark.parametrize("name", ["gpt2", "untied", "stablelm"])
def test_a_new_classifier_scores_labels_by_the_mean_logit_of_their_names_tokens(name: str) -> None:
    torch.manual_seed(0)
    body = build(spec_of(RAW[name], where="test")).eval()
    tokens = torch.randint(2, 90, (3, 9), generator=torch.Generator().manual_seed(3))
    names = ((5,), (6, 7), (5, 8, 9))
    with torch.no_grad():
        words = body.logits(body.hidden(tokens))[:, -1].float()
        wanted = torch.stack([words[:, list(each)].mean(1) for each in names], 1)
        model = Classifier(body, labels=LABELS, pad_token=PAD, label_tokens=names).eval()
        torch.testing.assert_close(model.class_logits(tokens), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "names", "init", "what"),
    [
        ("gpt2", ((5,), (6, 7), (8,)), "folder", "starts from the labels' names"),
        ("gpt2", (), "folder", "data has no tokens of the labels' names"),
        ("gpt2", ((5,), (6, 7), (8,)), "scratch", "from random values, like all weights"),
        ("phi", ((5,), (6, 7), (8,)), "folder", "output head has a bias, or its logits are scaled"),
    ],
)
def test_a_new_classifier_says_what_it_starts_from(
    name: str, names: tuple[tuple[int, ...], ...], init: str, what: str
) -> None:
    torch.manual_seed(0)
    body = build(spec_of(RAW.get(name, {**CASES["llama"], "model_type": name}), where="test"))
    counts = (1, 1, 1)
    labels = ClassifyRecord(
        labels=LABELS, train_counts=counts, val_counts=counts, pad_token=PAD, label_tokens=names
    )
    said = start_note(body, labels, folder=Path("data"), init=init)
    assert what in said
    head = body.head_weight()
    model = Classifier(body, labels=LABELS, pad_token=PAD, label_tokens=names)
    takes_names = head is not None and bool(names)
    assert takes_names == ("random values" not in said or init == "scratch")
    of_name = torch.zeros_like(model.score.weight[0]) if head is None else head[5]
    assert torch.equal(model.score.weight[0], of_name) == takes_names


def test_the_last_token_that_is_not_padding_counts() -> None:
    tokens = torch.tensor([[5, 6, PAD, 7], [5, PAD, PAD, PAD], [PAD, PAD, PAD, PAD]])
    assert last_tokens(tokens, pad_token=PAD).tolist() == [3, 0, 0]


@pytest.mark.parametrize("name", ["gpt2", "llama", "stablelm"])
def test_peft_reads_a_classifiers_adapter(name: str, tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    folder.mkdir()
    torch.manual_seed(0)
    body = build(spec_of(RAW[name], where="test"))
    save_hf(body, base)
    model = Classifier(body, labels=LABELS, pad_token=PAD)
    add_adapter(model, AdapterSection(kind="lora", rank=4, alpha=8), seed=1)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.normal_(std=0.3)
    assert {key.rpartition(".")[2] for key, _ in trainable(model)} == {"lora_A", "lora_B", "weight"}
    if name != "stablelm":  # Without a folder, the linears of transformers' layers are unknown.
        spec = model.trained_spec()
        trained = sum(each.numel() for _, each in trainable(model))
        assert spec.num_trainable_params() == trained
        assert sum(each.elements for each in spec.gradient_sizes()) == trained
    save_adapter(model, folder, base=(str(base), None))
    whole = AutoModelForSequenceClassification.from_pretrained(
        base, config=AutoConfig.from_pretrained(folder / "classifier_config.json")
    )
    theirs = peft().PeftModel.from_pretrained(whole, folder).eval()
    tokens, _ = padded()
    wanted = their_logits(theirs, tokens)
    torch.testing.assert_close(model.eval().class_logits(tokens), wanted, rtol=1e-4, atol=1e-5)
    merged = load(folder).eval()
    assert isinstance(merged, Classifier) and merged.adapter is None and merged.labels == LABELS
    torch.testing.assert_close(merged.class_logits(tokens), wanted, rtol=1e-4, atol=1e-4)


def test_a_classifiers_adapter_that_peft_wrote_is_read(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    model = classifier("llama")
    save_hf(model, base)
    config = peft().LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", task_type="SEQ_CLS")
    whole = AutoModelForSequenceClassification.from_pretrained(base)
    theirs = peft().get_peft_model(whole, config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    theirs.save_pretrained(str(folder))
    raw = json.loads((folder / "adapter_config.json").read_text())
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert sorted(raw["target_modules"]) == sorted(names)
    tokens, _ = padded()
    ours = load(folder).eval()
    assert isinstance(ours, Classifier)
    wanted = their_logits(theirs, tokens)
    torch.testing.assert_close(ours.class_logits(tokens), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id2label": {"0": "a"}}, "id2label must contain two or more different labels"),
        ({"id2label": {"0": "a", "1": "a"}}, "id2label must contain two or more different"),
        ({"pad_token_id": None}, "pad_token_id = None: must be a token of the model"),
        ({"id2label": {"0": "a", "1": "b"}}, "num_labels = 3, but id2label has 2 labels"),
        ({"id2label": {"0": "a", "1": "b"}, "num_labels": 2}, r"shape \(3, 32\), but its 2 labels"),
    ],
)
def test_a_damaged_classifier_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    save_hf(classifier("gpt2"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=problem):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("granite", "not supported as a classifier"),
        ("granitemoe", "no classifier for this model"),
    ],
)
def test_a_model_that_transformers_cannot_classify_with_is_refused(kind: str, problem: str) -> None:
    raw = {**CASES["llama"], "model_type": kind}
    with pytest.raises(CheckpointError, match=f"{kind}.*{problem}"):
        Classifier(build(spec_of(raw, where="test")), labels=LABELS, pad_token=PAD)
