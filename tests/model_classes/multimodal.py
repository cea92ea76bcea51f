"""Small random multimodal models, whole: the text model, its towers, and a processor's files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.model_classes.cases import CASES, VOCABULARY

WORDS = VOCABULARY - 8
"""Tokens of text; the others represent images, audio and video, as in all these models."""
IMAGE, AUDIO, VIDEO = WORDS, WORDS + 4, WORDS + 1
_SIGLIP = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
_PIXTRAL = {"model_type": "pixtral", **_SIGLIP, "head_dim": 8}
_QWEN_VISION = {
    **{"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 14},
    **{"out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
_QWEN_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
PROCESSOR = {
    "processor_config.json": {"image_seq_length": 4},
    "preprocessor_config.json": {"size": {"height": 28, "width": 28}},
    "generation_config.json": {"eos_token_id": 2},
}
"""Files of a processor, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCase:
    """One class of multimodal models."""

    model_type: str
    sizes: Mapping[str, Any]


def _text(name: str, **more: Any) -> dict[str, Any]:
    return {**CASES[name].config(), **more}


def _case(model_type: str, **sizes: Any) -> WholeCase:
    return WholeCase(model_type=model_type, sizes=sizes)


def _qwen_vl(model_type: str, text: str, vision: Mapping[str, Any]) -> WholeCase:
    return _case(
        model_type,
        text_config=_text(text, model_type=f"{model_type}_text", rope_parameters=_MROPE),
        vision_config=vision,
        **_QWEN_TOKENS,
    )


