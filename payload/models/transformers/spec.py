"""Sizes and costs of a model that transformers runs, counted from the model's tensors.

Models of a family that this project does not implement are trained with the code of transformers.
Their config.json does not give the shapes of the parameters, but the headers of the safetensors
files do. Without these files, methods that need the number of parameters raise an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.core.validation.records import build
from payload.formats.quantized.weight_headers import weight_headers
from payload.models.fixed_vocabulary import why_fixed_vocabulary
from payload.models.spec import (
    EXPERT_BIASES,
    PROCESS_BYTES,
    GradientSize,
    LinearSize,
    ModelSpec,
    ParameterSize,
    RankSetting,
)
from payload.models.transformers.causal_types import CAUSAL_TYPES
from payload.models.transformers.ignored_tensors import ignored_tensors
from payload.models.transformers.separated_documents import SEPARATING_TYPES

_FIX = "Use a folder in the Hugging Face layout, with its own config.json."
_BUFFER = re.compile(
    r"(\.inv_freq|\.masked_bias|\.position_ids|\.rotary_emb\..*|\.layer_scalar|"
    rf"{'|'.join(map(re.escape, EXPERT_BIASES))})\Z"
)
_HEAD = re.compile(r"(\A|\.)(lm_head|embed_out)\.weight\Z")
_EMBEDDING = re.compile(r"(\A|[._])(embed\w*|\w*embeddings?|wte|wpe)(\.\w+)*\.weight\Z")
_POSITIONS = re.compile(r"(\A|\.)(wpe|\w*pos\w*)(\.\w+)*\.weight\Z")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_EXPERTS = re.compile(r"\.experts(\.|\Z)")
_ATTENTION = re.compile(
    r"\.(\d+)\.(?:[\w.]*[._])?(?<!linear_)(?:self_attn|attn|attention|self_attention)\."
)
_RECURRENT = re.compile(
    r"(\A|[._])(A_log|a_log|ssm\w*|mamba|linear_attn|time_decay|recurrent_block)(\.|\Z)"
)
_NUMBER = re.compile(r"\.(\d+)\.")
_FUSED_OUTPUT = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
_ROUTER = re.compile(r"\.(gate|router|wg)\.weight\Z")


_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "width": ("hidden_size", "n_embd", "d_model", "model_dim", "dim"),
    "head_dim": ("head_dim", "kv_channels", "d_kv", "attention_head_dim"),
    "value_dim": ("v_head_dim",),
    "context": (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "max_seq_len",
        "seq_length",
        "n_ctx",
    ),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "active_experts": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k"),
}
"""The names of each size in different families, the most common name first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """The sizes in a config.json, each found by one of the names in `_NAMES`."""

    vocab_size: int = checked(low=1, high=2**24)
    layers: int | None = checked(None, low=1, high=10_000)
    heads: int | None = checked(None, low=1, high=2**14)
    width: int | None = checked(None, low=1, high=2**20)
    head_dim: int | None = checked(None, low=1, high=2**14)
    value_dim: int | None = checked(None, low=1, high=2**14)
    context: int | None = checked(None, low=1, high=2**30)
    # 0 in the config of a dense model of a family that also has mixtures.
    experts: int | None = checked(None, low=0, high=2**16)
    active_experts: int | None = checked(None, low=0, high=2**16)
    tie_word_embeddings: bool | None = None
    qk_nope_head_dim: int | None = checked(None, low=0, high=2**14)
    qk_rope_head_dim: int | None = checked(None, low=0, high=2**14)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts derived from the names and shapes of a model's tensors."""

    params: int
    multiplying: int
    """Number of weights in the matmuls of each token; of the experts, only active experts count."""
    kept_elements: int
    """Number of elements that the matmuls of one token read and write."""
    embedding: int
    attention_layers: int
    """Number of layers with attention tensors; 0 if the tensors' names do not show which layers
    have attention."""
    recurrent: str | None
    """Name of a tensor in a recurrence; None = no recurrence. Operations of a recurrence are not
    counted."""
    gradients: tuple[GradientSize, ...]
    experts: int
    """Number of weights in all experts."""
    linears: tuple[LinearSize, ...]
    """The layers' linears. Until the module is built, the names are the names in the files."""
    others: tuple[ParameterSize, ...] = ()
    """Matrices of the module beside `linears`, and stacks of matrices; empty until the module is
    built."""
    has_modules: bool = False
    """True if the linears' names are from the built module; False if they are from the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSpec(ModelSpec):
    """The sizes in a config.json, and counts if the tensors are available."""

    layers: int | None
    heads: int | None
    hidden_size: int | None
    query_dim: int
    """Width of a head's queries and keys; 0 = unknown."""
    value_dim: int
    max_tokens: int | None
    experts: int
    """Number of experts; 0 = no experts."""
    active_share: float
    """Share of the experts that process a token; 1 without experts."""
    tie_word_embeddings: bool | None
    """None = not in the config; in this case the presence of a head tensor decides."""
    counts: Counts | None = field(default=None, repr=False)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The config.json that was read; the config.json of a checkpoint is derived from it."""

    def with_vocab_size(self, rows: int) -> OtherSpec:
        """Return the same model with `rows` rows in its embedding and output head."""
        added = (rows - self.vocab_size) * self.width()
        counts = self.counts
        if counts is not None:
            grown = replace(counts, embedding=counts.embedding + added)
            counts = replace(
                grown,
                params=counts.params + added * (1 if self.is_tied() else 2),
                multiplying=counts.multiplying + added,
                gradients=tuple(
                    replace(each, elements=each.elements + added)
                    if each.elements == counts.embedding and each.kind in ("head", "embedding")
                    else each
                    for each in counts.gradients
                ),
            )
        config = {**self.config, "vocab_size": rows}
        return replace(self, vocab_size=rows, counts=counts, config=config)

    def why_fixed_vocabulary(self) -> str | None:
        """Return why the vocabulary cannot grow, or None if it can."""
        return why_fixed_vocabulary(self.config)

    def why_not_packed(self) -> str | None:
        """Return why a block should hold only one conversation, or None if it can hold several."""
        if self.model_type in SEPARATING_TYPES:
            return None
        return (
            f"transformers' layers of model_type {self.model_type!r} may mix the conversations of "
            "a block"
        )

    def context(self) -> int:
        """Return the longest context of the weights in tokens; if unknown, `sequence_length`."""
        return self.max_tokens or self.sequence_length

    def rope_switch(self) -> int | None:
        """Return the context in pre-training if longer texts have LongRoPE's long factors."""
        rope = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        if "longrope" not in (rope.get("rope_type"), rope.get("type")):
            return None
        key = "original_max_position_embeddings"
        found = self.config.get(key) or rope.get(key)
        return found if isinstance(found, int) else None

    def num_layers(self) -> int:
        """Return the number of layers; 0 if the config does not give it."""
        return self.layers or 0

    def num_heads(self) -> int:
        """Return the number of query heads of a layer; 0 if the config does not give it."""
        return self.heads or 0

    def width(self) -> int:
        """Return the width of the residual stream; 0 if the config does not give it."""
        return self.hidden_size or 0

    def is_tied(self) -> bool:
        """Return whether the output head is the token embedding."""
        if self.tie_word_embeddings is not None:
            return self.tie_word_embeddings
        return self.counts is not None and all(
            each.kind != "head" for each in self.counts.gradients
        )

    def num_params(self) -> int:
        """Return the number of all weights. Raises CheckpointError if it is unknown."""
        return self._known().params

    def flops_per_token(self) -> int:
        """Return the floating-point operations of forward and backward for one token.

        Attention is left out if the config does not give the heads. The operations of a recurrence
        are always left out; see `note`. Raises CheckpointError if the parameters are unknown.
        """
        counts = self._known()
        head = (self.query_dim + self.value_dim) * self.num_heads()
        attention = (counts.attention_layers or self.num_layers()) * head * self.sequence_length
        return 6 * (counts.multiplying + attention)

    def note(self) -> str | None:
        """Return a note on what the counts leave out, or None."""
        if self.counts is None or self.counts.recurrent is None:
            return None
        return (
            f"the FLOPs of {self.model_type}'s recurrent layers ({self.counts.recurrent}) include "
            "only their matrices"
        )

    def memory_bytes(self, setting: RankSetting) -> int:
        """Estimate a training rank's peak memory, the interpreter and torch included.

        A layer keeps the inputs and outputs of its matmuls, and the inputs and outputs of its norms
        in fp32. Raises CheckpointError if the parameters are unknown.
        """
        counts, tokens = self._known(), setting.micro_batch_size * self.sequence_length
        size = setting.value_bytes()
        kept = counts.kept_elements * size + 20 * self.num_layers() * self.width()
        logits = setting.plain_logits_bytes(self.vocab_size, tokens=tokens)
        return counts.params * setting.trained_bytes() + PROCESS_BYTES + tokens * kept + logits

    def gradient_sizes(self) -> tuple[GradientSize, ...]:
        """Return the parameters in the order in which the backward pass finishes them."""
        return self._known().gradients

    def embedding_size(self) -> int:
        """Return the number of elements in the token embedding."""
        return self.counts.embedding if self.counts else self.vocab_size * self.width()

    def linears(self) -> tuple[LinearSize, ...]:
        """Return the layers' linears; see `Counts.linears` for their names."""
        return self.counts.linears if self.counts else ()

    def parameters_beside_linears(self) -> tuple[ParameterSize, ...]:
        """Return the parameters outside the linears that an adapter can target.

        Empty until the module exists.
        """
        return self.counts.others if self.counts else ()

    def expert_params(self) -> int:
        """Return the number of weights in the experts."""
        return self.counts.experts if self.counts else 0

    def has_known_modules(self) -> bool:
        """Return whether the linears' names come from the built module."""
        return self.counts is not None and self.counts.has_modules

    def matmul_size(self) -> int:
        """Return the number of weights in each token's matmuls; only active experts count."""
        return self._known().multiplying

    def is_counted(self) -> bool:
        """Return whether the parameters have been counted from tensors."""
        return self.counts is not None

    def with_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherSpec:
        """Return the same model with its tensors counted; `shapes` maps names to shapes.

        Tensors that transformers does not read are left out.
        """
        tied = bool(self.tie_word_embeddings)
        ignored = ignored_tensors(shapes, model_type=self.model_type, layers=self.num_layers())
        read = {name: shape for name, shape in shapes.items() if name not in ignored}
        return replace(self, counts=_count(read, self, tied=tied))

    def with_modules(
        self, linears: tuple[LinearSize, ...], others: tuple[ParameterSize, ...]
    ) -> OtherSpec:
        """Return the same model with the linears and other matrices of its module."""
        counts = replace(self._known(), linears=linears, others=others, has_modules=True)
        return replace(self, counts=counts)

    def _known(self) -> Counts:
        if self.counts is None:
            raise CheckpointError(
                f"model_type {shown(self.model_type)}: config.json alone does not determine the "
                "number of parameters. Use a folder that also has the safetensors files."
            )
        return self.counts


