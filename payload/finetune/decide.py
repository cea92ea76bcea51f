"""From data, model and machine to the commands and the run.toml of a fine-tuning run.

The order of the decisions: task and columns, sequence length, method (the first that fits the
memory of all weights, LoRA, and LoRA beside 4 bits), batch, steps, learning rate. Each takes what
`--set` says as given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from payload.config.model_checks import require_fit
from payload.config.run_config import RunConfig, parse_run_config
from payload.config.settings import parse_sections
from payload.core.errors import ConfigError
from payload.core.printable_text import shown
from payload.core.suggested_commands import command
from payload.data.tokenizers import load_tokenizer
from payload.estimates.batch_size import USED
from payload.finetune.choices import (
    Choice,
    Method,
    amount,
    batch,
    method_choices,
    rate,
    render,
    schedule,
    sequence_length,
    steps,
)
from payload.finetune.recognise import Asked, Recognised, measure, recognise
from payload.formats.hub_names import HubName
from payload.models.spec import ModelSpec
from payload.run_record.run_files import NAMES
from payload.weights.source import find_source, pinned, spec_on_hub

_GIB = 2**30
_ANY_RANKS = 720_720
"""A batch that up to 16 ranks share evenly, for the question how many there are."""
_SAMPLED_PARAMS = 1_000_000_000
"""Largest model of which samples are made unasked: reading it twice takes seconds."""
_OWN_FLAGS = {"data.dir": "--out", "model.init": "--model", "task.kind": "--task"}

Ask = Callable[[Sequence[str]], Any]
"""Run a program of the project, given as words behind `python -m`; returns its JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The options of the command line."""

    model: str
    data: str
    asked: Asked
    out: Path
    steps: int | None
    overrides: tuple[str, ...]
    run_words: tuple[str, ...]
    """For plan and run: the inventory, the folder of the runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The decisions that the command prints, writes and runs."""

    headlines: tuple[str, ...]
    prepare: tuple[str, ...]
    """Behind `python -m payload.data`."""
    run: tuple[str, ...]
    """Behind `python -m payload.orchestrate`."""
    run_toml: str
    config: Path
    is_sampled: bool
    """True where the base and the result can write samples in little time."""

    def commands(self) -> tuple[str, str]:
        """Return both commands as the user can type them."""
        return command("data", *self.prepare), command("orchestrate", *self.run)


def decide(wanted: Wanted, ask: Ask) -> Decided:
    """Decide everything; nothing is written. Raises TileforgeError."""
    given = _given(wanted.overrides)
    spec = _spec(wanted.model)
    found = recognise(wanted.data, wanted.asked)
    lengths = measure(found, tokenizer=wanted.model)
    load_tokenizer(wanted.model)
    counted = _count(wanted, found, lengths, spec, given=given, ask=ask)
    length = counted.length
    settings = [f"model.init={wanted.model}", f"task.kind={found.task}"]
    settings += [f"data.dir={wanted.out / 'data'}", f"data.sequence_length={length.value}"]
    fitting = _fitting(wanted, spec, settings, given=given, ask=ask)
    choices = _choices(wanted, found, counted, fitting, spec=spec, given=given)
    config = wanted.out / NAMES.config.name
    prepare = ("prepare", *_prepare_words(wanted, found, length.value))
    run = ("run", "--config", str(config), *wanted.run_words)
    head = (
        f"Fine-tuning of {wanted.model} on {wanted.data}, chosen by payload.finetune. Edit and run "
        "again:",
        "",
        f"    {command('data', *prepare)}",
        f"    {command('orchestrate', *run)}",
    )
    text = render(choices, head=head)
    whole = parse_run_config(text, where="the run.toml that was chosen")
    require_fit(spec, whole, vocab_size=None)
    planned = _plan(wanted, _as_sets(choices), ask)
    numbers = planned["plan"]["arithmetic"]
    return Decided(
        headlines=(
            f"data    {wanted.data}: task {found.task}, because {found.reason}",
            f"model   {wanted.model}: {spec.num_params() / 1e6:,.1f}M parameters, {spec.summary()}",
            f"method  {fitting.reason}",
            f"cost    about {numbers['memory_bytes_per_rank'] / _GIB:.1f} GiB a rank, "
            f"{planned['estimate']['seconds'] / 60:.1f} min {planned['estimate']['basis']}",
        ),
        prepare=prepare,
        run=run,
        run_toml=text,
        config=config,
        is_sampled=found.task in ("text", "chat") and spec.num_params() <= _SAMPLED_PARAMS,
    )


def _given(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the user's own settings by key. Raises ConfigError."""
    # Types and limits of all of them come first, as the choices compute with them.
    typed = parse_sections(RunConfig, "", overrides=overrides, where="--set")
    parse_run_config(
        "", overrides=[each for each in overrides if not _needs_others(each)], where="--set"
    )
    found: dict[str, Any] = {}
    for override in overrides:
        section, _, key = (part.strip() for part in override.partition("=")[0].partition("."))
        name = f"{section}.{key}"
        if name in _OWN_FLAGS:
            raise ConfigError(
                f"--set {shown(override)}: give it as {_OWN_FLAGS[name]}, which it follows from."
            )
        found[name] = _plain(getattr(getattr(typed, section), key))
    return found


