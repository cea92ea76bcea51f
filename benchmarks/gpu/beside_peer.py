"""Stages that train a model with this project and with a peer, on the same device and tokens."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import write_config
from benchmarks.gpu.peer_runs import PeerRun, run_peer
from benchmarks.gpu.programs import ProgramError
from benchmarks.gpu.runs import Runs, Settings
from benchmarks.gpu.speed_cases import SpeedCase
from benchmarks.gpu.visit import Found, Stage
from benchmarks.harness import markdown_table
from benchmarks.peers.work import Work
from benchmarks.step_model import trained_spec
from payload.formats.data_folder import TRAIN_NAME, token_dtype
from payload.run_record.profile_table import PROFILE_TABLE, Operator, read_table

_WARM_UP_STEPS, _STEPS = 4, 12
_KERNELS = 5
_COMPILE_FACTOR = 2.0
"""Estimated time of a compiled run, relative to the run without `engine.compile`."""
_LIMIT_FACTOR = 2.0
"""A program is killed after its estimated time, multiplied by this factor."""
_OURS, _COMPILED = "Tileforge", "Tileforge, engine.compile"
_HEAD = (
    "| Program | tokens/s | ms a step | MFU | peak allocated, GiB | peak reserved, GiB |\n"
    "|---|--:|--:|--:|--:|--:|"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed and the peak memory of one program."""

    program: str
    tokens_per_s: float
    step_s: float
    mfu: float
    """Share of the peak that our run's calibration measured."""
    allocated_bytes: int
    reserved_bytes: int | None
    """None in a rehearsal, where `allocated_bytes` is the peak resident set."""

    def cells(self) -> list[str]:
        """Return the cells of this program's row."""
        reserved = "" if self.reserved_bytes is None else _gib(self.reserved_bytes)
        return [
            self.program,
            f"{self.tokens_per_s:,.0f}",
            f"{1000 * self.step_s:,.1f}",
            f"{self.mfu:.1%}",
            _gib(self.allocated_bytes),
            reserved,
        ]


def beside_peer(case: SpeedCase) -> Stage:
    """Return the stage of a case.

    Its estimate is for our run and the peer's. A compiled run follows if enough time is left.
    """
    return Stage(
        name=f"{case.name} beside a peer",
        compared=f"{case.method()}, random weights, bf16: tokens/s, MFU and memory with a peer's",
        wanted=(
            f"the better of our runs: {case.least_ratio} times the peer's tokens/s, MFU "
            f"{case.least_mfu:.2f}, at most its memory; in a rehearsal any"
        ),
        estimate_s=2 * case.ours_s + 10,
        run=partial(_measure, case=case),
    )


def _measure(runs: Runs, *, case: SpeedCase) -> Found:
    used = case.rehearsed() if runs.rehearsal else case
    slug = case.name.replace(" ", "-")
    folder = write_config(runs.folder / f"{slug}-model", used.config)
    name = f"beside-{slug}"
    try:
        limit_s = _LIMIT_FACTOR * case.ours_s * (5 if runs.rehearsal else 1)
        runs.programs.run(f"{name}-weights", "benchmarks.gpu.write_model", str(folder), runs.device)
        ours = _ours(runs, used, name, folder, limit_s=limit_s)
        work = _work(runs, used, name, folder)
        peer = run_peer(runs.programs, work, name=f"{name}-peer", limit_s=limit_s)
        theirs = _theirs(runs, used, name, folder, peer)
        compiled = _compiled(runs, used, f"{name}-compiled", folder, limit_s=limit_s)
    finally:
        # The largest model has 16 GB.
        shutil.rmtree(folder)
    own = [(name, ours)]
    if isinstance(compiled, Speed):
        own.append((f"{name}-compiled", compiled))
    best_run, best = max(own, key=lambda each: each[1].tokens_per_s)
    enough = reaches_goals(best, theirs, case)
    notes = [
        f"Each step: {used.micro_batch_size} sequences of {used.sequence_length} tokens in one "
        "micro-batch, bf16, SDPA, no activation checkpointing. MFU is relative to the GEMM peak "
        f"that our run measured, {_peak(runs, name) / 1e12:,.1f} TFLOP/s.",
        *(f"{reason}." for reason in peer.reasons),
    ]
    if isinstance(compiled, str):
        notes.append(compiled)
    details = [
        markdown_table(_HEAD, [each.cells() for each in (*(each for _, each in own), theirs)]),
        "\n".join(f"- {note}" for note in notes),
    ]
    if not enough or runs.rehearsal:
        details.append(_longest_kernels(runs, best_run, best))
    return Found(
        text=_ratios(best, theirs),
        passed=enough or (runs.rehearsal and isinstance(compiled, Speed)),
        details="\n\n".join(details),
        numbers={
            "programs": [asdict(each) for each in (*(each for _, each in own), theirs)],
            "peak_flops_per_s": _peak(runs, name),
            "peer_versions": peer.report["versions"],
        },
    )


def reaches_goals(ours: Speed, theirs: Speed, case: SpeedCase) -> bool:
    """Return whether our run reaches the case's ratio and MFU in at most the peer's memory."""
    return (
        ours.tokens_per_s >= case.least_ratio * theirs.tokens_per_s
        and ours.mfu >= case.least_mfu
        and ours.allocated_bytes <= theirs.allocated_bytes
    )