def has_known_sizes(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json has a known model type, or sizes with names that we know.

    The result is False for an unknown type if all sizes have unknown names. `read` rejects configs
    without a type or sizes, and models that read more than text.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or not _NAME.fullmatch(kind) or kind in CAUSAL_TYPES:
        return True
    names = {name for names in _NAMES.values() for name in names}
    if any(key in names or key.endswith("_config") for key in raw):
        return True
    sizes = [key for key, value in raw.items() if type(value) is int]
    return not any(key != "vocab_size" and not key.endswith("_token_id") for key in sizes)


def read(raw: Mapping[str, Any], *, where: str) -> OtherSpec:
    """Return the spec that a config.json describes, without counts. Raises CheckpointError."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or not _NAME.fullmatch(kind):
        raise CheckpointError(f"{where}: model_type = {shown(kind)}: must be a name. {_FIX}")
    _refuse_others(raw, kind, where)
    if "vocab_size" not in raw:
        raise CheckpointError(
            f"{where}: model_type {shown(kind)} has no vocab_size, so it is not a text-only "
            f"language model. {_FIX}"
        )
    sizes = {key: raw[key] for key in _Config.__dataclass_fields__ if key in raw}
    for size, names in _NAMES.items():
        sizes.pop(size, None)
        named = [name for name in names if raw.get(name) is not None]
        if named:
            sizes[size] = raw[named[0]]
    config = build(_Config, sizes, where=where, fix=_FIX, error=CheckpointError)
    query_dim = config.head_dim or 0
    if config.qk_nope_head_dim is not None:
        query_dim = config.qk_nope_head_dim + (config.qk_rope_head_dim or 0)
    elif not query_dim and config.width and config.heads:
        query_dim = config.width // config.heads
    return OtherSpec(
        model_type=kind,
        sequence_length=config.context or 1024,
        vocab_size=config.vocab_size,
        layers=config.layers,
        heads=config.heads,
        hidden_size=config.width,
        query_dim=query_dim,
        value_dim=config.value_dim or query_dim,
        max_tokens=config.context,
        experts=config.experts or 0,
        active_share=_active_share(config),
        tie_word_embeddings=config.tie_word_embeddings,
        config=dict(raw),
    )


def read_folder(raw: Mapping[str, Any], *, folder: Path, where: str) -> OtherSpec:
    """Return the spec of the model in `folder`, counted if it has weights.

    Raises CheckpointError, for example for damaged weights.
    """
    spec = read(raw, where=where)
    if not any(folder.glob("*.safetensors*")):
        return spec
    return spec.with_tensors(
        {name: each.shape for name, each in weight_headers(folder).items() if each.is_weight()}
    )


def _refuse_others(raw: Mapping[str, Any], kind: str, where: str) -> None:
    """Raise CheckpointError if the model is not a text-only causal language model."""
    parts = [key for key in ("vision_config", "audio_config") if raw.get(key) is not None]
    if parts:
        raise CheckpointError(
            f"{where}: {parts[0]}: model_type {shown(kind)} reads more than text. Use a "
            "text-only model, or a type in docs/guides/multimodal.md."
        )
    if raw.get("is_encoder_decoder") is True:
        raise CheckpointError(
            f"{where}: is_encoder_decoder = true: model_type {shown(kind)} is not a causal "
            "language model. Use a decoder-only model."
        )
    if kind not in CAUSAL_TYPES:
        remote = ", and the model's own code (auto_map) is never run" if "auto_map" in raw else ""
        raise CheckpointError(
            f"{where}: model_type = {shown(kind)}: transformers has no causal language model of "
            f"this type{remote}. Use a model that transformers builds from its own code."
        )


def _active_share(config: _Config) -> float:
    if not config.experts or not config.active_experts:
        return 1.0
    return min(1.0, config.active_experts / config.experts)


def _count(shapes: Mapping[str, tuple[int, ...]], spec: OtherSpec, *, tied: bool) -> Counts:
    """Count the tensors; their names distinguish embedding, head, experts and other tensors."""
    weights = {name: shape for name, shape in shapes.items() if not _BUFFER.search(name)}
    heads = [name for name in weights if _HEAD.search(name)]
    if tied:
        weights = {name: shape for name, shape in weights.items() if name not in heads}
        heads = []
    embeddings = [
        name
        for name, shape in weights.items()
        if len(shape) == 2 and _EMBEDDING.search(name) and name not in heads
    ]
    tables = [name for name in embeddings if not _POSITIONS.search(name)]
    table = max((math.prod(weights[name]) for name in tables), default=0)
    multiplying = kept = 0.0
    for name, shape in weights.items():
        if not _is_matrix(name, shape) or name in embeddings:
            continue
        share = spec.active_share if is_of_experts(name, shape, spec.experts) else 1.0
        multiplying += math.prod(shape) * share
        if name not in heads:
            stack = math.prod(shape[:-2])
            kept += (shape[-1] + shape[-2]) * stack * share
    if not heads:
        multiplying += table
    return Counts(
        params=sum(math.prod(shape) for shape in weights.values()),
        multiplying=round(multiplying),
        kept_elements=round(kept),
        embedding=table,
        attention_layers=len({found[1] for found in map(_ATTENTION.search, weights) if found}),
        recurrent=next(filter(_RECURRENT.search, weights), None),
        gradients=_in_backward_order(weights, heads, embeddings),
        experts=sum(
            math.prod(shape)
            for name, shape in weights.items()
            if is_of_experts(name, shape, spec.experts)
        ),
        linears=tuple(
            LinearSize(name.removesuffix(".weight"), inputs=shape[1], outputs=shape[0])
            for name, shape in weights.items()
            if _is_linear(name, shape, spec.experts)
            and name not in (*heads, *embeddings)
            and is_adaptable(spec.model_type, name.removesuffix(".weight"))
        ),
    )


def _in_backward_order(
    weights: Mapping[str, tuple[int, ...]], heads: Iterable[str], embeddings: Iterable[str]
) -> tuple[GradientSize, ...]:
    """Return the sizes in this order: head, tensors after the layers, layers (last to first),
    embeddings."""
    found: list[tuple[int, int, GradientSize]] = []
    for name, shape in weights.items():
        number = _NUMBER.search(name)
        size, layer = math.prod(shape), int(number[1]) if number else 0
        if name in heads:
            found.append((0, 0, GradientSize(size, "head")))
        elif name in embeddings:
            found.append((3, 0, GradientSize(size, "embedding")))
        else:
            kind: Literal["matrix", "vector"] = "matrix" if _is_matrix(name, shape) else "vector"
            found.append((2 if number else 1, -layer, GradientSize(size, kind)))
    return tuple(each for _, _, each in sorted(found, key=lambda each: each[:2]))


def is_of_experts(name: str, shape: tuple[int, ...], experts: int) -> bool:
    """Return whether a tensor belongs to experts: by its name, or as a stack of matrices."""
    return bool(_EXPERTS.search(name)) or (experts > 1 and len(shape) == 3 and shape[0] == experts)


def is_adaptable(model_type: str, linear: str) -> bool:
    """Return whether an adapter on the linear at this path has an effect, as in PEFT.

    The kernels of some recurrent layers read the weight of `out_proj` without calling the module.
    Source: PEFT, tuners/tuners_utils.py, `_check_lora_target_modules_mamba`.
    """
    return model_type not in _FUSED_OUTPUT or linear.rpartition(".")[2] != "out_proj"


def _is_linear(name: str, shape: tuple[int, ...], experts: int) -> bool:
    """Return whether a tensor is probably the weight of a layer's linear.

    transformers keeps the experts of a layer in one parameter, and most routers are not linears.
    """
    if len(shape) != 2 or not name.endswith(".weight") or not _NUMBER.search(name):
        return False
    is_router = bool(_ROUTER.search(name)) and shape[0] == experts
    return not is_router and not is_of_experts(name, shape, experts)


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a matrix or a stack of matrices, not a norm or a bias."""
    return len(shape) > 1 and not name.endswith("bias")