def _plain(value: Any) -> Any:
    """Return a setting's value as TOML and JSON write it."""
    if value is None:
        return "none"
    return list(value) if isinstance(value, tuple) else value


def _needs_others(override: str) -> bool:
    """Say whether an override is only right beside settings that are still to be chosen."""
    return override.partition(".")[0].strip() in (
        "adapter",
        "model",
        "schedule",
        "optimizer",
        "batch",
    )


def _spec(model: str) -> ModelSpec:
    """Return the model's numbers. Raises CheckpointError."""
    source = find_source(model, setting="--model", verify=False)
    spec = source.spec()
    if spec is None and source.kind == "hub":
        name = HubName.parse(pinned(model, setting="--model"))
        assert name is not None
        spec = spec_on_hub(name, setting="--model")
    if spec is None:
        raise ConfigError(f"--model {model}: fine-tuning begins with weights. Name a model.")
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """The data in the tokens of the model."""

    length: Choice
    tokens: int | None
    documents: int | None


def _count(
    wanted: Wanted,
    found: Recognised,
    lengths: Sequence[int],
    spec: ModelSpec,
    *,
    given: dict[str, Any],
    ask: Ask,
) -> _Counted:
    def counted(length: int) -> Any:
        words = _prepare_words(wanted, found, length)
        return ask(("payload.data", "prepare", *words, "--dry-run", "--json", "--quiet"))

    key = "data.sequence_length"
    if key in given:
        chosen = Choice(key=key, value=given[key], reason="--set")
        values = counted(given[key])
    else:
        values = None if lengths else counted(0)
        tokens = 2**30 if values is None or values["tokens"] is None else values["tokens"]
        size, why = sequence_length(found.task, lengths, tokens=tokens, context=spec.context())
        chosen = Choice(key=key, value=size, reason=why)
        values = values or counted(size)
    return _Counted(length=chosen, tokens=values["tokens"], documents=values["documents"])


