"""Stages that measure the training speed of GPT-2 124M in bf16."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from functools import partial

from benchmarks.gpu.runs import Runs, Settings
from benchmarks.gpu.visit import Found, Stage, require_package
from payload.config.run_config import load_run_config

LEAST_MFU = 0.40
_LEAST_FILLED = 0.25
"""Least share of the device's memory that a run fills if it chooses the micro-batch."""
_WARM_UP_STEPS = 4
_AUTO_BATCH = 512
"""Global batch size if the run chooses the micro-batch."""
_SMALL: Settings = {"model.n_layer": 4, "model.n_head": 4, "model.n_embd": 256}


def at_micro_batch(
    size: int | str,
    *,
    estimate_s: float,
    judged: bool = False,
    also: str | None = None,
    settings: Callable[[Runs], Settings] = lambda _runs: {},
) -> Stage:
    """Return a stage that trains with this micro-batch; `also` names what `settings` change."""
    name = f"speed at micro-batch {size}" + (f" with {also}" if also else "")
    return Stage(
        name=name,
        compared="GPT-2 124M in bf16, 1024 tokens a sequence, with the measured GEMM peak",
        wanted=_wanted(size, judged=judged),
        estimate_s=estimate_s,
        run=partial(
            _measure,
            name=name.replace(" ", "-"),
            size=size,
            judged=judged,
            settings=settings,
        ),
    )


def compiled(_runs: Runs) -> Settings:
    """Return the settings that compile the model."""
    return {"engine.compile": "true"}


def in_fp8(runs: Runs) -> Settings:
    """Return the settings of 8-bit matmuls. Raises NotTriedError without torchao."""
    require_package("torchao", setting="precision.fp8")
    return {"precision.fp8": runs.fp8()}


def _wanted(size: int | str, *, judged: bool) -> str:
    if judged:
        return f"MFU of at least {LEAST_MFU:.0%}; in a rehearsal any"
    if size == "auto":
        return (
            f"the run ends, and fills {_LEAST_FILLED:.0%} of the memory or takes the batch of "
            f"{_AUTO_BATCH} in one micro-batch; in a rehearsal it ends"
        )
    return "the run ends"


def _measure(
    runs: Runs,
    *,
    name: str,
    size: int | str,
    judged: bool,
    settings: Callable[[Runs], Settings],
) -> Found:
    """Train; return MFU, tokens a second and step time."""
    runs.train(
        {name: {**_settings(size, rehearsal=runs.rehearsal), **settings(runs)}},
        module="benchmarks.gpu.measured_run",
    )
    rows = runs.rows(name)[_WARM_UP_STEPS:]
    step_s, tokens_per_s = (
        statistics.median(row[key] for row in rows) for key in ("step_time_s", "tokens_per_s")
    )
    # A step that is faster than the measured peak has no MFU.
    shares = [row["mfu"] for row in rows if row["mfu"] is not None]
    mfu = statistics.median(shares) if shares else None
    # The checkpoints have 1.5 GB, and no stage reads them.
    shutil.rmtree(runs.paths(name).checkpoints)
    chosen = load_run_config(runs.paths(name).config).batch.micro_batch_size
    text = (
        f"{'unknown' if mfu is None else f'{mfu:.1%}'} MFU, {tokens_per_s:,.0f} tokens/s, "
        f"{1000 * step_s:,.1f} ms a step, micro-batch {chosen}, "
        f"GEMM peak {(runs.summary(name).peak_flops_per_s or 0.0) / 1e12:,.1f} TFLOP/s"
    )
    memory = runs.peak_memory(name)
    text += f", peak memory {memory['allocated_bytes'] / 2**30:,.1f} GiB"
    enough = not judged or (mfu is not None and mfu >= LEAST_MFU)
    if size == "auto" and not runs.rehearsal:
        filled = memory["reserved_bytes"] / 2**30 / runs.facts["memory_gib"]
        text += f", {filled:.0%} of the device's reserved"
        enough = filled >= _LEAST_FILLED or chosen == _AUTO_BATCH
    return Found(text=text, passed=enough or runs.rehearsal)


def _settings(size: int | str, *, rehearsal: bool) -> Settings:
    few = rehearsal or size == "auto"
    common: Settings = {
        "precision.dtype": "bf16",
        "train.steps": _WARM_UP_STEPS + (4 if few else 20),
        "train.checkpoint_every": 0,
        "batch.micro_batch_size": size,
    }
    if rehearsal:
        micro_batch = size if size == "auto" else 2
        return {**common, **_SMALL, "batch.micro_batch_size": micro_batch}
    return {
        **common,
        "data.sequence_length": 1024,
        "batch.global_batch_size": 2 * size if isinstance(size, int) else _AUTO_BATCH,
    }
