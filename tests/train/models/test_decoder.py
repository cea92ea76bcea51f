"""The decoder's own modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.architecture_cases import CASES, make_folder, random_tokens
from payload.core.errors import CheckpointError
from payload.models.llama.spec import DecoderSpec
from payload.models.registry import spec_of
from payload.train.families.llama.model import Decoder
from payload.train.models.attention import visible
from payload.train.models.loading import load

CPU = torch.device("cpu")


def decoder(name: str, **changes: object) -> Decoder:
    torch.manual_seed(1)
    spec = spec_of({**CASES[name], **changes}, where="config.json")
    assert isinstance(spec, DecoderSpec)
    model = Decoder(spec)
    assert model.spec.unsupported_features == ()
    return model


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama, untied, biases", "qwen3", "gemma3_text", "phi3"),
        *("olmo3", "granite 4, dense"),
    ],
)
def test_parameters_are_the_tensors_that_the_spec_counts(name: str) -> None:
    model = decoder(name)
    found = {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert list(found.items()) == list(model.spec.tensor_shapes())
    assert sum(each.numel() for each in model.parameters()) == model.spec.num_params()


def test_a_token_attends_to_its_window_and_to_nothing_behind_it() -> None:
    mask = visible(3, 7, window=3, device=CPU)
    assert mask is not None
    assert mask.int().tolist() == [
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1],
    ]
    assert visible(7, 7, window=7, device=CPU) is None
    assert visible(1, 7, window=None, device=CPU) is None
    one = visible(1, 7, window=2, device=CPU)
    assert one is not None and one.int().tolist() == [[0, 0, 0, 0, 0, 1, 1]]


def test_the_padding_tokens_embedding_learns_as_the_head_alone() -> None:
    padded, plain = decoder("smollm3"), decoder("smollm3", pad_token_id=None)
    tokens, targets = random_tokens(CASES["smollm3"]["vocab_size"])
    assert (tokens == 7).any()
    found = []
    for model in (padded, plain):
        torch.autograd.backward(model(tokens, targets))
        weight = model.tied_weight()
        assert weight is not None and weight.grad is not None
        found.append(weight.grad)
    rows = torch.arange(len(found[0])) != 7
    torch.testing.assert_close(found[0][rows], found[1][rows])
    assert not torch.allclose(found[0][7], found[1][7], rtol=1e-2)
    assert found[0][7].abs().max() > 0


@pytest.mark.parametrize("row", [None, -1, 5000])
def test_a_padding_token_may_be_missing_or_beyond_the_vocabulary(row: int | None) -> None:
    tokens, targets = random_tokens(1031)
    assert torch.isfinite(decoder("llama", pad_token_id=row)(tokens, targets))


def test_a_padding_token_that_config_json_omits_is_the_types_default() -> None:
    raw = {key: value for key, value in CASES["olmo2"].items() if key != "pad_token_id"}
    spec = spec_of(raw, where="config.json")
    assert isinstance(spec, DecoderSpec)
    model = Decoder(spec)
    tokens, targets = random_tokens(1031)
    assert (tokens == 1).any() and (tokens == 2).any()
    torch.autograd.backward(model(tokens, targets))
    gradient = model.model.embed_tokens.weight.grad
    assert gradient is not None
    assert gradient[1].abs().max() == 0 < gradient[2].abs().max()


def test_dropout_is_of_the_attention_and_of_training_alone() -> None:
    model = Decoder(decoder("llama").spec, dropout=0.5)
    tokens, targets = random_tokens(1031)
    assert model(tokens, targets) != model(tokens, targets)
    model.eval()
    assert model(tokens, targets) == model(tokens, targets)


def test_muon_gets_the_layers_matrices() -> None:
    model = decoder("qwen3")
    chosen = {name for name, _ in model.named_parameters() if model.is_hidden_matrix(name)}
    assert "model.embed_tokens.weight" not in chosen
    assert {name.rpartition("layers.0.")[2] for name in chosen if "layers.0." in name} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }


def test_a_checkpoint_keeps_what_config_json_said(tmp_path: Path) -> None:
    make_folder(CASES["llama, llama3 rope"], tmp_path)
    model = load(tmp_path)
    written = model.hf_config()
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert spec_of(written, where="config.json") == model.spec


def test_a_missing_an_unknown_and_a_cut_weight_are_each_named() -> None:
    model = decoder("llama, untied, biases")
    tensors = model.hf_tensors()
    last = "model.norm.weight"
    for change, problem in (
        ({"model.norm.scale": torch.zeros(3)}, "1 unknown .first: model.norm.scale"),
        (
            {last: torch.zeros(3)},
            r"model.norm.weight has the shape \(3,\), but config.json requires \(64,\)",
        ),
    ):
        with pytest.raises(CheckpointError, match=problem):
            model.load_tensors({**tensors, **change}, where="folder")
    del tensors[last]
    with pytest.raises(CheckpointError, match=r"folder: .* 1 missing .first: model.norm.weight"):
        model.load_tensors(tensors, where="folder")


def test_a_head_of_its_own_is_refused_where_the_config_ties_it() -> None:
    model = decoder("llama")
    tensors = model.hf_tensors()
    embedding = tensors["model.embed_tokens.weight"]
    model.load_tensors({**tensors, "lm_head.weight": embedding.clone()}, where="folder")
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings = true, but lm_head\.weight"):
        model.load_tensors({**tensors, "lm_head.weight": embedding + 1}, where="folder")
