"""Trained rows of tokens beside an adapter, in PEFT's format, and new rows of a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.architecture_cases import CASES
from payload.config.training_sections import AdapterSection
from payload.core.errors import CheckpointError, ConfigError
from payload.models.registry import spec_of
from payload.train.models.base import CausalLM, trainable
from payload.train.models.classifier import Classifier
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import build, load
from payload.train.models.lora import add_adapter, merge_adapter, save_adapter
from tests.support.slow_imports import peft
from tests.train.models.test_classifier import RAW as SMALL

pytestmark = pytest.mark.usefixtures("one_thread", "own_bases")

RAW: dict[str, Mapping[str, Any]] = {
    **SMALL,
    "gemma of transformers": {**CASES["gemma3_text"], "model_type": "gemma2"},
    "untied of transformers": {**SMALL["stablelm"], "tie_word_embeddings": False},
}
"""Native and transformers' layers, with tied and separate heads, and with a scaled embedding."""
ROWS = (3, 97, 41)


def built(name: str) -> CausalLM:
    torch.manual_seed(0)
    return build(spec_of(RAW[name], where="test")).eval()


def settings(tokens: object = "3,97,41") -> AdapterSection:
    return AdapterSection(kind="lora", rank=3, alpha=6, train_tokens=str(tokens))


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.normal_(std=0.2, generator=generator)


def tokens_with(*chosen: int) -> Tensor:
    """Return (2, 9) tokens, some of them `chosen`."""
    tokens = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(3))
    tokens[0, : len(chosen)] = torch.tensor(chosen)
    return tokens


def logits(model: CausalLM, tokens: Tensor) -> Tensor:
    return model.logits(model.hidden(tokens)).detach()


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", RAW)
def test_peft_gives_the_logits_loss_and_gradients_of_an_adapter_with_trained_tokens(
    name: str, tmp_path: Path
) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    folder.mkdir()
    model = built(name)
    save_hf(model, base)
    add_adapter(model, settings(), seed=1)
    spec = model.trained_spec()
    count = sum(each.numel() for _, each in trainable(model))
    if spec.has_known_modules():
        assert spec.num_trainable_params() == count
        assert sum(each.elements for each in spec.gradient_sizes()) == count
    randomise(model)
    save_adapter(model, folder, base=(str(base), None))
    whole = AutoModelForCausalLM.from_pretrained(base)
    theirs: Any = peft().PeftModel.from_pretrained(whole, folder, is_trainable=True).eval()
    tokens = tokens_with(*ROWS)
    wanted = theirs(tokens)
    assert_close(logits(model, tokens), wanted.logits.detach())
    targets = tokens.roll(-1, 1)
    loss = torch.nn.functional.cross_entropy(wanted.logits.flatten(0, 1), targets.flatten())
    torch.autograd.backward(loss)
    ours = model(tokens, targets)
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-6)
    ours.backward()
    rows = model.token_rows()
    found = {
        key: each.grad
        for key, each in theirs.named_parameters()
        if "trainable_tokens_delta" in key and each.grad is not None
    }
    assert len(rows) == len(found) == (1 if model.spec.is_tied() else 2)
    for path, parameter in rows.items():
        last = model.hf_name(path).rpartition(".")[2]
        (gradient,) = (value for key, value in found.items() if f"{last}.token_adapter" in key)
        assert parameter.grad is not None
        assert_close(parameter.grad, gradient)
    merged = load(folder).eval()
    assert_close(logits(merged, tokens), wanted.logits.detach())
    assert merged.trained_tokens is None


@pytest.mark.parametrize("name", ["gpt2", "llama", "untied", "untied of transformers"])
@pytest.mark.parametrize("both", [False, True])
def test_an_adapter_with_trained_tokens_that_peft_wrote_is_read(
    name: str, both: bool, tmp_path: Path
) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    model = built(name)
    save_hf(model, base)
    embedding = model.hf_name(model.embedding_module()).rpartition(".")[2]
    both = both and not model.spec.is_tied()
    indices: Any = {key: list(ROWS) for key in (embedding, "lm_head")} if both else list(ROWS)
    config = peft().LoraConfig(
        r=3,
        target_modules=["c_attn"] if name == "gpt2" else "all-linear",
        trainable_token_indices=indices,
        task_type="CAUSAL_LM",
        fan_in_fan_out=model.transposes_linears(),
    )
    theirs = peft().get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    randomise(theirs)
    theirs.save_pretrained(str(folder))
    tokens = tokens_with(*ROWS)
    assert_close(logits(load(folder).eval(), tokens), theirs(tokens).logits.detach())


