"""A new model family is one file in each of two packages: a toy family trains without more."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import payload.models
import payload.train.models
from payload.config.training_sections import OptimizerSection
from payload.core.errors import CheckpointError
from payload.estimates.gradient_buckets import buckets
from payload.formats.hf_folder import WEIGHTS_FILE
from payload.models.registry import read_spec, spec_of
from payload.run_record.run_files import RunPaths
from payload.train.models.base import CausalLM, trainable
from payload.train.models.registry import build, load
from payload.train.models.weights import save_hf
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.strategies.buckets import make_buckets
from tests.support.launching import losses
from tests.train.alone import train_alone

NUMBERS = """
from dataclasses import dataclass

from payload.core.errors import CheckpointError
from payload.models.spec import GradientSize, ModelSpec
from payload.core.validation import build, checked

MODEL_TYPES = ("toy",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToySpec(ModelSpec):
    hidden: int

    def context(self): return 4096
    def num_layers(self): return 1
    def num_heads(self): return 1
    def width(self): return self.hidden
    def is_tied(self): return False
    def num_params(self): return 2 * self.embedding_size() + self.hidden**2
    def flops_per_token(self): return 6 * (self.embedding_size() + self.hidden**2)
    def memory_bytes(self, _setting): return 16 * self.num_params()
    def gradient_sizes(self):
        ends = self.embedding_size()
        return (
            GradientSize(ends, "head"),
            GradientSize(self.hidden**2, "matrix"),
            GradientSize(ends, "embedding"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    hidden: int = checked(low=1)
    vocab_size: int = checked(low=1)


def read(raw, *, where):
    config = build(_Config, raw, where=where, error=CheckpointError)
    return ToySpec(
        model_type="toy", hidden=config.hidden, vocab_size=config.vocab_size, sequence_length=4096
    )
"""

TENSORS = '''
import torch
from torch import nn

from payload.train.models.base import CausalLM

MODEL_TYPES = ("toy",)


class Seen:
    tokens = 0

    def num_tokens(self): return self.tokens


class Toy(CausalLM):
    """Predicts the next token from the last one."""

    def __init__(self, spec, dropout):
        super().__init__(spec, dropout=dropout)
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden)
        self.mix = nn.Linear(spec.hidden, spec.hidden, bias=False)
        self.head = nn.Linear(spec.hidden, spec.vocab_size, bias=False)

    def hidden(self, tokens, caches=None, starts=None):
        if caches:
            caches[0].tokens += tokens.shape[1]
        return torch.tanh(self.mix(self.embed(tokens)))

    def head_weight(self): return self.head.weight
    def tied_weight(self): return None
    def new_caches(self): return [Seen()]
    def is_hidden_matrix(self, name): return name == "mix.weight"
    def hf_tensors(self): return dict(self.state_dict())
    def speed_notes(self): return []

    def hf_config(self):
        return {
            "model_type": "toy", "hidden": self.spec.hidden, "vocab_size": self.spec.vocab_size
        }

    def load_tensors(self, tensors, *, where):
        for name, target in self.state_dict().items():
            target.copy_(tensors[name])


def build(spec, *, dropout, random):
    return Toy(spec, dropout)
'''

CONFIG = {"model_type": "toy", "hidden": 16, "vocab_size": 640}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a toy model, whose family is a file in each of the two packages."""
    for package, text in ((payload.models, NUMBERS), (payload.train.models, TENSORS)):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "toy.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    model = tmp_path / "model"
    model.mkdir()
    torch.manual_seed(5)
    save_hf(build(spec_of(CONFIG, where="test")), model)
    yield model
    for package in (payload.models, payload.train.models):
        sys.modules.pop(f"{package.__name__}.toy")
        vars(package).pop("toy", None)


@pytest.mark.parametrize(
    "settings",
    [["engine.kernels=off"], ["engine.kernels=auto"], ["optimizer.name=muon"]],
    ids=["reference", "kernels", "muon"],
)
def test_a_family_of_two_files_trains_and_resumes_as_any_other(
    toy: Path, tmp_path: Path, tiny_config: Path, settings: list[str]
) -> None:
    more = ["model.n_layer=none", "model.n_head=none", "model.n_embd=none", f"model.init={toy}"]
    more += ["train.checkpoint_every=2", "schedule.decay_steps=4", "optimizer.lr=0.03"]
    more += settings
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train_alone(whole, tiny_config, *more, "train.steps=4")
    train_alone(halves, tiny_config, *more, "train.steps=2")
    train_alone(halves, tiny_config, *more, "train.steps=4")
    assert losses(whole) == losses(halves)
    assert losses(whole)[-1] < losses(whole)[0]
    ends = [RunPaths(run).checkpoint(4) for run in (whole, halves)]
    assert len({(end / WEIGHTS_FILE).read_bytes() for end in ends}) == 1
    assert json.loads((ends[0] / "config.json").read_text()) == CONFIG
    assert type(load(ends[0])).__name__ == "Toy"


def test_its_numbers_serve_the_prediction_of_a_step(toy: Path) -> None:
    spec = read_spec(toy)
    found = buckets(spec, tokens=1024)
    assert sum(each.numbers for each in found) == spec.num_params()
    assert found[-1].ready == 1.0
    assert spec.summary() == "1 layers, 1 heads, width 16, context 4096"


def test_a_frozen_weight_has_no_optimizer_state_and_no_place_in_the_exchange(toy: Path) -> None:
    model = load(toy)
    model.get_parameter("embed.weight").requires_grad_(False)
    before = model.get_parameter("embed.weight").clone()
    assert [name for name, _ in trainable(model)] == ["mix.weight", "head.weight"]
    optimizers = build_optimizers(model, OptimizerSection())
    (bucket,) = make_buckets(parameter for _, parameter in trainable(model))
    assert [each.numel() for each in bucket.parameters] == [640 * 16, 16 * 16]
    tokens = torch.arange(32).view(2, 16)
    for _ in range(2):
        model(tokens, tokens).backward()
        optimizers.clip(1.0)
        optimizers.step()
    held = {name.partition(".")[2] for name in optimizers.state_tensors()}
    assert held == {"mix.weight", "head.weight"}
    assert torch.equal(model.get_parameter("embed.weight"), before)


def test_a_name_that_no_family_has_is_not_taken_for_one_like_it(toy: Path) -> None:
    with pytest.raises(CheckpointError, match="'toi'"):
        spec_of({"model_type": "toi"}, where="config.json")
    assert isinstance(load(toy), CausalLM)
