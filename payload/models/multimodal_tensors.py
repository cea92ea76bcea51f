"""The tensors of a multimodal checkpoint, divided into the text model's and all others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from payload.core.errors import CheckpointError
from payload.formats.hf_folder import CONFIG_FILE, read_config
from payload.formats.quantized.stored_weight import StoredWeight
from payload.formats.quantized.weight_headers import weight_headers
from payload.formats.tensor_headers import TensorHeader
from payload.models.multimodal_config import CopiedPart, Whole, find_whole

_BODIES = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
"""Prefixes of the text model's tensors in files, instead of `model.`."""
_HEADS = ("language_model.lm_head.", "lm_head.")
_MTP = "mtp."
"""Prefix of the layers that predict further tokens (multi-token prediction). transformers does not
read them."""
_EMBEDDING = "embed_tokens.weight"
_PLAIN_PARTS = frozenset({"embed_tokens", "layers", "norm"})
"""Names of the text model's parts after the prefix `model.`. Parts of other models have the same
prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextNames:
    """The names that the text model's tensors have in a checkpoint's files."""

    body: str
    head: str

    def text_name(self, name: str) -> str | None:
        """Convert a tensor's name in the files to its name in the text model; None for other
        parts."""
        if name.startswith(self.head):
            return "lm_head." + name.removeprefix(self.head)
        rest = name.removeprefix(self.body)
        if rest == name or (self.body == "model." and rest.split(".")[0] not in _PLAIN_PARTS):
            return None
        return "model." + rest

    def file_name(self, name: str) -> str:
        """Convert a tensor's name in the text model to its name in the files."""
        if name.startswith("lm_head."):
            return self.head + name.removeprefix("lm_head.")
        return self.body + name.removeprefix("model.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTensors:
    """The tensors of a multimodal checkpoint."""

    names: TextNames
    text: Mapping[str, TensorHeader]
    """The tensors of the text model by their names in the text model."""
    copied: Mapping[str, TensorHeader]
    """All other tensors by their names in the files, without those in `left_out`."""
    left_out: frozenset[str] = frozenset()
    """Names in the files of quantised MTP layers, which predict further tokens."""


def split_tensors(headers: Mapping[str, TensorHeader], *, where: str) -> WholeTensors:
    """Divide a multimodal checkpoint's tensors into the text model's and all others.

    If one of the MTP layers is quantised, all of them are left out. Raises CheckpointError, naming
    `where`, if the text model or all other parts are missing, or if other weights outside the text
    model are quantised.
    """
    names = _text_names(headers, where=where)
    left_out = _quantised_mtp(headers)
    text, copied = {}, {}
    for name, header in headers.items():
        own = names.text_name(name)
        if own is not None:
            text[own] = header
        elif name in left_out:
            continue
        elif isinstance(header, StoredWeight):
            raise CheckpointError(
                f"{where}: {name} is quantised, but is no part of the text model. Use a checkpoint "
                "without quantisation, or with a quantised text model only."
            )
        else:
            copied[name] = header
    if not copied:
        raise CheckpointError(
            f"{where}: no tensor is outside the text model, but {CONFIG_FILE} describes a "
            f"multimodal model. Use the complete checkpoint, or the text model's own {CONFIG_FILE}."
        )
    return WholeTensors(names=names, text=text, copied=copied, left_out=left_out)


def _quantised_mtp(headers: Mapping[str, TensorHeader]) -> frozenset[str]:
    """Return the names of all MTP tensors if one is quantised; otherwise nothing.

    A checkpoint's config.json has no quantization_config, so its readers could not use the bytes of
    quantised weights.
    """
    found = {name: each for name, each in headers.items() if name.startswith(_MTP)}
    is_quantised = any(isinstance(each, StoredWeight) for each in found.values())
    return frozenset(found if is_quantised else ())


def model_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the tensors of the model in `folder`; of a multimodal model, only the text model's.

    Quantised weights are a `StoredWeight`. Raises CheckpointError.
    """
    headers = weight_headers(folder)
    if not (folder / CONFIG_FILE).exists():
        return headers
    whole = find_whole(read_config(folder), where=str(folder / CONFIG_FILE))
    return headers if whole is None else dict(split_tensors(headers, where=str(folder)).text)


def with_tensors(whole: Whole, tensors: WholeTensors) -> Whole:
    """Return `whole` with the sizes of its copied parts, and with the tying that the tensors show.

    If the files have an output head, it is tied to the token embedding only if config.json states
    it explicitly, which loading verifies. As in transformers, a type's default then has no effect.
    """
    has_head = any(name.startswith("lm_head.") for name in tensors.text)
    tied = whole.is_tied_explicitly or (whole.is_tied() and not has_head)
    parts, left_out = _parts(tensors.copied), len(tensors.left_out)
    return replace(whole.with_tied(tied), parts=parts, left_out=left_out)


def _text_names(names: Iterable[str], *, where: str) -> TextNames:
    found = set(names)
    body = next((each for each in _BODIES if each + _EMBEDDING in found), None)
    if body is None:
        raise CheckpointError(
            f"{where}: no tensor is the token embedding of a text model; the known names are "
            f"{', '.join(each + _EMBEDDING for each in _BODIES)}. Save the model with the class "
            "that its config.json names."
        )
    head = next((each for each in _HEADS if any(name.startswith(each) for name in found)), None)
    if head is None:
        head = _HEADS[0] if body.startswith("language_model.") else _HEADS[1]
    return TextNames(body=body, head=head)


def _parts(copied: Mapping[str, TensorHeader]) -> tuple[CopiedPart, ...]:
    params: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name, header in copied.items():
        part = name.removeprefix("model.").split(".")[0]
        params[part] = params.get(part, 0) + math.prod(header.shape)
        sizes[part] = sizes.get(part, 0) + header.num_bytes()
    return tuple(CopiedPart(name=each, params=params[each], bytes=sizes[each]) for each in params)
