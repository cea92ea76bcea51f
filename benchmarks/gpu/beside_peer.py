"""Stages that train a model with this project and with a peer, on the same device and tokens."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu.comparison import Comparison, Speed
from benchmarks.gpu.models import write_config
from benchmarks.gpu.peer_runs import NoPeerError, PeerRun, run_peer
from benchmarks.gpu.programs import ProgramError
from benchmarks.gpu.runs import Runs, Settings
from benchmarks.gpu.speed_cases import SpeedCase
from benchmarks.gpu.visit import Found, Stage
from benchmarks.peers.work import Work
from benchmarks.step_model import trained_spec
from payload.core.errors import ExitCode
from payload.formats.data_folder import TRAIN_NAME, token_dtype
from payload.run_record.profile_table import PROFILE_TABLE, read_table

_WARM_UP_STEPS, _STEPS = 4, 12
_COMPILE_FACTOR = 2.0
"""Estimated time of a run with `engine.compile`, relative to the run without it."""
_LIMIT_FACTOR, _REHEARSAL_LIMIT_FACTOR = 3.0, 10.0
"""A program is killed after its estimated time, multiplied by this factor."""


def beside_peer(case: SpeedCase) -> Stage:
    """Return the stage of a case.

    Its estimate is for our run and the peer's. A compiled run follows if enough time is left.
    """
    return Stage(
        name=f"{case.name} beside a peer",
        compared=f"tokens/s, MFU and memory with a peer's; {case.method()}, random weights, bf16",
        wanted=(
            f"the better of our runs: {case.least_ratio} times the peer's tokens/s, MFU "
            f"{case.least_mfu:.2f}, at most its memory; in a rehearsal any"
        ),
        estimate_s=2 * case.ours_s + 10,
        run=partial(_measure, case=case),
    )


def _measure(runs: Runs, *, case: SpeedCase) -> Found:
    measurement = _Measurement(runs, case)
    try:
        found, has_failed = measurement.take()
    finally:
        # The largest model has 16 GB.
        shutil.rmtree(measurement.folder)
    return Found(
        text=found.summary(),
        passed=found.reaches_goals() or (runs.rehearsal and not has_failed),
        details=found.section(rehearsal=runs.rehearsal),
        numbers=found.numbers(),
    )


@dataclass(frozen=True, slots=True)
class _Missing:
    """Why a program has no measurement."""

    reason: str
    failed: bool


class _Measurement:
    """Trains a case with each program."""

    def __init__(self, runs: Runs, case: SpeedCase) -> None:
        self._runs = runs
        self._case = case.rehearsed() if runs.rehearsal else case
        self._limit_s = case.ours_s * (_REHEARSAL_LIMIT_FACTOR if runs.rehearsal else _LIMIT_FACTOR)
        self._name = case.name.replace(" ", "-")
        self.folder = write_config(runs.folder / f"model-{self._name}", self._case.config)
        """Folder of the model."""

    def take(self) -> tuple[Comparison, bool]:
        """Return the measurements, and whether the peers or the compiled run failed.

        Raises ProgramError if our run fails.
        """
        weights = f"{self._name}-weights"
        self._run(weights, "benchmarks.gpu.write_model", str(self.folder), self._runs.device)
        peak = self._train(self._name)
        ours = [self._our_speed(self._name, program="Tileforge", peak=peak)]
        peer = self._peer()
        theirs = None
        notes: list[str] = []
        has_failed = False
        if isinstance(peer, PeerRun):
            theirs = self._peer_speed(peer, peak=peak)
            notes += peer.reasons
        else:
            notes, has_failed = [peer.reason], peer.failed
        compiled = self._compiled(peak=peak)
        if isinstance(compiled, Speed):
            ours.append(compiled)
        else:
            notes.append(compiled.reason)
            has_failed = has_failed or compiled.failed
        comparison = Comparison(
            case=self._case, peak_flops_per_s=peak, ours=ours, peer=theirs, notes=notes
        )
        return comparison, has_failed

    def _run(self, name: str, module: str, *arguments: str) -> None:
        self._runs.programs.run(name, module, *arguments, limit_s=self._limit_s)

    def _train(self, name: str, *, compiles: bool = False) -> float:
        """Train with this project, and profile the step after the measured steps.

        Return the GEMM peak that the run measured, in FLOP/s.
        """
        runs, case = self._runs, self._case
        last = _WARM_UP_STEPS + _STEPS
        settings: Settings = {
            "model.init": self.folder,
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
        limit_s = self._limit_s * (_COMPILE_FACTOR if compiles else 1.0)
        runs.train({name: settings}, module="benchmarks.gpu.measured_run", limit_s=limit_s)
        # Checkpoints of all weights have several GB, and no stage reads them.
        shutil.rmtree(runs.paths(name).checkpoints)
        peak = runs.summary(name).peak_flops_per_s
        assert peak is not None, "the run was calibrated"
        return peak

    def _compiled(self, *, peak: float) -> Speed | _Missing:
        needed_s, left_s = _COMPILE_FACTOR * self._case.ours_s, self._runs.programs.left_s()
        if left_s < needed_s:
            reason = f"it needs about {needed_s:.0f} s, {left_s:.0f} s left"
            return _Missing(f"engine.compile did not run: {reason}.", failed=False)
        name = f"{self._name}-compiled"
        try:
            self._train(name, compiles=True)
        except ProgramError as error:
            if error.status != ExitCode.CONFIG:
                return _Missing(f"engine.compile failed: {error}.", failed=True)
            # The log has only this message, which begins with the path of run.toml.
            error.log.unlink()
            reason = str(error).rpartition(".toml: ")[2]
            return _Missing(f"engine.compile did not run: {reason}", failed=False)
        return self._our_speed(name, program="Tileforge, engine.compile", peak=peak)

    def _peer(self) -> PeerRun | _Missing:
        case, runs = self._case, self._runs
        vocab_size = case.config["vocab_size"]
        work = Work(
            folder=str(self.folder),
            tokens=str(runs.data(vocab_size) / TRAIN_NAME),
            tokens_dtype=token_dtype(min(vocab_size, runs.vocab_size)),
            report=str(runs.folder / f"{self._name}-peer.json"),
            device=runs.device,
            sequence_length=case.sequence_length,
            micro_batch_size=case.micro_batch_size,
            warm_up_steps=_WARM_UP_STEPS,
            steps=_STEPS,
            adapter=case.adapter(),
        )
        name = f"{self._name}-peer"
        try:
            return run_peer(runs.programs, work, name=name, limit_s=self._limit_s)
        except NoPeerError as error:
            return _Missing(str(error), failed=True)

    def _our_speed(self, name: str, *, program: str, peak: float) -> Speed:
        runs, last = self._runs, _WARM_UP_STEPS + _STEPS
        ends = {row["step"]: row["time_unix"] for row in runs.rows(name)}
        table = read_table(runs.paths(name).profile / PROFILE_TABLE)
        return self._speed(
            program=program,
            step_s=(ends[last] - ends[_WARM_UP_STEPS]) / _STEPS,
            memory=runs.peak_memory(name),
            peak=peak,
            kernels=table.operators if table else (),
        )

    def _peer_speed(self, peer: PeerRun, *, peak: float) -> Speed:
        step_s = peer.report["took_s"] / peer.report["steps"]
        return self._speed(program=peer.name, step_s=step_s, memory=peer.report, peak=peak)

    def _speed(
        self, *, program: str, step_s: float, memory: dict[str, Any], peak: float, **others: Any
    ) -> Speed:
        case = self._case
        tokens_per_s = case.micro_batch_size * case.sequence_length / step_s
        trained = {
            "model": str(self.folder),
            "sequence_length": case.sequence_length,
            "adapter": case.adapter(),
        }
        share = tokens_per_s * trained_spec(trained).flops_per_token() / peak
        return Speed(
            program=program,
            tokens_per_s=tokens_per_s,
            step_s=step_s,
            mfu=share if share <= 1 else None,
            allocated_bytes=memory["allocated_bytes"],
            reserved_bytes=memory["reserved_bytes"],
            **others,
        )


def _adapter_settings(case: SpeedCase) -> Settings:
    adapter = case.adapter()
    if adapter is None:
        return {}
    return {"adapter.kind": "lora", **{f"adapter.{key}": each for key, each in adapter.items()}}