@pytest.mark.parametrize("name", ["gpt2", "llama", "untied"])
def test_an_adapter_that_peft_trained_on_a_resized_base_is_read(name: str, tmp_path: Path) -> None:
    """PEFT then also saves the resized embedding, with the head's rows."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    model = built(name)
    save_hf(model, base)
    rows = model.spec.vocab_size
    whole = AutoModelForCausalLM.from_pretrained(base)
    whole.resize_token_embeddings(rows + 3)
    config = peft().LoraConfig(
        r=3,
        target_modules=["c_attn"] if name == "gpt2" else "all-linear",
        trainable_token_indices=[rows, rows + 1],
        task_type="CAUSAL_LM",
        fan_in_fan_out=model.transposes_linears(),
    )
    theirs = peft().get_peft_model(whole, config).eval()
    randomise(theirs)
    theirs.save_pretrained(str(folder))
    tokens = tokens_with(rows, 4, rows + 1, rows + 2)
    assert_close(logits(load(folder).eval(), tokens), theirs(tokens).logits.detach())


@pytest.mark.parametrize("name", RAW)
def test_new_rows_are_the_mean_of_the_old_rows_and_peft_loads_them_on_a_resized_base(
    name: str, tmp_path: Path
) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    folder.mkdir()
    model = built(name)
    save_hf(model, base)
    tokens = tokens_with(2, 5)
    before, rows = logits(model, tokens), model.spec.vocab_size
    weights = {name: each.clone() for name, each in model.hf_tensors().items()}
    params = model.spec.num_params()
    model.add_tokens(rows, rows + 2)
    assert model.spec.vocab_size == model.hf_config()["vocab_size"] == rows + 2
    grown = 2 * model.spec.width() * (1 if model.spec.is_tied() else 2)
    assert model.spec.num_params() == params + grown
    assert sum(each.numel() for each in model.parameters()) == model.spec.num_params()
    after = logits(model, tokens)
    torch.testing.assert_close(after[..., :rows], before)
    changed = 0
    for key, each in model.hf_tensors().items():
        if each.shape != weights[key].shape:
            changed += 1
            assert torch.equal(each[:rows], weights[key])
            torch.testing.assert_close(each[rows:], weights[key].mean(0).expand(2, -1))
    assert changed == (1 if model.spec.is_tied() else 2)
    save_hf(model, tmp_path)
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, after)
    add_adapter(model, settings(f"{rows},{rows + 1}"), seed=1)
    randomise(model)
    save_adapter(model, folder, base=(str(base), None))
    whole = AutoModelForCausalLM.from_pretrained(base)
    whole.resize_token_embeddings(rows + 2)
    theirs: Any = peft().PeftModel.from_pretrained(whole, folder).eval()
    chosen = tokens_with(rows, 4, rows + 1)
    wanted = theirs(chosen).logits.detach()
    assert_close(logits(model, chosen), wanted)
    merged = load(folder).eval()
    assert merged.spec.vocab_size == rows + 2
    assert_close(logits(merged, chosen), wanted)
    merge_adapter(model)
    assert_close(logits(model, chosen), wanted)


def test_free_rows_are_set_without_growing() -> None:
    model = built("untied")
    embedding = model.hf_tensors()["model.embed_tokens.weight"].clone()
    model.add_tokens(80, 82)
    found = model.hf_tensors()
    assert model.spec.vocab_size == len(embedding) == len(found["model.embed_tokens.weight"])
    torch.testing.assert_close(
        found["model.embed_tokens.weight"][80:82], embedding[:80].mean(0).expand(2, -1)
    )
    assert torch.equal(found["model.embed_tokens.weight"][82:], embedding[82:])


def test_a_classifiers_adapter_trains_rows_of_its_embedding(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    folder.mkdir()
    body = built("untied")
    save_hf(body, base)
    model = Classifier(body, labels=("bad", "good"), pad_token=1)
    add_adapter(model, settings(), seed=1)
    randomise(model)
    assert model.trained_spec().num_trainable_params() == sum(
        each.numel() for _, each in trainable(model)
    )
    save_adapter(model, folder, base=(str(base), None))
    again = load(folder).eval()
    assert isinstance(again, Classifier)
    tokens = tokens_with(*ROWS)
    assert_close(again.class_logits(tokens), model.eval().class_logits(tokens).detach())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ([3, 3], "not a list of different token ids"),
        (["a"], "not a list of different token ids"),
        ({"embed_tokens": [3], "lm_head": [4]}, "must have the same tokens"),
    ],
)
def test_damaged_tokens_of_an_adapter_are_refused(
    change: object, problem: str, tmp_path: Path
) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    folder.mkdir()
    model = built("llama")
    save_hf(model, base)
    add_adapter(model, settings(), seed=1)
    save_adapter(model, folder, base=(str(base), None))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trainable_token_indices": change}))
    with pytest.raises(CheckpointError, match=problem):
        load(folder)


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ("3,3", "must be 'new', 'none', or different token ids"),
        ("<|a|>", "must be 'new', 'none', or different token ids"),
        ("4000", "token 4000 is outside the model's vocabulary"),
    ],
)
def test_tokens_that_cannot_be_trained_are_refused(tokens: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        add_adapter(built("llama"), settings(tokens), seed=1)


def test_a_head_with_a_bias_is_refused() -> None:
    model = build(spec_of({**CASES["llama"], "model_type": "phi"}, where="test"))
    with pytest.raises(ConfigError, match="output head of this model has a bias"):
        add_adapter(model, settings(), seed=1)
