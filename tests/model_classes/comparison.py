"""Compares one class of models with transformers and PEFT, in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from benchmarks.architecture_cases import make_folder, random_tokens
from payload.config.training_sections import AdapterSection
from payload.generate.sampling import Sampler, SamplingOptions
from payload.models.registry import read_spec
from payload.train.families.transformers.model import TransformersLM
from payload.train.models.base import CausalLM, trainable
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import load
from payload.train.models.lora import add_adapter, save_adapter
from payload.train.tensors.copied_parts import CopiedParts
from tests.model_classes.cases import CASES, VOCABULARY
from tests.model_classes.multimodal import (
    WHOLE_CASES,
    WORDS,
    load_whole,
    make_whole,
    missing_package,
    text_parameters,
)
from tests.support.slow_imports import peft

BOUND = 1e-4
"""Bound of the differences of logits and gradients."""
LORA_BOUND = 1e-5
"""Bound of the relative difference from the losses with PEFT."""
_NEW_TOKENS = 12
_LORA_STEPS = 3
_LORA = AdapterSection(kind="lora", rank=4, alpha=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One class compared with transformers and PEFT."""

    name: str
    path: str
    """`native` or `transformers`: the layers that compute it."""
    logits: float
    """Largest difference of a logit."""
    gradients: float
    """Largest difference of a gradient's element."""
    round_trip: bool
    """True if saving gives the same tensors, from which transformers computes the same logits."""
    generates: bool
    """True if greedy decoding gives the same tokens as transformers' `generate`."""
    lora: float
    """Largest relative difference from the losses with PEFT."""
    lora_params: tuple[int, int]
    """Trained parameters with `all-linear`, counted here and in PEFT's model of the adapter."""
    params: tuple[int, int]
    """Parameters that a plan counts, and those of transformers' module."""

    def problems(self) -> list[str]:
        """Return a description of each bound that is missed; NaN misses them, too."""
        found = [
            f"{what} differ by {value:.1e}, bound {bound:.0e}"
            for what, value, bound in (
                ("logits", self.logits, BOUND),
                ("gradients", self.gradients, BOUND),
                ("LoRA's losses", self.lora, LORA_BOUND),
            )
            if not value <= bound
        ]
        found += [] if self.round_trip else ["a saved model differs"]
        found += [] if self.generates else ["generated tokens differ"]
        for what, (ours, theirs) in (("trained by LoRA", self.lora_params), ("", self.params)):
            if ours != theirs:
                found.append(f"{ours:,} parameters {what}, the reference has {theirs:,}")
        return found


def why_missing(name: str) -> str | None:
    """Return why the installed transformers cannot build this class, or None."""
    from transformers import CONFIG_MAPPING

    case = WHOLE_CASES[name] if name in WHOLE_CASES else CASES[name]
    model_type = case.model_type
    if model_type not in CONFIG_MAPPING:
        return f"the installed transformers lacks {model_type}"
    package = missing_package(name)
    return f"transformers needs the package {package}, which is not installed" if package else None


def compare(name: str, folder: Path) -> Comparison:
    """Compare the class of this name; `folder / "model"` keeps the saved model."""
    model = folder / "model"
    make_model(name, model)
    theirs, ours = _theirs(model), load(model).eval()
    words = WORDS if name in WHOLE_CASES else VOCABULARY
    tokens, targets = random_tokens(words)
    with torch.no_grad():
        wanted = theirs(input_ids=tokens).logits
        logits = _largest(ours.logits(ours.hidden(tokens)) - wanted)
    lora, lora_params = _lora(model, folder, tokens, targets)
    return Comparison(
        name=name,
        path="transformers" if isinstance(ours, TransformersLM) else "native",
        logits=logits,
        round_trip=_is_saved_equal(ours, model, folder / "saved", tokens, wanted),
        generates=_generated(ours, tokens[:, :5], words)
        == _generated_by_theirs(theirs, tokens[:, :5], words),
        gradients=_gradient_difference(ours, theirs, tokens, targets, folder),
        lora=lora,
        lora_params=lora_params,
        params=(read_spec(model).num_params(), sum(each.numel() for each in _trained(theirs))),
    )


def make_model(name: str, folder: Path) -> None:
    """Save transformers' model of this class with random weights."""
    if name in WHOLE_CASES:
        make_whole(name, folder)
    else:
        make_folder(CASES[name].config(), folder)


