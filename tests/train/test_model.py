"""The model against transformers' GPT-2, and its weights to and from the Hugging Face layout."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from payload.config.model_checks import require_fit
from payload.config.run_config import parse_run_config
from payload.core.errors import CheckpointError
from payload.models.gpt2.spec import PRESETS, Gpt2Spec
from payload.models.registry import spec_of
from payload.train.families.gpt2.model import GPT
from payload.train.models.hf_weights import save_hf
from payload.train.models.key_value_cache import LayerCache
from payload.train.models.loading import load

SIZES = [each.name for each in fields(Gpt2Spec)]
SMALL = Gpt2Spec(n_layer=3, n_head=4, n_embd=64, sequence_length=48, vocab_size=301)


def make_model(seed: int = 0, **changes: object) -> GPT:
    torch.manual_seed(seed)
    sizes = {name: getattr(SMALL, name) for name in SIZES}
    model = GPT(Gpt2Spec(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms differ from 0 and 1, so that a lost one is noticed.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def transformers_model(folder: Path) -> Any:
    """Return transformers' model as Any: its methods are only partly annotated."""
    model: Any = transformers.GPT2LMHeadModel.from_pretrained(folder)
    return model.eval()


def tokens(*size: int) -> torch.Tensor:
    return torch.randint(SMALL.vocab_size, size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("bias", [True, False])
def test_logits_equal_those_of_transformers_for_the_same_weights(
    tmp_path: Path, bias: bool
) -> None:
    model = make_model(bias=bias)
    save_hf(model, tmp_path)
    reference = transformers_model(tmp_path)
    batch = tokens(2, 48)
    with torch.inference_mode():
        ours = model.logits(model.hidden(batch))
        theirs = reference(batch).logits
    assert (ours - theirs).abs().max() < 1e-4


def test_loss_equals_that_of_transformers(tmp_path: Path) -> None:
    model = make_model()
    save_hf(model, tmp_path)
    reference = transformers_model(tmp_path)
    batch = tokens(2, 48)
    with torch.inference_mode():
        ours = model(batch[:, :-1], batch[:, 1:])
        theirs = reference(batch, labels=batch).loss
    assert float(ours) == pytest.approx(float(theirs), abs=1e-5)


def test_weights_that_transformers_saved_load_and_give_its_logits(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=301)
    reference: Any = transformers.GPT2LMHeadModel(config)
    reference.eval()
    reference.save_pretrained(tmp_path)
    model = load(tmp_path).eval()
    batch = tokens(1, 16)
    with torch.inference_mode():
        difference = model.logits(model.hidden(batch)) - reference(batch).logits
    assert difference.abs().max() < 1e-4


def test_weights_in_the_layout_of_the_hub_s_gpt2_load(tmp_path: Path) -> None:
    """The hub's gpt2 has no `transformer.` prefix and keeps the causal mask as `attn.bias`."""
    model = make_model()
    save_hf(model, tmp_path)
    state = {
        name.removeprefix("transformer."): value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    state["h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
    save_file(state, tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize("bias", [True, False])
def test_saving_and_loading_changes_no_bit(tmp_path: Path, bias: bool) -> None:
    model = make_model(bias=bias)
    save_hf(model, tmp_path)
    loaded = load(tmp_path)
    assert loaded.spec == model.spec
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_a_longer_sequence_than_the_weights_have_is_refused_with_both_numbers() -> None:
    config = parse_run_config("", overrides=["data.sequence_length=49"], where="test")
    with pytest.raises(CheckpointError, match=r"= 49 is above the 48 positions"):
        require_fit(make_model().spec, config, vocab_size=None)


@pytest.mark.parametrize("pieces", [(20,), (1, 19), (7, 1, 12), (5, 5, 5, 5)])
def test_tokens_given_in_pieces_with_a_cache_give_the_logits_of_the_whole(
    pieces: tuple[int, ...],
) -> None:
    model = make_model()
    batch = tokens(2, 20)
    caches = [LayerCache() for _ in range(SMALL.n_layer)]
    with torch.inference_mode():
        whole = model.logits(model.hidden(batch))
        parts = [
            model.logits(model.hidden(part, caches))
            for part in torch.split(batch, list(pieces), dim=1)
        ]
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-4


def test_initial_weights_have_the_papers_deviations() -> None:
    torch.manual_seed(1)
    shape = Gpt2Spec(n_layer=8, n_head=4, n_embd=256, sequence_length=256, vocab_size=2000)
    state = GPT(shape).state_dict()
    assert float(state["wte.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(state["wpe.weight"].std()) == pytest.approx(0.01, rel=0.05)
    assert float(state["h.3.mlp.c_fc.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(state["h.3.mlp.c_proj.weight"].std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert float(state["h.3.attn.c_proj.weight"].std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert bool((state["h.0.ln_1.weight"] == 1).all())
    assert not bool(state["h.0.attn.c_attn.bias"].any())


@pytest.mark.parametrize("bias", [True, False])
def test_the_arithmetic_counts_the_models_parameters(bias: bool) -> None:
    model = make_model(bias=bias)
    assert model.spec.num_params() == sum(p.numel() for p in model.parameters())


def test_gpt2_has_124_million_parameters_and_nanogpts_flops() -> None:
    assert PRESETS["gpt2"].num_params() == 124_439_808
    # nanoGPT's 6N + 12LHQT with N = 123.65M: 855 MFLOP a token.
    assert PRESETS["gpt2"].flops_per_token() == pytest.approx(855e6, rel=1e-3)


def _spoil_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", False),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("per_layer_config", {"1": {"n_head": 1}}),
        ("layer_norm_epsilon", 1e-3),
        ("n_inner", 128),
        ("sliding_window", 8),
        ("attention_chunk_size", 8),
        ("kv_sharing_modes", {"0": "reuse"}),
    ],
)
def test_gpt2s_of_another_arithmetic_are_refused(tmp_path: Path, key: str, value: object) -> None:
    save_hf(make_model(), tmp_path)
    _spoil_config(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match=f"{key} = {value}: must be"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "stablelm"])
@pytest.mark.parametrize("value", [False, None])
def test_a_model_that_attends_to_both_sides_is_refused(value: object, kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"x: is_causal = {value}: .* not a language model"):
        spec_of({"model_type": kind, "is_causal": value}, where="x")


@pytest.mark.parametrize(
    "alias", ["hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"]
)
def test_two_names_of_one_size_may_not_contradict_each_other(tmp_path: Path, alias: str) -> None:
    save_hf(make_model(), tmp_path)
    own = getattr(transformers_model(tmp_path).config, alias)
    _spoil_config(tmp_path, is_causal=True, **{alias: own})
    assert load(tmp_path).spec == SMALL
    _spoil_config(tmp_path, **{alias: 2 * own})
    with pytest.raises(CheckpointError, match=f"{alias} = {2 * own} and n_.* contradict"):
        load(tmp_path)


def test_an_mlp_of_the_default_width_that_is_written_out_loads(tmp_path: Path) -> None:
    save_hf(make_model(), tmp_path)
    _spoil_config(tmp_path, n_inner=4 * SMALL.n_embd)
    assert load(tmp_path).spec == SMALL


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_layer", 10**30),
        ("n_layer", 9_000),
        ("n_layer", "2"),
        ("n_layer", True),
        ("n_layer", None),
        ("n_head", 3),
        ("n_embd", 0),
        ("n_embd", 2**20),
        ("n_positions", -1),
        ("vocab_size", 1.5),
        ("layer_norm_epsilon", "small"),
        ("activation_function", ["gelu"]),
        ("tileforge_bias", "no"),
    ],
)
def test_a_hostile_config_is_refused_before_memory_is_taken_for_it(
    tmp_path: Path, key: str, value: object
) -> None:
    save_hf(make_model(), tmp_path)
    _spoil_config(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        load(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        {},
        [],
        {"weight_map": {}},
        {"weight_map": {"wte.weight": "../model.safetensors"}},
        {"weight_map": {"wte.weight": "/etc/passwd"}},
        {"weight_map": {"wte.weight": 7}},
        {"weight_map": {"wte.weight": ""}},
        {"weight_map": {"wte.weight": ".."}},
        {"weight_map": {"wte.weight": "pytorch_model.bin"}},
    ],
)
def test_a_hostile_index_of_weights_is_refused(tmp_path: Path, index: object) -> None:
    save_hf(make_model(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: "):
        load(tmp_path)


def test_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    save_hf(make_model(), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    load(tmp_path)
    state["lm_head.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="output head differs from its token embedding"):
        load(tmp_path)


def test_damaged_or_foreign_folders_are_refused_with_the_reason(tmp_path: Path) -> None:
    save_hf(make_model(), tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()

    _spoil_config(tmp_path, model_type="llama")
    with pytest.raises(CheckpointError, match="missing: num_hidden_layers"):
        load(tmp_path)
    _spoil_config(tmp_path, model_type="gpt2", n_layer=4)
    with pytest.raises(CheckpointError, match=r"12 missing \(first: h\.3"):
        load(tmp_path)
    _spoil_config(tmp_path, n_layer=3, vocab_size=300)
    with pytest.raises(
        CheckpointError, match=r"wte\.weight has the shape \(301, 64\), but .* requires \(300"
    ):
        load(tmp_path)
    _spoil_config(tmp_path, vocab_size=301, activation_function="relu")
    with pytest.raises(CheckpointError, match="activation_function = 'relu'"):
        load(tmp_path)
    _spoil_config(tmp_path, activation_function="gelu")
    assert load(tmp_path).activation == "gelu"
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match="the file is truncated or damaged"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="its weights are a pickle"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        load(tmp_path)
