"""A multimodal checkpoint as training sees it: a text model, and parts that are copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.models.multimodal_types import (
    LOGIT_DEFAULTS,
    LOGIT_KEYS,
    TEXT_TYPES,
    TIED_TEXT_TYPES,
    WHOLE_TYPES,
    TextType,
    WholeType,
)
from payload.models.unread_features import refuse_ignored

_TIED = "tie_word_embeddings"
_NOT_TEXT = ("architectures", "auto_map", "audio_config", "text_config", "vision_config")
"""Keys of a flat config.json that do not describe the text model."""
_MROPE = ("mrope_interleaved", "mrope_section")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedPart:
    """A part of the model that is not trained: a tower or a projector."""

    name: str
    params: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The multimodal model that contains a text model."""

    config: Mapping[str, Any]
    """The config.json that was read, with an explicit tie_word_embeddings."""
    parts: tuple[CopiedPart, ...] = ()
    """The parts that are copied; empty while the tensors are unknown."""
    left_out: int = 0
    """Number of tensors of quantised MTP layers, which checkpoints do not contain."""
    is_tied_explicitly: bool = False
    """True if config.json sets tie_word_embeddings to true."""
    type: WholeType = field(default_factory=WholeType)

    def text_config(self) -> dict[str, Any]:
        """Return the config.json of the text model alone."""
        if self.type.is_flat:
            found = {key: each for key, each in self.config.items() if key not in _NOT_TEXT}
        else:
            found = dict(self.config.get("text_config") or {})
        kind = self.text_type()
        known = TEXT_TYPES.get(kind, TextType(model_type=kind)) if isinstance(kind, str) else None
        if known is not None:
            defaults = {**known.defaults, **self.type.defaults}
            found = {**defaults, **found, "model_type": known.model_type}
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(found.get(key), Mapping):
                found[key] = _without_mrope(found[key])
        return {**found, _TIED: self.config[_TIED]}

    def text_type(self) -> object:
        """Return the text model's model_type in config.json, or the default of the whole model."""
        text = None if self.type.is_flat else self.config.get("text_config")
        return (text or {}).get("model_type") or self.type.text_type

    def is_tied(self) -> bool:
        """Return whether the output head is the token embedding, unless the files have a head."""
        return self.config[_TIED] is True

    def with_tied(self, tied: bool) -> Whole:
        """Return the same model with this tie_word_embeddings in its config.json."""
        return replace(self, config=_with_tied(self.config, tied))

    def module_path(self, path: str) -> str:
        """Return the path in the whole model of a module of the text model."""
        if path.startswith("model."):
            return self.type.body + path.removeprefix("model.")
        return self.type.head if path == "lm_head" else path

    def text_path(self, path: str) -> str:
        """Return the path in the text model of a module of the whole model."""
        if path.startswith(self.type.body):
            return "model." + path.removeprefix(self.type.body)
        return "lm_head" if path == self.type.head else path

    def copied_bytes(self) -> int:
        """Return the bytes of the copied tensors."""
        return sum(each.bytes for each in self.parts)

    def note(self) -> str | None:
        """Return which parts are not trained, and their sizes; None if the tensors are unknown."""
        if not self.parts:
            return None
        sizes = ", ".join(f"{each.name} {each.params:,} parameters" for each in self.parts)
        kept = f"{sizes}: not trained, kept unchanged"
        if not self.left_out:
            return kept
        return (
            f"{kept}; {self.left_out} tensors of mtp (quantised): transformers does not read them, "
            "and checkpoints leave them out"
        )


def find_whole(raw: Mapping[str, Any], *, where: str) -> Whole | None:
    """Return the multimodal model that a config.json describes; None for other models.

    Raises CheckpointError, naming `where`, if text_config is missing, or if the text model computes
    another function than the whole model.
    """
    kind = raw.get("model_type")
    known = WHOLE_TYPES.get(kind) if isinstance(kind, str) else None
    if known is None:
        return None
    text = raw.get("text_config")
    if text is None and known.was_flat:
        known = replace(known, is_flat=True)
    if not known.is_flat and not isinstance(text, Mapping):
        found_text = "is missing" if text is None else f"= {shown(text)}"
        raise CheckpointError(
            f"{where}: text_config {found_text}: model_type {shown(kind)} needs an object with the "
            "text model's sizes. Use a folder with the model's own config.json."
        )
    tied, is_explicit = _read_tied(raw, known)
    config = {key: each for key, each in raw.items() if key != known.tied_key}
    whole = Whole(config=_with_tied(config, tied), is_tied_explicitly=is_explicit, type=known)
    kind = whole.text_type()
    if isinstance(kind, str) and kind in TEXT_TYPES:
        place, read = f"{where}: text_config", whole.text_config()
        refuse_ignored(read, TEXT_TYPES[kind].unread, kind=kind, where=place)
    if not known.scales_logits:
        _require_plain_logits(whole.text_config(), where=where)
    return whole


def _read_tied(raw: Mapping[str, Any], known: WholeType) -> tuple[bool, bool]:
    """Return whether transformers ties the output head, and whether config.json states it.

    If a key is false and another one is true, neither is explicit.
    """
    text = {} if known.is_flat else raw.get("text_config") or {}
    kind = text.get("model_type") or known.text_type
    top = raw.get(known.tied_key or _TIED, raw.get(_TIED))
    given = {"top": top, "text": text.get(_TIED)}
    found = {key: each for key, each in given.items() if isinstance(each, bool)}
    read = found | {
        key: default
        for key, default in (("top", known.tied), ("text", str(kind) in TIED_TEXT_TYPES))
        if key not in found
    }
    if known.is_flat:
        del read["text"]
    used = {"top": ["top"], "text": ["text"], "either": [*read], "never": []}[known.ties]
    tied = any(read[key] for key in used)
    return tied, tied and set(found.values()) == {True}


def _require_plain_logits(text: Mapping[str, Any], *, where: str) -> None:
    """Raise CheckpointError for a key that changes the logits of the text model alone."""
    default = LOGIT_DEFAULTS.get(str(text.get("model_type")))
    for key, neutral in LOGIT_KEYS.items():
        own = default[1] if default is not None and default[0] == key else neutral
        value = text.get(key, own)
        if value is not None and value != neutral:
            raise CheckpointError(
                f"{where}: text_config: {key} = {shown(value)}: the multimodal model ignores this "
                f"key, but its text model alone applies it. Set {key} to {neutral or 'null'}."
            )


def _with_tied(config: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    changed = {**config, _TIED: tied}
    text = config.get("text_config")
    return {**changed, "text_config": {**text, _TIED: tied}} if text is not None else changed


def _without_mrope(rope: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in rope.items() if key not in _MROPE}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}