def _trained(theirs: Any) -> list[Any]:
    is_whole = CopiedParts.open(Path(theirs.name_or_path)) is not None
    return text_parameters(theirs) if is_whole else list(theirs.parameters())


def _theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if CopiedParts.open(folder) is not None:
        return load_whole(folder, dtype=torch.float32)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.eval()


def _is_saved_equal(
    model: CausalLM, first: Path, again: Path, tokens: Tensor, wanted: Tensor
) -> bool:
    again.mkdir()
    save_hf(model, again, copied=CopiedParts.open(first))
    before, after = (load_file(each / "model.safetensors") for each in (first, again))
    with torch.no_grad():
        logits = _theirs(again)(input_ids=tokens).logits
    is_same = before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype
        for name in before
    )
    return is_same and torch.equal(logits, wanted)


def _generated(model: CausalLM, prompts: Tensor, words: int) -> list[list[int]]:
    options = SamplingOptions(
        max_new_tokens=_NEW_TOKENS, temperature=0.0, top_k=None, num_samples=1
    )
    sampler = Sampler(
        model,
        prompts.tolist(),
        options=options,
        stop_tokens=frozenset(),
        num_tokens=words,
    )
    return [list(each) for each in zip(*sampler.tokens(), strict=True)]


def _generated_by_theirs(model: Any, prompts: Tensor, words: int) -> list[list[int]]:
    made = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=_NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        suppress_tokens=list(range(words, VOCABULARY)) or None,
    )
    found: list[list[int]] = made[:, prompts.shape[1] :].tolist()
    return found


def _gradient_difference(
    ours: CausalLM, theirs: Any, tokens: Tensor, targets: Tensor, folder: Path
) -> float:
    """Return the largest difference of a gradient; both models save their gradients as weights.

    Of a multimodal model, only the text model's gradients are compared.
    """
    copied = CopiedParts.open(folder / "model")
    untrained = () if copied is None else copied.tensors.keys()
    torch.autograd.backward(ours(tokens, targets))
    torch.autograd.backward(_their_loss(theirs, tokens, targets))
    for model in (ours, theirs):
        with torch.no_grad():
            for parameter in model.parameters():
                # Layers that read another layer's keys do not use their own.
                gradient = parameter.grad
                parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    theirs.save_pretrained(folder / "gradients")
    (folder / "ours").mkdir()
    save_hf(ours, folder / "ours", copied=copied)
    found, expected = (
        load_file(folder / each / "model.safetensors") for each in ("ours", "gradients")
    )
    assert found.keys() == expected.keys()
    return max(
        _largest(found[name] - value) for name, value in expected.items() if name not in untrained
    )


def _lora(
    model: Path, folder: Path, tokens: Tensor, targets: Tensor
) -> tuple[float, tuple[int, int]]:
    """Return the largest difference from PEFT's losses, and both counts of trained weights."""
    ours = load(model)
    add_adapter(ours, _LORA, seed=1)
    (folder / "adapter").mkdir()
    save_adapter(ours, folder / "adapter", base=(str(model), None))
    theirs = peft().PeftModel.from_pretrained(_theirs(model), folder / "adapter", is_trainable=True)
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    for name, parameter in theirs.named_parameters():
        # In some mixtures, PEFT also adds adapters to experts, which begin at zero.
        parameter.requires_grad_(name.replace(".default", "") in saved)
    counts = (
        ours.trained_spec().num_trainable_params(),
        theirs.get_nb_trainable_parameters()[0],
    )
    first = _adapter_losses(lambda: ours(tokens, targets), dict(trainable(ours)))
    second = _adapter_losses(
        lambda: _their_loss(theirs, tokens, targets),
        {name: each for name, each in theirs.named_parameters() if each.requires_grad},
    )
    difference = max(abs(a / b - 1) for a, b in zip(first, second, strict=True))
    return difference, counts


def _adapter_losses(loss: Any, parameters: Mapping[str, Any]) -> list[float]:
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=1e-2)
    found = []
    for _ in range(_LORA_STEPS):
        optimizer.zero_grad()
        value = loss()
        torch.autograd.backward(value)
        optimizer.step()
        found.append(float(value.detach()))
    return found


def _their_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())
