"""Decides the commands and the run.toml of a fine-tuning run from data, model and machine.

The order of the decisions: task and columns, sequence length, method (the first that fits into
memory: full, LoRA, LoRA with a 4-bit base), batch size, steps, learning rate. Settings from `--set`
are not changed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from payload.config.json_schema import schema_line
from payload.config.model_checks import require_fit
from payload.config.run_config import RunConfig, parse_run_config
from payload.config.settings import parse_sections
from payload.core.errors import ConfigError
from payload.core.printable_text import shown
from payload.core.suggested_commands import command
from payload.data.detect import DataOptions, DetectedData, detect_data
from payload.data.rendered_rows import RenderedRows, text_lengths
from payload.data.show import Sample
from payload.data.sources.input_weights import split_weights
from payload.data.sources.split import default_val_fraction
from payload.data.tokenizers import load_tokenizer
from payload.estimates.batch_size import USED
from payload.estimates.run_time import RunTime
from payload.finetune.setting_rules import (
    Choice,
    Method,
    batch,
    data_size,
    method_choices,
    rate,
    render,
    schedule,
    sequence_length,
    steps,
)
from payload.formats.hub_names import HubName
from payload.models.spec import ModelSpec
from payload.run_record.run_files import NAMES
from payload.weights.source import find_source, pinned_name_of, spec_on_hub

_GIB = 2**30
_DIVISIBLE_BATCH_SIZE = 720_720
"""A batch size that up to 16 ranks divide evenly, used to find the number of ranks."""
_SAMPLED_PARAMS = 1_000_000_000
"""Number of parameters of the largest model that gets samples by default. Reading such a model
twice takes seconds."""
_DEDICATED_FLAGS = {"data.dir": "--out", "model.init": "--model", "task.kind": "--task"}

RunForJson = Callable[[Sequence[str]], Any]
"""Runs a program of the project and returns its JSON; takes the arguments of `python -m`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneRequest:
    """Options of the command line."""

    model: str
    data: tuple[str, ...]
    """Files and folders, each with its weight if it has one; or a dataset of the hub."""
    data_options: DataOptions
    rendering: argparse.Namespace
    """Options of `prepare` that decide how rows are rendered."""
    out: Path
    steps: int | None
    overrides: tuple[str, ...]
    wants_samples: bool
    """False for --no-samples."""
    run_arguments: tuple[str, ...]
    """Options of plan and run, such as the inventory and the folder of the runs."""

    def data_words(self) -> str:
        """Return the inputs as one text, for messages."""
        return " ".join(self.data)

    def paths(self) -> tuple[str, ...]:
        """Return the inputs without their weights. Raises UsageError."""
        return split_weights(self.data, setting="--data")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetunePlan:
    """The decisions that the command prints, writes and runs."""

    headlines: tuple[str, ...]
    prepare: tuple[str, ...]
    """Arguments of `python -m payload.data`."""
    unprinted: tuple[str, ...]
    """Further arguments of `prepare` that change only its notes, not the data."""
    run: tuple[str, ...]
    """Arguments of `python -m payload.orchestrate`."""
    run_toml: str
    config: Path
    example: Sequence[Sample]
    """The samples of one row as they are trained; empty for texts."""
    is_sampled: bool
    """True if the base and the result can generate samples in little time."""

    def commands(self) -> tuple[str, str]:
        """Return both commands, ready to type."""
        return command("data", *self.prepare), command("orchestrate", *self.run)


