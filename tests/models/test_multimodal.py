"""The text model of a multimodal checkpoint: its sizes, and the plan's line on the other parts."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.plan import plan_arguments
from payload.config.model_checks import require_fit
from payload.config.run_config import load_run_config
from payload.core.errors import CheckpointError
from payload.models.multimodal_config import find_whole
from payload.models.multimodal_types import TEXT_TYPES, TIED_TEXT_TYPES, WHOLE_TYPES
from payload.models.registry import read_spec, spec_of
from payload.models.transformers.causal_types import CAUSAL_TYPES
from payload.orchestrate.__main__ import main as orchestrate
from payload.train.models.loading import load
from tests.model_classes.cases import VOCABULARY
from tests.model_classes.multimodal import WHOLE_CASES, load_whole, make_whole, text_parameters


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Qwen3-VL with a separate output head."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    make_whole("Qwen3VL", folder)
    return folder


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """Return a folder with the same config.json and weights, to change."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((base / name).read_bytes())
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: each for key, each in raw.items() if each is not None}))


def test_a_spec_counts_the_text_model_and_names_the_other_parts(tmp_path: Path) -> None:
    model = make_whole("Llama4", tmp_path)
    spec = read_spec(tmp_path)
    assert spec.num_params() == sum(each.numel() for each in text_parameters(model))
    assert spec.whole is not None
    sizes = {each.name: each.params for each in spec.whole.parts}
    assert set(sizes) == {"multi_modal_projector", "vision_model"}
    assert spec.num_params() + sum(sizes.values()) == model.num_parameters()
    assert spec.whole.note() == (
        f"multi_modal_projector {sizes['multi_modal_projector']:,} parameters, vision_model "
        f"{sizes['vision_model']:,} parameters: not trained, kept unchanged"
    )
    # The towers are in bf16.
    copied = 2 * sum(sizes.values())
    assert spec.checkpoint_bytes(state_bytes=0) == 4 * spec.num_params() + copied