def _ratios(ours: Speed, theirs: Speed) -> str:
    memory = ours.allocated_bytes / theirs.allocated_bytes
    return (
        f"{ours.program}: {ours.tokens_per_s / theirs.tokens_per_s:.2f} times the tokens/s of "
        f"{theirs.program}, MFU {ours.mfu:.1%} (peer {theirs.mfu:.1%}), {memory:.2f} times its "
        "memory"
    )


def _ours(
    runs: Runs,
    case: SpeedCase,
    name: str,
    folder: Path,
    *,
    limit_s: float,
    compiles: bool = False,
) -> Speed:
    """Train with this project; the step after the measured steps is profiled."""
    last = _WARM_UP_STEPS + _STEPS
    settings: Settings = {
        "model.init": folder,
        "data.dir": runs.data(case.config["vocab_size"]),
        "data.sequence_length": case.sequence_length,
        "batch.global_batch_size": case.micro_batch_size,
        "batch.micro_batch_size": case.micro_batch_size,
        "memory.activation_checkpointing": "off",
        "precision.dtype": "bf16",
        "engine.compile": str(compiles).lower(),
        "train.steps": last + 1,
        "train.profile_step": last + 1,
        "train.checkpoint_every": 0,
        **_adapter_settings(case),
    }
    runs.train({name: settings}, module="benchmarks.gpu.measured_run", limit_s=limit_s)
    # Checkpoints of all weights have several GB, and no stage reads them.
    shutil.rmtree(runs.paths(name).checkpoints)
    ends = {row["step"]: row["time_unix"] for row in runs.rows(name)}
    return _speed(
        runs,
        case,
        folder,
        program=_COMPILED if compiles else _OURS,
        step_s=(ends[last] - ends[_WARM_UP_STEPS]) / _STEPS,
        memory=runs.peak_memory(name),
        peak=_peak(runs, name),
    )


def _compiled(
    runs: Runs, case: SpeedCase, name: str, folder: Path, *, limit_s: float
) -> Speed | str:
    """Return the speed with `engine.compile`, or a sentence that says why there is none."""
    needed_s, left_s = _COMPILE_FACTOR * case.ours_s, runs.programs.left_s()
    if left_s < needed_s:
        return f"engine.compile did not run: it needs about {needed_s:.0f} s, {left_s:.0f} s left."
    try:
        return _ours(runs, case, name, folder, limit_s=_COMPILE_FACTOR * limit_s, compiles=True)
    except ProgramError as error:
        return f"engine.compile failed: {error}."


def _work(runs: Runs, case: SpeedCase, name: str, folder: Path) -> Work:
    vocab_size = case.config["vocab_size"]
    return Work(
        folder=str(folder),
        tokens=str(runs.data(vocab_size) / TRAIN_NAME),
        tokens_dtype=token_dtype(vocab_size),
        report=str(runs.folder / f"{name}-peer.json"),
        device=runs.device,
        sequence_length=case.sequence_length,
        micro_batch_size=case.micro_batch_size,
        warm_up_steps=_WARM_UP_STEPS,
        steps=_STEPS,
        adapter=case.adapter(),
    )


def _theirs(runs: Runs, case: SpeedCase, name: str, folder: Path, peer: PeerRun) -> Speed:
    return _speed(
        runs,
        case,
        folder,
        program=peer.name,
        step_s=peer.report["took_s"] / peer.report["steps"],
        memory=peer.report,
        peak=_peak(runs, name),
    )


def _speed(
    runs: Runs,
    case: SpeedCase,
    folder: Path,
    *,
    program: str,
    step_s: float,
    memory: dict[str, Any],
    peak: float,
) -> Speed:
    tokens_per_s = case.micro_batch_size * case.sequence_length / step_s
    spec = trained_spec(
        {
            "model": str(folder),
            "sequence_length": case.sequence_length,
            "adapter": case.adapter(),
        }
    )
    return Speed(
        program=program,
        tokens_per_s=tokens_per_s,
        step_s=step_s,
        mfu=tokens_per_s * spec.flops_per_token() / peak,
        allocated_bytes=memory["allocated_bytes"],
        reserved_bytes=memory["reserved_bytes"],
    )


def _longest_kernels(runs: Runs, name: str, speed: Speed) -> str:
    """Return a table of the longest kernels of the run's profiled step."""
    table = read_table(runs.paths(name).profile / PROFILE_TABLE)
    rows: Sequence[Operator] = table.operators[:_KERNELS] if table else ()
    kind = "operators" if runs.rehearsal else "kernels"
    lines = [
        [
            f"`{each.name}`",
            f"{each.calls:,}",
            f"{1000 * each.self_s:,.2f}",
            f"{each.self_s / speed.step_s:.0%}",
        ]
        for each in rows
    ]
    heads = f"| Longest {kind} of {speed.program} | calls | ms | share of a step |"
    return markdown_table(f"{heads}\n|---|--:|--:|--:|", lines)


def _adapter_settings(case: SpeedCase) -> Settings:
    adapter = case.adapter()
    if adapter is None:
        return {}
    return {"adapter.kind": "lora", **{f"adapter.{key}": each for key, each in adapter.items()}}


def _peak(runs: Runs, name: str) -> float:
    """Return the GEMM peak that the run measured, in FLOP/s."""
    peak = runs.summary(name).peak_flops_per_s
    assert peak is not None, "the run was calibrated"
    return peak


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