def decide(request: FinetuneRequest, run_for_json: RunForJson) -> FinetunePlan:
    """Make all decisions without writing any file. Raises TileforgeError."""
    user_settings = _parse_overrides(request.overrides)
    spec = _spec(request.model)
    found = detect_data(request.data, request.data_options)
    rendered = _rendered(request, found)
    lengths, example = _measure(request, found, rendered)
    load_tokenizer(request.model)
    counted = _count_tokens(
        request, found, lengths, spec, user_settings=user_settings, run_for_json=run_for_json
    )
    length = counted.length
    settings = [f"model.init={request.model}", f"task.kind={found.task}"]
    settings += [f"data.dir={request.out / 'data'}", f"data.sequence_length={length.value}"]
    fitting_method = _choose_method(
        request, spec, settings, user_settings=user_settings, run_for_json=run_for_json
    )
    choices = _choices(
        request, found, counted, fitting_method, spec=spec, user_settings=user_settings
    )
    config = request.out / NAMES.config.name
    prepare = ("prepare", *_prepare_arguments(request, found, length.value))
    run = ("run", "--config", str(config), *request.run_arguments)
    head = (
        f"Fine-tuning of {request.model} on {request.data_words()}, chosen by payload.finetune. "
        "Edit, then run again:",
        "",
        f"    {command('data', *prepare)}",
        f"    {command('orchestrate', *run)}",
    )
    text = render(choices, head=head)
    whole = parse_run_config(text, where="the chosen run.toml")
    require_fit(spec, whole, vocab_size=None)
    is_sampled = (
        request.wants_samples
        and found.task in ("text", "chat")
        and spec.num_params() <= _SAMPLED_PARAMS
    )
    more = ["--samples"] if is_sampled else []
    more += ["--val-tokens", str(_val_tokens(request, counted))]
    if found.task == "classify" and counted.tokens and counted.documents:
        more += ["--mean-tokens", str(counted.tokens / counted.documents)]
    planned = _plan(request, _as_sets(choices), run_for_json, more=more)
    numbers, estimated = planned["plan"]["arithmetic"], planned["estimate"]
    time = RunTime(**estimated["time"])
    kept = spec.whole.note() if spec.whole is not None else None
    return FinetunePlan(
        headlines=(
            f"data    {request.data_words()}: task {found.task}, because {found.reason}",
            *(f"        {line}" for line in found.recognised),
            *(f"        {line}" for line in (rendered.template_lines() if rendered else ())),
            f"model   {request.model}: {spec.num_params() / 1e6:,.1f}M parameters, "
            f"{spec.summary()}",
            *([f"        {kept}"] if kept else ()),
            f"method  {fitting_method.reason}",
            f"memory  about {numbers['memory_bytes_per_rank'] / _GIB:.1f} GiB a rank",
            f"time    about {time.words()}",
            f"        {estimated['basis']}",
            f"disk    {estimated['disk']}",
        ),
        prepare=prepare,
        unprinted=_unprinted(user_settings),
        run=run,
        run_toml=schema_line() + text,
        config=config,
        example=example,
        is_sampled=is_sampled,
    )


def _rendered(request: FinetuneRequest, found: DetectedData) -> RenderedRows | None:
    """Return the rows as the template renders them; None for a task without a template."""
    if found.task in ("text", "classify"):
        return None
    args = argparse.Namespace(**{**vars(request.rendering), "tokenizer": request.model})
    return RenderedRows(found, args)


def _measure(
    request: FinetuneRequest, found: DetectedData, rendered: RenderedRows | None
) -> tuple[tuple[int, ...], list[Sample]]:
    """Return the token counts of the first rows, and the samples of one row. Raises DataError.

    Plain text has neither, labelled texts have no samples.
    """
    if found.task == "classify":
        return text_lengths(found, tokenizer=request.model), []
    return (rendered.lengths(), rendered.example()) if rendered else ((), [])


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the user's settings by key. Raises ConfigError."""
    # Types and limits of all settings are checked first, because the choices use them.
    typed = parse_sections(RunConfig, "", overrides=overrides, where="--set")
    parse_run_config(
        "", overrides=[each for each in overrides if not _depends_on_choices(each)], where="--set"
    )
    found: dict[str, Any] = {}
    for override in overrides:
        section, _, key = (part.strip() for part in override.partition("=")[0].partition("."))
        name = f"{section}.{key}"
        if name in _DEDICATED_FLAGS:
            raise ConfigError(
                f"--set {shown(override)}: set by {_DEDICATED_FLAGS[name]}. Use that option."
            )
        found[name] = _to_plain(getattr(getattr(typed, section), key))
    return found


def _to_plain(value: Any) -> Any:
    """Return a setting's value as TOML and JSON write it."""
    if value is None:
        return "none"
    return list(value) if isinstance(value, tuple) else value


def _depends_on_choices(override: str) -> bool:
    """Return True if an override is only valid with settings that are chosen later."""
    return override.partition(".")[0].strip() in (
        "adapter",
        "model",
        "schedule",
        "optimizer",
        "batch",
    )


def _spec(model: str) -> ModelSpec:
    """Return the shape of the model. Raises CheckpointError."""
    source = find_source(model, setting="--model", verify=False)
    spec = source.spec()
    if spec is None and source.kind == "hub":
        name = HubName.parse(pinned_name_of(model, setting="--model"))
        assert name is not None
        spec = spec_on_hub(name, setting="--model")
    if spec is None:
        raise ConfigError(
            f"--model {model}: fine-tuning needs weights. Use a model folder, run or hub name."
        )
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenCounts:
    """Token counts of the data."""

    length: Choice
    tokens: int | None
    documents: int | None


