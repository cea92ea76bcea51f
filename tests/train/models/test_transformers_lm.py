"""Models with transformers' own layers."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.architecture_cases import CASES, make_folder, random_tokens
from payload.core.errors import CheckpointError
from payload.formats.hf_folder import read_config
from payload.models.registry import spec_of
from payload.train.families.transformers.from_config import module_config
from payload.train.families.transformers.model import TransformersLM
from payload.train.families.transformers.probes import require_causal
from payload.train.models.hf_layout import saved_config
from payload.train.models.loading import build, load
from payload.train.models.lora import quantize_base
from payload.train.models.quantized import QuantizedLinear


def built(raw: dict[str, Any], **options: Any) -> TransformersLM:
    return TransformersLM(spec_of(raw, where="config.json"), **options)


def small(model_type: str, **more: Any) -> dict[str, Any]:
    return {**CASES["llama"], "model_type": model_type, **more}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (small("stablelm"), None),
        (small("gemma2", head_dim=32), "soft cap"),
        (small("granite", logits_scaling=8.0), "scale"),
        (small("cohere", logit_scale=0.5), "scale"),
        (small("phi", tie_word_embeddings=False), "the head has a bias"),
    ],
)
def test_our_loss_is_used_where_logits_are_a_plain_linear_layers(
    raw: dict[str, Any], reason: str | None
) -> None:
    model = built(raw)
    assert (model.head_weight() is None) == (reason is not None)
    notes = " ".join(model.speed_notes())
    assert raw["model_type"] in notes
    assert ("all logits in memory" in notes) == (reason is not None)
    assert reason is None or reason in notes
    tokens, targets = random_tokens(raw["vocab_size"])
    wanted = model.eval().module(input_ids=tokens, labels=tokens).logits
    torch.testing.assert_close(model.logits(model.hidden(tokens)), wanted)
    mean = model.token_losses(tokens, targets).mean()
    torch.testing.assert_close(mean, model(tokens, targets))


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            {"model_type": "my_model", "vocab_size": 9},
            "no causal language model of this type",
        ),
        (
            {"model_type": "m", "vocab_size": 9, "auto_map": {"AutoModelForCausalLM": "m.M"}},
            "the model's own code .auto_map. is never run",
        ),
        (small("bert"), "its tokens attend to later tokens"),
        (small("stablelm", quantization_config={"quant_method": "hqq"}), "cannot be dequantised"),
        ({"model_type": "vit", "vocab_size": 9}, "no causal language model"),
        ({"model_type": "bart", "vocab_size": 9}, "no text-only causal language model"),
        (small("stablelm", pad_token_id="x"), "transformers rejects this config"),
        (small("cohere", num_attention_heads=7), "transformers cannot run the model"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(raw: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem) as refused:
        built(raw)
    assert "\n" not in str(refused.value)


def test_who_sees_whom_is_found_without_the_weights_of_4_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight of 4 bits was read")

    for kind, looks_ahead in (("stablelm", False), ("bert", True)):
        model = build(spec_of(small(kind), where="config.json"), random=False)
        quantize_base(model)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                torch.nn.init.normal_(parameter, std=0.1)
        linears = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
        assert linears
        with monkeypatch.context() as patched:
            patched.setattr(QuantizedLinear, "_state", refuse)
            with (
                pytest.raises(CheckpointError, match="attend to later tokens")
                if looks_ahead
                else nullcontext()
            ):
                require_causal(model.module, without_head=True)
        assert not any("forward" in vars(each) for each in linears)


@pytest.mark.parametrize("prefix", ["", "model."], ids=["names in memory", "older names"])
def test_a_head_of_its_own_is_refused_where_the_config_ties_it(prefix: str) -> None:
    model = built(small("stablelm", tie_word_embeddings=True))
    tensors = model.hf_tensors()
    embedding = tensors["model.embed_tokens.weight"]
    tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    model.load_tensors({**tensors, "lm_head.weight": embedding.clone()}, where="folder")
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings = true, but lm_head\.weight"):
        model.load_tensors({**tensors, "lm_head.weight": embedding + 1}, where="folder")


def test_a_router_that_samples_is_seeded_as_dropout_is() -> None:
    assert built(dict(CASES["phimoe"])).draws_masks()
    assert not built(dict(CASES["stablelm"])).draws_masks()


def test_code_in_the_models_folder_never_runs(tmp_path: Path) -> None:
    make_folder(CASES["stablelm"], tmp_path)
    path, ran = tmp_path / "config.json", tmp_path / "ran"
    raw = json.loads(path.read_text())
    raw["auto_map"] = {"AutoModelForCausalLM": "modeling.M", "AutoConfig": "modeling.C"}
    path.write_text(json.dumps(raw))
    (tmp_path / "modeling.py").write_text(f"open({str(ran)!r}, 'w')\nclass M: ...\nclass C: ...\n")
    model = load(tmp_path)
    assert type(model).__name__ == "TransformersLM"
    assert "auto_map" not in model.hf_config()
    assert not ran.exists()


@pytest.mark.parametrize("infinity", ["Infinity", '{"__float__": "Infinity"}'])
@pytest.mark.parametrize("kind", ["granitemoehybrid", "falcon_h1"])
def test_a_config_with_infinity_as_transformers_writes_it_is_read_and_saved(
    kind: str, infinity: str, tmp_path: Path
) -> None:
    raw = small(kind, time_step_limit=[0.0, "LIMIT"], num_hidden_layers=1, num_local_experts=0)
    raw |= {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "shared_intermediate_size": 8,
    }
    text = json.dumps(raw).replace('"LIMIT"', infinity)
    (tmp_path / "config.json").write_text(text)
    model = built(read_config(tmp_path))
    assert model.module.config.time_step_limit == (0.0, math.inf)
    written = json.dumps(model.hf_config(), allow_nan=False)
    (tmp_path / "config.json").write_text(written)
    assert AutoConfig.from_pretrained(tmp_path).time_step_limit == (0.0, math.inf)


def test_a_config_that_our_decoder_does_not_know_falls_back_and_says_so() -> None:
    model = build(spec_of(CASES["llama, dynamic rope"], where="config.json"))
    assert isinstance(model, TransformersLM)
    assert "dynamic" in model.speed_notes()[0]


@pytest.mark.parametrize("name", ["stablelm", "qwen2_moe", "gpt_neox"])
def test_what_is_saved_loads_in_transformers_and_here(name: str, tmp_path: Path) -> None:
    theirs = make_folder(CASES[name], tmp_path / "first")
    model = load(tmp_path / "first")
    again = tmp_path / "again"
    again.mkdir()
    tensors = {key: value.contiguous() for key, value in model.hf_tensors().items()}
    save_file(tensors, again / "model.safetensors", metadata={"format": "pt"})
    (again / "config.json").write_text(json.dumps(model.hf_config()))
    assert set(tensors) == set(load_file(tmp_path / "first" / "model.safetensors"))
    tokens, _ = random_tokens(theirs.config.vocab_size)
    with torch.no_grad():
        wanted = theirs(input_ids=tokens).logits
        loaded: Any = AutoModelForCausalLM.from_pretrained(again)
        torch.testing.assert_close(loaded.eval()(input_ids=tokens).logits, wanted)
        ours = load(again).eval()
        torch.testing.assert_close(ours.logits(ours.hidden(tokens)), wanted)


@pytest.mark.parametrize("name", ["gpt_neox", "qwen2_moe"])
def test_codes_of_quantised_weights_are_not_taken_for_weights(name: str, tmp_path: Path) -> None:
    make_folder(CASES[name], tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    matrix = next(each for each in tensors if "layers.1." in each and tensors[each].dim() == 2)
    tensors[matrix] = (100 * tensors[matrix]).to(torch.int8)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{matrix} is I8: quantised weights"):
        load(tmp_path)


@pytest.mark.parametrize(
    "key",
    ["attn_implementation", "_attn_implementation", "experts_implementation", "kernel_config"],
)
def test_no_key_of_config_json_chooses_code(key: str) -> None:
    plain, raw = small("stablelm"), small("stablelm", **{key: "evil/kernel"})
    config = module_config(raw, where="config.json", dropout=0.0)
    wanted = module_config(plain, where="config.json", dropout=0.0)
    assert config.to_dict() == wanted.to_dict()
    assert config._attn_implementation == wanted._attn_implementation
    saved = saved_config({**raw, "text_config": {key: "evil/kernel"}}, architecture="A")
    assert key not in saved and saved["text_config"] == {}


@pytest.mark.parametrize("name", ["stablelm", "qwen2_moe"])
def test_a_missing_weight_is_refused_not_made_up(name: str, tmp_path: Path) -> None:
    make_folder(CASES[name], tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    gone = next(each for each in tensors if "layers.1." in each and "mlp" in each)
    del tensors[gone]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing"):
        load(tmp_path)


def test_dropout_is_that_of_the_run_not_of_the_config() -> None:
    tokens, targets = random_tokens(1031)
    raw = small("stablelm", attention_dropout=0.5)
    still = built(raw)
    assert still.training
    assert still(tokens, targets) == still(tokens, targets)
    shaken = built(small("stablelm"), dropout=0.5)
    assert shaken(tokens, targets) != shaken(tokens, targets)


def test_a_model_without_a_key_value_cache_generates_from_its_tokens() -> None:
    raw = {
        "model_type": "mamba",
        "vocab_size": 97,
        "hidden_size": 16,
        "state_size": 4,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
    }
    model = built(raw).eval()
    assert "no key-value cache" in " ".join(model.speed_notes())
    tokens, _ = random_tokens(97)
    caches = model.new_caches()
    with torch.no_grad():
        parts = [model.hidden(part, caches) for part in torch.split(tokens, [7, 1, 40], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model.hidden(tokens))
    assert caches[0].num_tokens() == tokens.shape[1]


def test_muon_gets_the_layers_matrices_but_neither_embedding_nor_head() -> None:
    model = built(small("stablelm", tie_word_embeddings=False))
    chosen = {name for name, _ in model.named_parameters() if model.is_hidden_matrix(name)}
    assert len(chosen) == 7 * 4
    assert all("_proj" in name for name in chosen)
