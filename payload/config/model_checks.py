"""Check that weights are complete, and that they fit a run's settings and data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from payload.config.run_config import RunConfig, problems
from payload.config.training_sections import ModelSection
from payload.core.errors import CheckpointError, ConfigError
from payload.formats.data_folder import DataMeta
from payload.formats.hf_folder import CONFIG_FILE
from payload.models.adapter import NEW_TOKENS, token_ids
from payload.models.multimodal_tensors import model_headers
from payload.models.spec import ModelSpec

SIZES = ("n_layer", "n_head", "n_embd")


def with_new_tokens(config: RunConfig, meta: DataMeta) -> RunConfig:
    """Return the config with the ids of the data's new tokens in `adapter.train_tokens`.

    Raises ConfigError for an adapter that would not contain the rows of these tokens.
    """
    added, adapter = meta.added_ids(), config.adapter
    if not adapter.is_on() or not added:
        return config
    if adapter.train_tokens == NEW_TOKENS:
        adapter = replace(adapter, train_tokens=",".join(map(str, added)))
    missing = sorted(set(added) - set(token_ids(adapter.train_tokens)))
    if missing:
        raise ConfigError(
            f"adapter.train_tokens = {adapter.train_tokens!r}: lacks the new token {missing[0]} of "
            f"{config.data.dir}, whose row the base does not have. Add the token, or use "
            f"{NEW_TOKENS!r}."
        )
    resolved = replace(config, adapter=adapter)
    if found := problems(resolved):
        raise ConfigError(" ".join(found))
    return resolved


def require_fit(
    spec: ModelSpec,
    config: RunConfig,
    *,
    vocab_size: int | None,
    tokenizer: str | None = None,
    new_tokens: int = 0,
) -> None:
    """Raise CheckpointError if the run cannot start from these weights.

    `vocab_size` and `tokenizer` describe the tokenizer of the data; pass None without data. The
    last `new_tokens` tokens may lack rows. The model may have more embedding rows than tokens,
    because vocabularies are often padded.
    """
    init, sequence_length = config.model.init, config.data.sequence_length
    if spec.whole is not None and config.task.data() == "classify":
        raise CheckpointError(
            f"model.init = {init!r}: the text model of a multimodal checkpoint cannot become a "
            "classifier. Use a text-only model."
        )
    if spec.whole is not None and new_tokens and vocab_size and spec.vocab_size < vocab_size:
        raise CheckpointError(
            f"model.init = {init!r}: the vocabulary of a multimodal checkpoint cannot grow. "
            "Prepare the data without --add-special-tokens."
        )
    fixed = spec.why_fixed_vocabulary()
    if fixed is not None and new_tokens and vocab_size and spec.vocab_size < vocab_size:
        raise CheckpointError(
            f"model.init = {init!r}: its vocabulary of {spec.vocab_size:,} tokens cannot grow to "
            f"the {vocab_size:,} of the data: {fixed}. Prepare the data without "
            "--add-special-tokens."
        )
    reason = spec.why_not_quantized()
    if config.model.quantize != "none" and reason is not None:
        raise CheckpointError(
            f"model.quantize = {config.model.quantize!r}: model_type = {spec.model_type!r} cannot "
            f"be quantised: {reason}. Use model.quantize = 'none'."
        )
    if sequence_length > spec.context():
        raise CheckpointError(
            f"data.sequence_length = {sequence_length} is above the {spec.context()} positions of "
            f"model.init = {init!r}. Use at most {spec.context()}."
        )
    if vocab_size is not None and spec.vocab_size < vocab_size - new_tokens:
        which = "" if tokenizer is None else f" ({tokenizer})"
        raise CheckpointError(
            f"model.init = {init!r}: its vocabulary has {spec.vocab_size} tokens, but the "
            f"tokenizer of the data has {vocab_size}{which}. Prepare the data with the model's "
            "tokenizer."
        )
    sizes = spec.settings()
    for name in SIZES:
        configured, found = getattr(config.model, name), sizes[name]
        if configured is not None and configured != found:
            raise CheckpointError(
                f"model.{name} = {configured}, but the weights of model.init have {found}. Leave "
                f'model.{name} out, or use model.init = "scratch".'
            )


def require_split(spec: ModelSpec, config: RunConfig) -> None:
    """Raise ConfigError if the model does not support the configured parallelism."""
    tensor, stages = config.distributed.tensor_parallel, config.distributed.pipeline_parallel
    for name, size, reason in (
        ("tensor_parallel", tensor, spec.why_not_tensor(tensor)),
        ("pipeline_parallel", stages, spec.why_not_stages(stages)),
    ):
        if size > 1 and reason is not None:
            raise ConfigError(
                f"distributed.{name} = {size} does not fit the model: {reason}. Use another "
                f"{name}, or 1."
            )


def require_weights(spec: ModelSpec, folder: Path) -> None:
    """Raise CheckpointError unless a folder has the weights that its config.json describes.

    Only the files' headers are read.
    """
    headers = model_headers(folder)
    for name, shape in spec.tensor_shapes():
        # Some GPT-2 files were saved from the module without the head, so their names lack the
        # prefix.
        header = headers.get(name) or headers.get(name.removeprefix("transformer."))
        if header is None:
            raise CheckpointError(
                f"{folder}: has no tensor {name}, which its {CONFIG_FILE} requires. Use a "
                "folder with the model's config.json and all its weight files."
            )
        if header.shape != shape:
            raise CheckpointError(
                f"{folder}: {name} has the shape {list(header.shape)}, but its {CONFIG_FILE} "
                f"requires {list(shape)}. Use a folder with the model's config.json and "
                "all its weight files."
            )
        if not header.is_weight():
            raise CheckpointError(
                f"{folder}: {name} is {header.dtype}: quantised weights cannot be trained. Use "
                "the model in bf16 or fp32."
            )


def unused_settings(spec: ModelSpec, config: RunConfig) -> str | None:
    """Return a note on [model] settings that the sizes of the weights override, or None.

    Settings with the default value are left out, as the user may not have set them.
    """
    default, model, found = ModelSection(), config.model, spec.settings()
    configured = model.spec(sequence_length=1, vocab_size=1).settings()
    has_bias = found.get("bias")
    unused = []
    if model.preset != default.preset and any(found[name] != configured[name] for name in SIZES):
        unused.append(f'model.preset = "{model.preset}"')
    if model.bias not in (default.bias, has_bias):
        unused.append(f"model.bias = {str(model.bias).lower()}")
    if not unused:
        return None
    sizes = f"{spec.num_layers()} layers, {spec.num_heads()} heads and width {spec.width()}"
    biases = "" if has_bias is None else f", with{'' if has_bias else 'out'} biases"
    return f"note: not used: {' and '.join(unused)}; the weights of model.init have {sizes}{biases}"