def _count_tokens(
    request: FinetuneRequest,
    found: DetectedData,
    lengths: Sequence[int],
    spec: ModelSpec,
    *,
    user_settings: dict[str, Any],
    run_for_json: RunForJson,
) -> _TokenCounts:
    def counted(length: int) -> Any:
        arguments = _prepare_arguments(request, found, length)
        return run_for_json(
            (
                *("payload.data", "prepare", *arguments, *_unprinted(user_settings)),
                *("--dry-run", "--json", "--quiet"),
            )
        )

    key = "data.sequence_length"
    if key in user_settings:
        chosen = Choice(key=key, value=user_settings[key], reason="--set")
        values = counted(user_settings[key])
    else:
        values = None if lengths else counted(0)
        tokens = 2**30 if values is None or values["tokens"] is None else values["tokens"]
        size, why = sequence_length(found.task, lengths, tokens=tokens, context=spec.context())
        chosen = Choice(key=key, value=size, reason=why)
        values = values or counted(size)
    return _TokenCounts(length=chosen, tokens=values["tokens"], documents=values["documents"])


def _val_tokens(request: FinetuneRequest, counted: _TokenCounts) -> int:
    """Return the expected number of validation tokens."""
    share: float | None = request.rendering.val_fraction
    if share is None:
        share = default_val_fraction(counted.documents)
    return round(share * (counted.tokens or 0))


def _prepare_arguments(request: FinetuneRequest, found: DetectedData, length: int) -> list[str]:
    arguments = [*found.arguments(), "--tokenizer", request.model]
    if found.task not in ("text", "classify"):
        arguments += ["--sequence-length", str(length)]
    return [*arguments, "--out", str(request.out / "data")]


def _unprinted(user_settings: dict[str, Any]) -> tuple[str, ...]:
    has_weights = user_settings.get("task.class_weights", "none") != "none"
    return ("--has-class-weights",) if has_weights else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _FittingMethod:
    """The method that fits into memory."""

    method: Method
    reason: str
    ranks: int


def _choose_method(
    request: FinetuneRequest,
    spec: ModelSpec,
    settings: Sequence[str],
    *,
    user_settings: dict[str, Any],
    run_for_json: RunForJson,
) -> _FittingMethod:
    """Return the first method that fits into memory, or the last one."""
    tried: list[str] = []
    ranks, in_fp32 = 1, False
    candidates = _methods(spec, user_settings)
    for method in candidates:
        sets = [*settings, *_as_sets(method_choices(method, spec))]
        sets += [f"batch.global_batch_size={_DIVISIBLE_BATCH_SIZE}", "batch.micro_batch_size=auto"]
        planned = _plan(request, sets, run_for_json, without=("batch.", "train.", "schedule."))
        ranks = planned["plan"]["world_size"]
        need = planned["plan"]["arithmetic"]["memory_bytes_per_rank"]
        free = planned["free_memory_bytes"]
        checkpoints = planned["config"]["memory"]["activation_checkpointing"] == "on"
        in_fp32 = planned["dtype"] == "fp32"
        room = None if free is None else USED * free / planned["plan"]["ranks_per_node"]
        fits = room is None or need <= room
        # Activation checkpointing costs a third of the time, but an adapter costs no time.
        if fits and not (checkpoints and method == "full" and len(candidates) > 1):
            return _FittingMethod(
                method=method,
                reason=_method_reason(method, tried, room, user_settings=user_settings),
                ranks=ranks,
            )
        twice = " with activation checkpointing" if checkpoints else ""
        tried.append(f"{_NAMES[method]} needs {need / _GIB:.1f} GiB a rank{twice}")
    last = candidates[-1]
    reason = f"{_NAMES[last]}, although the estimate exceeds the memory: {'; '.join(tried)}"
    if in_fp32:
        reason += (
            "; --set precision.dtype=bf16 needs less memory, but more time on a CPU without bf16"
        )
    return _FittingMethod(method=last, reason=reason, ranks=ranks)


_NAMES: dict[Method, str] = {
    "full": "full fine-tuning",
    "lora": "a LoRA adapter",
    "nf4": "a LoRA adapter with a 4-bit base",
}