@pytest.mark.processes
def test_a_plan_prints_which_parts_are_not_trained(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [each for each in plan_arguments(base, runs=tmp_path) if each != "--json"]
    assert orchestrate(words, os.environ) == 0
    printed = capsys.readouterr().out
    whole = read_spec(base).whole
    assert whole is not None and f"other parts      {whole.note()}" in printed


def test_old_and_new_names_and_configs_of_qwen2_vl_give_the_same_spec(tmp_path: Path) -> None:
    make_whole("Qwen2VL", tmp_path)
    path = tmp_path / "model.safetensors"
    old, stored = read_spec(tmp_path), load_file(path)
    assert "model.layers.0.mlp.up_proj.weight" in stored and "visual.merger.mlp.0.bias" in stored
    raw = json.loads((tmp_path / "config.json").read_text())
    text = {key: each for key, each in raw["text_config"].items() if key != "model_type"}
    change_config(tmp_path, text_config=None, **text)
    assert read_spec(tmp_path) == old
    renamed = {
        name.replace("visual.", "model.visual.").replace("model.l", "model.language_model.l"): each
        for name, each in stored.items()
    }
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        renamed[name.replace("model.", "model.language_model.")] = renamed.pop(name)
    save_file(renamed, path)
    assert read_spec(tmp_path) == old


def test_the_sizes_that_config_json_omits_are_those_of_transformers() -> None:
    """The config.json of Gemma 3 4B on the hub has only these sizes. Source of the 3.88 billion:
    the Gemma 3 report, https://arxiv.org/abs/2503.19786, table 1."""
    text = {
        **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240},
        **{"num_hidden_layers": 34, "sliding_window": 1024},
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    raw = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    spec = spec_of(raw, where="test")
    assert spec.num_params() == pytest.approx(3.88e9, rel=1e-3)
    assert (spec.vocab_size, spec.num_heads(), spec.is_tied()) == (262_208, 8, True)


def test_the_files_decide_whether_the_output_head_of_a_type_that_ties_is_tied(
    tmp_path: Path,
) -> None:
    make_whole("Mistral3, Ministral3", tmp_path)
    change_config(tmp_path, tie_word_embeddings=None)
    untied = read_spec(tmp_path)
    assert not untied.is_tied()
    stored = load_file(tmp_path / "model.safetensors")
    (name,) = (each for each in stored if each.endswith("lm_head.weight"))
    head = stored.pop(name)
    save_file(stored, tmp_path / "model.safetensors")
    tied = read_spec(tmp_path)
    assert tied.is_tied() and tied.num_params() == untied.num_params() - head.numel()
    assert tied.whole is not None and tied.whole.config["tie_word_embeddings"] is True
    # Other ranks build the model from this config.json alone.
    assert spec_of(tied.whole.config, where="test").is_tied()


@pytest.mark.parametrize("value", [True, False])
def test_a_window_that_qwen3_vl_ignores_is_refused(value: bool, folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    window = {"use_sliding_window": value, "sliding_window": 4, "max_window_layers": 0}
    change_config(folder, text_config={**raw["text_config"], **window})
    if value:
        words = "text_config: use_sliding_window = True: transformers ignores this key for model_"
        with pytest.raises(CheckpointError, match=words):
            load(folder)
        return
    theirs, ours = load_whole(folder, dtype=torch.float32), load(folder).eval()
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        logits = ours.logits(ours.hidden(tokens))
        torch.testing.assert_close(logits, theirs(input_ids=tokens).logits, rtol=0, atol=1e-5)


def tie(folder: Path, top: bool | None, text: bool | None) -> None:
    """Write both values of tie_word_embeddings to config.json; None leaves the key out."""
    raw = json.loads((folder / "config.json").read_text())
    for part, value in ((raw, top), (raw["text_config"], text)):
        part.pop("tie_word_embeddings", None)
        if value is not None:
            part["tie_word_embeddings"] = value
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("has_head", [True, False], ids=["a head", "no head"])
@pytest.mark.parametrize(
    "name", ["Llama4", "Llava", "LlavaOnevision", "LFM2VL", "Qwen2VL", "Qwen3VL", "Voxtral"]
)
def test_the_output_head_is_tied_where_transformers_ties_it(
    name: str, has_head: bool, tmp_path: Path
) -> None:
    make_whole(name, tmp_path, tie_word_embeddings=False)
    path, tokens = tmp_path / "model.safetensors", torch.arange(24).reshape(2, 12)
    stored = load_file(path)
    if "lm_head.weight" not in stored and "language_model.lm_head.weight" not in stored:
        stored["lm_head.weight"] = torch.randn(VOCABULARY, 32)
    kept = {key: each for key, each in stored.items() if has_head or "lm_head" not in key}
    save_file(kept, path, metadata={"format": "pt"})
    for top, text in itertools.product((None, False, True), repeat=2):
        tie(tmp_path, top, text)
        theirs, found = load_whole(tmp_path, dtype=torch.float32, output_loading_info=True)
        where = f"top {top}, text_config {text}"
        if found["missing_keys"]:
            with pytest.raises(CheckpointError, match=r"missing \(first: lm_head\.weight\)"):
                load(tmp_path)
            continue
        try:
            model = load(tmp_path).eval()
        except CheckpointError as error:
            # transformers does not tie heads that differ, with a warning.
            assert has_head and "true, but lm_head.weight differs from" in str(error), where
            assert top is not False and text is not False, where
            continue
        with torch.no_grad():
            wanted = theirs.eval()(input_ids=tokens).logits
            found_logits = model.logits(model.hidden(tokens))
        torch.testing.assert_close(found_logits, wanted, rtol=0, atol=1e-5, msg=where)


@pytest.mark.parametrize("value", [True, False])
def test_the_other_name_of_the_key_takes_precedence(value: bool, tmp_path: Path) -> None:
    make_whole("LFM2VL", tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    change_config(tmp_path, tie_embedding=value, tie_word_embeddings=not value)
    _, found = load_whole(tmp_path, output_loading_info=True)
    assert bool(found["missing_keys"]) == (not value)
    spec = read_spec(tmp_path)
    assert spec.is_tied() == value
    assert spec.whole is not None and "tie_embedding" not in spec.whole.config
    if not value:
        with pytest.raises(CheckpointError, match=r"missing \(first: lm_head\.weight\)"):
            load(tmp_path)


def test_a_quantization_config_in_text_config_is_read_unless_the_top_has_one(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    text = {**raw["text_config"], "quantization_config": {"quant_method": "hqq"}}
    empty: tuple[dict[str, Any] | None, ...] = (None, {})
    for top in empty:
        change_config(folder, text_config=text, quantization_config=top)
        words = r"config\.json: text_config: quantization_config: quant_method = 'hqq'"
        with pytest.raises(CheckpointError, match=words):
            read_spec(folder)
    change_config(folder, text_config=text, quantization_config={"quant_method": "fp8"})
    spec = read_spec(folder)
    assert spec.whole is not None and "quant" not in json.dumps(dict(spec.whole.config))


def test_the_text_types_that_tie_by_default_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    skipped = {"gemma4_assistant"}  # has no default config
    found = {
        name
        for name in CAUSAL_TYPES & set(CONFIG_MAPPING) - skipped
        if getattr(CONFIG_MAPPING[name](), "tie_word_embeddings", False)
    }
    assert found == TIED_TEXT_TYPES


def test_quantised_towers_are_refused_by_name(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    name = "model.visual.merger.linear_fc1.weight"
    stored[name] = stored[name].to(torch.float8_e4m3fn)
    stored[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(stored, folder / "model.safetensors")
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    change_config(folder, quantization_config=method)
    with pytest.raises(CheckpointError, match=rf"{name} is quantised, but is no part of the text"):
        read_spec(folder)


def test_a_classifier_is_refused(base: Path, tiny_config: Path) -> None:
    sizes = [f"model.{name}=none" for name in ("n_layer", "n_head", "n_embd")]
    config = load_run_config(
        tiny_config, overrides=[f"model.init={base}", "task.kind=classify", *sizes]
    )
    with pytest.raises(CheckpointError, match="multimodal checkpoint cannot become a classifier"):
        require_fit(read_spec(base), config, vocab_size=None)


def test_a_vocabulary_that_must_grow_is_refused(base: Path, tiny_config: Path) -> None:
    sizes = [f"model.{name}=none" for name in ("n_layer", "n_head", "n_embd")]
    config = load_run_config(tiny_config, overrides=[f"model.init={base}", *sizes])
    spec = read_spec(base)
    require_fit(spec, config, vocab_size=spec.vocab_size, new_tokens=1)
    with pytest.raises(CheckpointError, match="multimodal checkpoint cannot grow"):
        require_fit(spec, config, vocab_size=spec.vocab_size + 1, new_tokens=1)


def test_the_first_name_of_exaone_s_text_model_is_read() -> None:
    raw = {"model_type": "exaone4_5", "text_config": {"model_type": "exaone4_5_text"}}
    whole = find_whole(raw, where="config.json")
    assert whole is not None
    assert whole.text_config()["model_type"] == "exaone4"


@pytest.mark.parametrize(
    ("model_type", "text", "named"),
    [
        ("llava_next", {"model_type": "granite", "logits_scaling": 2.0}, "logits_scaling = 2.0"),
        ("llava", {"model_type": "cohere2"}, "logit_scale = 0.0625"),
        ("internvl", {"model_type": "gemma2"}, "final_logit_softcapping = 30.0"),
        ("gemma3", {"final_logit_softcapping": 0.5}, "final_logit_softcapping = 0.5"),
        ("llava", {"model_type": "falcon_h1", "lm_head_multiplier": 0.25}, "lm_head_multiplier"),
    ],
)
def test_a_text_model_with_other_logits_than_the_whole_is_refused(
    model_type: str, text: dict[str, Any], named: str
) -> None:
    raw = {"model_type": model_type, "text_config": text}
    with pytest.raises(CheckpointError, match=f"{named}.*the multimodal model ignores this key"):
        find_whole(raw, where="config.json")


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("gemma4", {"final_logit_softcapping": 30.0}),
        ("gemma3", {"final_logit_softcapping": None}),
        ("llava_next", {"model_type": "granite", "logits_scaling": 1}),
        ("llava", {"model_type": "cohere2", "logit_scale": 1.0}),
    ],
)
def test_a_text_model_with_the_whole_s_logits_is_read(
    model_type: str, text: dict[str, Any]
) -> None:
    assert find_whole({"model_type": model_type, "text_config": text}, where="") is not None


def test_voxtral_s_own_defaults_apply_to_its_text() -> None:
    from transformers import AutoConfig

    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    theirs = AutoConfig.for_model("voxtral", text_config=dict(text)).text_config
    whole = find_whole({"model_type": "voxtral", "text_config": text}, where="")
    assert whole is not None
    ours = whole.text_config()
    for key in WHOLE_TYPES["voxtral"].defaults:
        wanted = theirs.rope_parameters[key] if key == "rope_theta" else getattr(theirs, key)
        assert ours[key] == wanted, key
    assert ours["hidden_size"] == 64


def test_every_type_has_a_case_and_the_defaults_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    assert {each.model_type for each in WHOLE_CASES.values()} == set(WHOLE_TYPES)
    for name, whole in WHOLE_TYPES.items():
        theirs = CONFIG_MAPPING[name]()
        tied = getattr(theirs, "tie_word_embeddings", None)
        assert bool(tied) == whole.tied, name
        if not whole.is_flat:
            kind = theirs.get_text_config().model_type
            assert kind == whole.text_type or name == "llava", name
    other_names = {"phi3": "phi4_multimodal", "exaone4_5_text": "exaone4"}
    for name, text in TEXT_TYPES.items():
        found = CONFIG_MAPPING[other_names.get(name, name)]()
        for key, default in text.defaults.items():
            value = found.rope_parameters["rope_theta"] if key == "rope_theta" else None
            assert (getattr(found, key, None) if value is None else value) == default, (name, key)