WHOLE_CASES: Mapping[str, WholeCase] = {
    "Exaone4_5": _case(
        "exaone4_5",
        text_config=_text("Exaone4"),
        vision_config=_QWEN_VISION,
        **_QWEN_TOKENS,
    ),
    "Gemma3": _case(
        "gemma3",
        text_config=_text("Gemma3, text"),
        vision_config={"model_type": "siglip_vision_model", **_SIGLIP},
        **{"mm_tokens_per_image": 4, "image_token_index": IMAGE},
    ),
    "Gemma3n": _case(
        "gemma3n",
        text_config=_text("Gemma3n, text", vocab_size_per_layer_input=WORDS),
        vision_config={"vocab_size": 4, "vocab_offset": IMAGE},
        audio_config={
            **{"hidden_size": 16, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2},
            **{"input_feat_size": 16, "sscp_conv_channel_size": [8, 4]},
            **{"vocab_size": 4, "vocab_offset": AUDIO},
        },
        **{"image_token_id": IMAGE, "audio_token_id": AUDIO},
    ),
    "Gemma4": _case(
        "gemma4",
        text_config=_text("Gemma4, text"),
        vision_config={**_SIGLIP, "head_dim": 8, "num_key_value_heads": 2},
        audio_config={
            **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            "output_proj_dims": 16,
        },
        **{
            **_QWEN_TOKENS,
            "audio_token_id": AUDIO,
            "boi_token_id": WORDS + 2,
            "eoi_token_id": WORDS + 3,
        },
        **{"boa_token_id": WORDS + 5, "eoa_token_index": WORDS + 6},
    ),
    "Idefics3": _case(
        "idefics3",
        text_config=_text("Llama"),
        vision_config=_SIGLIP,
        image_token_id=IMAGE,
    ),
    "InternVL": _case(
        "internvl",
        text_config=_text("Qwen2"),
        vision_config={**_SIGLIP, "image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=IMAGE,
    ),
    "LFM2VL": _case(
        "lfm2_vl",
        text_config=_text("LFM2"),
        vision_config={**_SIGLIP, "num_patches": 4},
        image_token_id=IMAGE,
    ),
    "Llama4": _case(
        "llama4",
        text_config=_text("Llama4, text"),
        vision_config={
            **{**_SIGLIP, "vision_output_dim": 32, "projector_input_dim": 32},
            "projector_output_dim": 32,
        },
        image_token_index=IMAGE,
    ),
    "Llava": _case(
        "llava",
        text_config=_text("Llama"),
        vision_config={"model_type": "clip_vision_model", **_SIGLIP},
        image_token_index=IMAGE,
    ),
    "LlavaNext": _case(
        "llava_next",
        text_config=_text("Llama"),
        vision_config={"model_type": "clip_vision_model", **_SIGLIP},
        image_token_index=IMAGE,
    ),
    "LlavaOnevision": _case(
        "llava_onevision",
        text_config=_text("Qwen2"),
        vision_config={"model_type": "siglip_vision_model", **_SIGLIP},
        **{"image_token_index": IMAGE, "video_token_index": VIDEO},
    ),
    "Mistral3": _case(
        "mistral3",
        text_config=_text("Mistral"),
        vision_config=_PIXTRAL,
        image_token_index=IMAGE,
    ),
    "Mistral3, Ministral3": _case(
        "mistral3",
        text_config=_text("Ministral3"),
        vision_config=_PIXTRAL,
        **{"image_token_index": IMAGE, "tie_word_embeddings": False},
    ),
    "Phi4Multimodal": _case(
        "phi4_multimodal",
        vision_config={**_SIGLIP, "crop_size": 28, "image_token_id": IMAGE},
        audio_config={
            **{"hidden_size": 16, "intermediate_size": 24, "num_blocks": 1, "input_size": 16},
            **{"num_attention_heads": 2, "ext_pw_out_channel": 16, "nemo_conv_channels": 16},
            "audio_token_id": AUDIO,
        },
        **{key: each for key, each in CASES["Phi3"].sizes.items() if key != "sliding_window"},
    ),
    "Qwen2Audio": _case(
        "qwen2_audio",
        text_config=_text("Qwen2"),
        audio_config={
            **{"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2},
            **{"encoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 20},
        },
        audio_token_index=AUDIO,
    ),
    "Qwen2VL": _qwen_vl(
        "qwen2_vl",
        "Qwen2",
        {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 14},
    ),
    "Qwen2_5VL": _qwen_vl("qwen2_5_vl", "Qwen2", {**_QWEN_VISION, "fullatt_block_indexes": [1]}),
    "Qwen3VL": _qwen_vl("qwen3_vl", "Qwen3", _QWEN_VISION),
    "Qwen3_5": _case(
        "qwen3_5",
        text_config=_text("Qwen3_5, text"),
        vision_config=_QWEN_VISION,
        **_QWEN_TOKENS,
    ),
    "Qwen3_5Moe": _case(
        "qwen3_5_moe",
        text_config=_text("Qwen3_5Moe, text"),
        vision_config=_QWEN_VISION,
        **_QWEN_TOKENS,
    ),
    "SmolVLM": _case(
        "smolvlm",
        text_config=_text("Llama"),
        vision_config=_SIGLIP,
        image_token_id=IMAGE,
    ),
    "Voxtral": _case(
        "voxtral",
        text_config=_text("Llama"),
        audio_config={
            **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"intermediate_size": 64, "num_mel_bins": 8, "max_source_positions": 20},
        },
        audio_token_id=AUDIO,
    ),
}
"""Whole multimodal classes by their names in the table."""
_PACKAGES = {"Gemma3n": "timm"}
"""Packages that transformers needs to build a class."""


def missing_package(name: str) -> str | None:
    """Return the package that transformers needs for this class and that is not installed."""
    package = _PACKAGES.get(name)
    return package if package and importlib.util.find_spec(package) is None else None


def make_whole(name: str, folder: Path, **text: Any) -> Any:
    """Save transformers' model with random weights, and a processor's files; return the model.

    The towers are in bf16 and the text model is in fp32. `text` changes the text model's sizes.
    """
    from transformers import AutoConfig

    case = WHOLE_CASES[name]
    sizes = dict(case.sizes)
    if text:
        sizes["text_config"] = {**sizes["text_config"], **text}
    config = AutoConfig.for_model(case.model_type, **sizes)
    for each in (config, *(getattr(config, key) for key in config.sub_configs)):
        each._attn_implementation = "eager"
        each._experts_implementation = "eager"
    torch.manual_seed(0)
    model: Any = whole_class(config)._from_config(config)
    model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    own = {id(each) for each in text_parameters(model)}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter.data = parameter.data.bfloat16()
    model.save_pretrained(folder)
    for file, content in PROCESSOR.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return model


def whole_class(config: Any) -> Any:
    """Return the class of transformers for the whole multimodal model."""
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING

    return MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]


def load_whole(folder: Path, **options: Any) -> Any:
    """Return the model in `folder` in the class that its config.json names.

    With `output_loading_info`, also return what transformers reports about the tensors.
    """
    import transformers

    (named,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    loaded: Any = getattr(transformers, named).from_pretrained(folder, **options)
    return loaded if options.get("output_loading_info") else loaded.eval()


def text_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of a whole model's text model, each once."""
    found = {
        id(each): each
        for name, each in model.get_decoder().named_parameters()
        if "embed_tokens_extend" not in name
    }
    head = model.get_output_embeddings().weight
    return [*({id(head): head} | found).values()]