def _methods(spec: ModelSpec, user_settings: dict[str, Any]) -> list[Method]:
    """Return the methods that the user's settings allow, the preferred one first."""
    if user_settings.get("model.quantize", "none") != "none":
        return ["nf4"]
    if user_settings.get("adapter.kind") == "lora":
        return ["lora"]
    if user_settings.get("adapter.kind") == "none":
        return ["full"]
    full: list[Method] = (
        [] if any(key.startswith("adapter.") for key in user_settings) else ["full"]
    )
    can_quantize = spec.why_not_quantized() is None and "model.quantize" not in user_settings
    nf4: list[Method] = ["nf4"] if can_quantize else []
    return [*full, "lora", *nf4]


def _method_reason(
    method: Method, tried: Sequence[str], room: float | None, *, user_settings: dict[str, Any]
) -> str:
    if any(key.startswith(("adapter.", "model.quantize")) for key in user_settings):
        return f"{_NAMES[method]}, because of --set"
    if room is None:
        fits = "the free memory is unknown"
    else:
        now = " that are free now" if tried else ""
        fits = f"it fits into {room / _GIB:.1f} GiB a rank{now}"
    return "; ".join([f"{_NAMES[method]}, as {fits}", *tried])


def _choices(
    request: FinetuneRequest,
    found: DetectedData,
    counted: _TokenCounts,
    fitting_method: _FittingMethod,
    *,
    spec: ModelSpec,
    user_settings: dict[str, Any],
) -> list[Choice]:
    """Return every setting of run.toml; the user's settings replace chosen ones."""
    length = counted.length
    data = data_size(
        found.task,
        tokens=counted.tokens or _ASSUMED_STEPS * 16384,
        documents=counted.documents,
        length=length.value,
    )
    size = batch(found.task, data, length=length.value, ranks=fitting_method.ranks)
    batch_size = user_settings.get(size.key, size.value)
    number = steps(found.task, data, batch_size=batch_size, requested=request.steps)
    num_steps = user_settings.get(number.key, number.value)
    highest = rate(found.task, fitting_method.method, params=spec.num_params())
    chosen = [
        Choice(
            key="run.name",
            value=_run_name(data_name(request.paths())),
            reason="start of the run id",
        ),
        Choice(key="data.dir", value=str(request.out / "data"), reason="written by `prepare`"),
        length,
        Choice(key="model.init", value=request.model, reason="--model"),
        Choice(key="task.kind", value=found.task, reason=found.reason),
        *method_choices(fitting_method.method, spec),
        size,
        Choice(
            key="batch.micro_batch_size",
            value="auto",
            reason="the largest that fits into memory",
        ),
        highest,
        number,
        *schedule(
            found.task,
            num_steps,
            method=fitting_method.method,
            lr=user_settings.get(highest.key, highest.value),
        ),
        Choice(
            key="memory.activation_checkpointing",
            value="auto",
            reason="on only if a micro-batch of one sequence does not fit",
        ),
    ]
    remaining = dict(user_settings)
    merged = [
        replace(each, value=remaining.pop(each.key), reason="--set")
        if each.key in remaining
        else each
        for each in chosen
    ]
    return merged + [
        Choice(key=key, value=value, reason="--set") for key, value in remaining.items()
    ]


_ASSUMED_STEPS = 100
"""Assumed number of steps in an epoch, if a source's tokens cannot be counted before the run."""


def data_name(paths: Sequence[str]) -> str:
    """Return the name of the first input without suffixes; of several inputs, with `-mix`."""
    name = Path(paths[0]).name.partition(".")[0]
    return f"{name}-mix" if name and len(paths) > 1 else name


def _run_name(stem: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in stem) or "run"


def _as_sets(choices: Sequence[Choice]) -> list[str]:
    values = ((each.key, each.value) for each in choices)
    return [f"{key}={json.dumps(value)}" for key, value in values]


def _plan(
    request: FinetuneRequest,
    settings: Sequence[str],
    run_for_json: RunForJson,
    *,
    without: tuple[str, ...] = (),
    more: Sequence[str] = (),
) -> Any:
    """Return the plan of a run with the given settings and the user's settings.

    Sections in `without` are left out.
    """
    own = [each for each in request.overrides if not each.strip().startswith(without or ("-",))]
    sets = [word for each in (*settings, *own) for word in ("--set", each)]
    options = (*request.run_arguments, *more)
    return run_for_json(("payload.orchestrate", "plan", "--json", *options, *sets))