def _prepare_words(wanted: Wanted, found: Recognised, length: int) -> list[str]:
    words = [*found.words(), "--tokenizer", wanted.model]
    if found.task not in ("text", "classify"):
        words += ["--sequence-length", str(length)]
    return [*words, "--out", str(wanted.out / "data")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitting:
    """The method that the memory allows."""

    method: Method
    reason: str
    ranks: int


def _fitting(
    wanted: Wanted, spec: ModelSpec, settings: Sequence[str], *, given: dict[str, Any], ask: Ask
) -> _Fitting:
    """Return the first method that fits into the memory, or the last one."""
    tried: list[str] = []
    ranks, in_fp32 = 1, False
    candidates = _methods(spec, given)
    for method in candidates:
        sets = [*settings, *_as_sets(method_choices(method, spec))]
        sets += [f"batch.global_batch_size={_ANY_RANKS}", "batch.micro_batch_size=auto"]
        planned = _plan(wanted, sets, ask, but=("batch.", "train.", "schedule."))
        ranks = planned["plan"]["world_size"]
        need = planned["plan"]["arithmetic"]["memory_bytes_per_rank"]
        free = planned["free_memory_bytes"]
        checkpoints = planned["config"]["memory"]["activation_checkpointing"] == "on"
        in_fp32 = planned["dtype"] == "fp32"
        room = None if free is None else USED * free / planned["plan"]["ranks_per_node"]
        fits = room is None or need <= room
        # Computing the layers twice costs a third of the time, an adapter in its place nothing.
        if fits and not (checkpoints and method == "full" and len(candidates) > 1):
            return _Fitting(
                method=method, reason=_why(method, tried, room, given=given), ranks=ranks
            )
        twice = " even with activation checkpointing" if checkpoints and not fits else ""
        tried.append(f"{_NAMES[method]} does not fit{twice}")
    last = candidates[-1]
    reason = f"{_NAMES[last]}, though the estimate is above the memory: {'; '.join(tried)}"
    if in_fp32:
        reason += (
            "; --set precision.dtype=bf16 takes less memory, and on a CPU without bf16 more time"
        )
    return _Fitting(method=last, reason=reason, ranks=ranks)


_NAMES: dict[Method, str] = {
    "full": "training of all weights",
    "lora": "a LoRA adapter",
    "nf4": "a LoRA adapter beside a base of 4 bits",
}


def _methods(spec: ModelSpec, given: dict[str, Any]) -> list[Method]:
    """Return the methods that the user's settings leave open, the preferred one first."""
    if given.get("model.quantize", "none") != "none":
        return ["nf4"]
    if given.get("adapter.kind") == "lora":
        return ["lora"]
    if given.get("adapter.kind") == "none":
        return ["full"]
    full: list[Method] = [] if any(key.startswith("adapter.") for key in given) else ["full"]
    is_open = spec.why_not_quantized() is None and "model.quantize" not in given
    nf4: list[Method] = ["nf4"] if is_open else []
    return [*full, "lora", *nf4]


def _why(method: Method, tried: Sequence[str], room: float | None, *, given: dict[str, Any]) -> str:
    if any(key.startswith(("adapter.", "model.quantize")) for key in given):
        return f"{_NAMES[method]}, as --set says"
    fits = "the free memory is not known" if room is None else f"it fits into {room / _GIB:.1f} GiB"
    return "; ".join([f"{_NAMES[method]}, as {fits} a rank", *tried])


def _choices(
    wanted: Wanted,
    found: Recognised,
    counted: _Counted,
    fitting: _Fitting,
    *,
    spec: ModelSpec,
    given: dict[str, Any],
) -> list[Choice]:
    """Return every setting of run.toml, the user's own in the place of what was chosen."""
    length = counted.length
    data = amount(
        found.task,
        tokens=counted.tokens or _STEPS_OF_UNKNOWN * 16384,
        documents=counted.documents,
        length=length.value,
    )
    size = batch(found.task, data, length=length.value, ranks=fitting.ranks)
    batch_size = given.get(size.key, size.value)
    number = steps(found.task, data, batch_size=batch_size, asked=wanted.steps)
    num_steps = given.get(number.key, number.value)
    highest = rate(found.task, fitting.method, params=spec.num_params())
    chosen = [
        Choice(key="run.name", value=_run_name(wanted.data), reason="begins the run's id"),
        Choice(key="data.dir", value=str(wanted.out / "data"), reason="what `prepare` writes"),
        length,
        Choice(key="model.init", value=wanted.model, reason="--model"),
        Choice(key="task.kind", value=found.task, reason=found.reason),
        *method_choices(fitting.method, spec),
        size,
        Choice(
            key="batch.micro_batch_size",
            value="auto",
            reason="the most that fit the memory, when the run is planned",
        ),
        highest,
        number,
        *schedule(
            found.task,
            num_steps,
            method=fitting.method,
            lr=given.get(highest.key, highest.value),
        ),
        Choice(
            key="memory.activation_checkpointing",
            value="auto",
            reason="on only where one sequence a pass does not fit",
        ),
    ]
    left = dict(given)
    merged = [
        replace(each, value=left.pop(each.key), reason="--set") if each.key in left else each
        for each in chosen
    ]
    return merged + [Choice(key=key, value=value, reason="--set") for key, value in left.items()]


_STEPS_OF_UNKNOWN = 100
"""Steps that a source is taken for whose tokens cannot be counted beforehand."""


def _run_name(data: str) -> str:
    stem = Path(data).name.partition(".")[0]
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in stem) or "run"


def _as_sets(choices: Sequence[Choice]) -> list[str]:
    values = ((each.key, each.value) for each in choices)
    return [f"{key}={json.dumps(value)}" for key, value in values]


def _plan(wanted: Wanted, settings: Sequence[str], ask: Ask, *, but: tuple[str, ...] = ()) -> Any:
    """Return the plan of a run with these settings and the user's, less those of sections `but`."""
    own = [each for each in wanted.overrides if not each.strip().startswith(but or ("-",))]
    sets = [word for each in (*settings, *own) for word in ("--set", each)]
    return ask(("payload.orchestrate", "plan", "--json", *wanted.run_words, *sets))
