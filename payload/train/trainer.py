"""The training loop: straight, every rank the same, one update a step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import numpy as np
import torch

from payload.core.errors import TrainingError
from payload.data.reading.blocks import BlockOrder, Indices
from payload.estimates.compute_time import mfu
from payload.formats.data_folder import TRAIN_NAME
from payload.run_record.metrics_log import RankTimes, StepMetrics, read_val_losses
from payload.train.checkpoints.checkpoint import TrainerState
from payload.train.checkpoints.saving import Saving
from payload.train.models.stage import Stage
from payload.train.optimizers.schedule import lr_at
from payload.train.parts import Parts
from payload.train.profile import profiled
from payload.train.rank_output_files import rss_bytes, versions
from payload.train.step_clock import StepClock
from payload.train.strategies.pipeline import order, run_passes
from payload.train.tasks.evaluate import EvalPass

log = logging.getLogger(__name__)

_STAGE_BIT = 53
"""Above every seed of a pass: seeds are below 2**32, times 1,000,003."""
_NO_MFU = (
    "a step was faster than the peak that the calibration measured, so its MFU is unknown: another "
    "program used the cores during the calibration"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the loop ended."""

    step: int
    stopped: bool
    """Because it was asked to; not all steps and evaluations are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """The forward and backward passes of one step on this rank."""

    loss: torch.Tensor
    """The step's mean loss is the mean of this over the ranks; a float64 scalar."""
    tokens: int
    """Tokens of all ranks' samples."""
    sync_time_s: float
    """Spent waiting for gradients."""


class Trainer:
    """Trains from a start to `train.steps`, or until it is asked to stop."""

    def __init__(self, parts: Parts, *, start: TrainerState | None) -> None:
        self._parts = parts
        self._batch = parts.config.batch
        self._accumulation = parts.config.passes(parts.world.world_size)
        self._order = BlockOrder(
            num_blocks=parts.task.train.num_samples(), seed=parts.config.run.seed
        )
        self._resumes = start is not None
        self._step = start.step if start else 0
        self._next_sample = start.next_sample if start else 0
        self._chosen: dict[int, Indices] = {}
        self._tokens = start.tokens if start else 0
        self._saved_step = start.step if start else -1
        self._checked_step = -1
        self._mfu_missed = False
        self._clock = StepClock(rank=parts.world.rank, world_size=parts.world.world_size)
        self._wall_before_s = start.wall_s if start else 0.0
        self._started_s = time.perf_counter()
        self._saving = Saving(
            parts.paths.checkpoints,
            keep=parts.config.train.keep_checkpoints,
            tokenizer=parts.tokenizer,
            val_losses=read_val_losses(parts.paths.metrics) if parts.world.is_main else {},
            waiting=lambda: parts.heartbeat.tell(step=self._step, phase="checkpoint"),
        )

    def run(self, *, evaluate_first: bool) -> Outcome:
        """The loop. Raises TrainingError, RanksDifferError; RuntimeError when a peer vanished.

        After any error the checkpoint that is being written is made whole first.
        """
        try:
            return self._run(evaluate_first=evaluate_first)
        except Exception:
            # The tensors are as they were: no update comes any more that would wait for the write.
            with suppress(Exception):
                self._saving.finish()
            raise

    def _run(self, *, evaluate_first: bool) -> Outcome:
        train, parts = self._parts.config.train, self._parts
        begun = parts.task.begin(
            parts.model, self._eval_pass(None), dtype=parts.calibration.dtype, resumes=self._resumes
        )
        stopping = not begun or (evaluate_first and self._evaluate())
        while self._step < train.steps and not stopping:
            self._tell_step(0)
            with self._profiling():
                stopping = self._train_step()
            last = stopping or self._step == train.steps
            save = last or _due(self._step, train.checkpoint_every)
            if save or _due(self._step, train.sync_check_every):
                self._check_sync()
            if save:
                self._checkpoint()
            if self._step == train.steps or (not last and _due(self._step, train.eval_every)):
                stopping = self._evaluate()
        if self._checked_step != self._step:
            self._check_sync()
        self._checkpoint()
        self._saving.finish()
        return Outcome(step=self._step, stopped=stopping)

    def _profiling(self) -> AbstractContextManager[None]:
        """Return what records the coming step, if it is the one that is wanted of this rank."""
        parts, step = self._parts, self._step + 1
        train, rank = parts.config.train, parts.world.rank
        if (step, rank) != (train.profile_step, train.profile_rank):
            return nullcontext()
        return profiled(parts.paths.profile, step=step, rank=rank)

    def wall_s(self) -> float:
        """Time spent training, over all attempts."""
        return self._wall_before_s + time.perf_counter() - self._started_s

    def samples(self, micro_step: int) -> Indices:
        """Return the numbers of this rank's samples in pass `micro_step` of the coming step.

        A step's samples are the same set whatever the number of ranks and passes is. A pass behind
        the step's last one is the next step's first.
        """
        size, strategy = self._batch.sequences(), self._parts.strategy
        step, micro_step = divmod(micro_step, self._accumulation)
        chosen = self._step_samples(step)
        first = (micro_step * strategy.mesh.data_ranks + strategy.data_rank) * size
        return chosen[first : first + size]

    def _step_samples(self, ahead: int = 0) -> Indices:
        """Return the samples of the coming step, or of one `ahead` of it.

        Those of two steps are kept: a step may have a million passes, and each asks.
        """
        size = self._batch.global_batch_size
        first = self._next_sample + ahead * size
        if first not in self._chosen:
            positions = np.arange(first, first + size, dtype=np.int64)
            found = self._parts.task.train.arranged(self._order.blocks(positions))
            kept = {start: each for start, each in self._chosen.items() if start + size == first}
            self._chosen = {**kept, first: found}
        return self._chosen[first]

    def _train_step(self) -> bool:
        """One update, or none when a rank is asked to stop before it. Returns whether one was."""
        parts, started_s = self._parts, time.perf_counter()
        lr = lr_at(self._step, parts.config)
        parts.optimizers.set_lr(lr)
        passes = self._accumulate_gradients()
        if passes is None:
            parts.optimizers.zero_grad()
            return True
        grad_norm = self._clip()
        data_time_s = self._clock.seconds("data")
        with self._clock.of("checkpoint"):
            self._saving.before_update()
        # Else a wait for the writer would seem to go on, while this rank waits for others.
        self._tell_step(self._accumulation)
        parts.observer.before_update(self._step)
        parts.optimizers.step()
        mean_loss, stopping, rank_times, sums = self._agree(passes.loss)
        self._step += 1
        self._next_sample += self._batch.global_batch_size
        self._tokens += passes.tokens
        self._require_finite(loss=mean_loss, gradient_norm=grad_norm)
        step_time_s = time.perf_counter() - started_s
        row = StepMetrics(
            step=self._step,
            tokens=self._tokens,
            loss=mean_loss,
            lr=lr,
            grad_norm=grad_norm,
            step_time_s=step_time_s,
            tokens_per_s=passes.tokens / step_time_s,
            mfu=self._mfu(passes.tokens / step_time_s),
            data_time_s=data_time_s,
            sync_time_s=passes.sync_time_s,
            rss_bytes=rss_bytes(),
            ranks=rank_times,
        )
        self._record(parts.task.loss.step_row(row, sums, samples=self._batch.global_batch_size))
        return stopping

    def _accumulate_gradients(self) -> _Passes | None:
        """Make all passes of a step; ranks exchange gradients during the last one only.

        Returns None when a rank was asked to stop: a step of many passes takes minutes, which a
        preempted machine does not have.
        """
        parts, clock = self._parts, self._clock
        stage = parts.strategy.stage()
        if stage is not None:
            return self._pass_along(stage)
        total = torch.zeros((), dtype=torch.float64, device=parts.world.device)
        is_to_stop: Callable[[], bool] | None = None
        train, step_samples = parts.task.train, self._step_samples()
        # A rank's part of the step's mean loss, times the ranks: gradients are averaged over them.
        step_weight = train.weight(step_samples) / parts.strategy.mesh.data_ranks
        for micro_step in range(self._accumulation):
            with clock.of("data"):
                batch = train.batch(self.samples(micro_step))
                train.expect(self.samples(micro_step + 1))
            if parts.model.draws_masks():
                self._seed_masks(micro_step)
            last = micro_step == self._accumulation - 1
            with clock.of("forward"):
                loss = parts.trained(*(each.to(parts.world.device) for each in batch.inputs))
            if last:
                parts.strategy.begin(batch.tokens)
            divisor = step_weight / batch.weight
            with clock.of("backward"):
                parts.accelerator.backward(loss / divisor)
            total += loss.detach().double() / divisor
            # The answer is waited for a pass later: between two passes no rank waits for another.
            if not last:
                with clock.of("wait"):
                    stops = is_to_stop is not None and is_to_stop()
                if stops:
                    return None
                is_to_stop = self._ask_to_stop("step", micro_step + 1, self._accumulation)
        sync_time_s = self._finish_exchange()
        if is_to_stop is not None:
            is_to_stop()  # The step is whole: `_agree` asks once more.
        return _Passes(
            loss=total,
            tokens=train.num_tokens(step_samples),
            sync_time_s=sync_time_s,
        )

    def _pass_along(self, stage: Stage) -> _Passes:
        """Make all passes of a step on one pipeline stage, in the order of the run's schedule.

        A request to stop is heard at the end of the step: stages make different passes at a time.
        """
        parts, clock = self._parts, self._clock
        total = torch.zeros((), dtype=torch.float64, device=parts.world.device)
        train, step_samples = parts.task.train, self._step_samples()
        step_weight = train.weight(step_samples) / parts.strategy.mesh.data_ranks

        def forward(micro_step: int) -> torch.Tensor:
            with clock.of("data"):
                batch = train.batch(self.samples(micro_step))
                train.expect(self.samples(micro_step + 1))
            if parts.model.draws_masks():
                self._seed_masks(micro_step)
            self._tell_step(micro_step)
            with clock.of("forward"):
                result: torch.Tensor = parts.trained(*batch.inputs)
            if not stage.is_last():
                return result
            divisor = step_weight / batch.weight
            total.add_(result.detach().double() / divisor)
            return result / divisor

        def backward(result: torch.Tensor, gradient: torch.Tensor | None) -> None:
            with clock.of("backward"):
                torch.autograd.backward(result, gradient)

        schedule = parts.config.distributed.pipeline_schedule
        passes = order(schedule, stage=stage.index, stages=stage.stages, passes=self._accumulation)
        run_passes(stage, passes, forward=forward, backward=backward)
        return _Passes(
            loss=total,
            tokens=train.num_tokens(step_samples),
            sync_time_s=self._finish_exchange(),
        )

    def _finish_exchange(self) -> float:
        """Put the mean gradients in place; return the seconds that this rank waited for others."""
        before_s = self._clock.seconds("wait")
        with self._clock.of("wait"):
            sync_time_s = self._parts.strategy.finish()
        # A sharded model waits within its passes, which are counted as computing so far.
        self._clock.waited_in_passes(sync_time_s - (self._clock.seconds("wait") - before_s))
        return sync_time_s

    def _seed_masks(self, micro_step: int) -> None:
        """Seed dropout by the pass's place in the run, not by what ran before: resume is exact.

        Each stage of a pipeline has masks of its own; ranks that compute a layer together share
        them.
        """
        strategy = self._parts.strategy
        stage = strategy.mesh.place(self._parts.world.rank).pipeline
        passes = micro_step * strategy.mesh.data_ranks + strategy.data_rank
        first = self._next_sample + passes * self._batch.sequences()
        torch.manual_seed((self._parts.config.run.seed * 1_000_003 + first) ^ (stage << _STAGE_BIT))

    def _clip(self) -> float:
        """Gradient norm before clipping."""
        return self._parts.optimizers.clip(self._parts.config.optimizer.grad_clip or math.inf)

    def _agree(self, loss: torch.Tensor) -> tuple[float, bool, RankTimes | None, torch.Tensor]:
        """Return the mean loss, whether a rank was asked to stop, times and sums: equal on all."""
        world, strategy = self._parts.world, self._parts.strategy
        own = float(loss) if strategy.has_results() else 0.0
        shared = torch.tensor(
            [own, float(self._parts.stop_requested()), *self._clock.take()],
            dtype=torch.float64,
            device=world.device,
        )
        sums = self._parts.task.loss.take_sums().to(world.device)
        shared = world.sum(torch.cat((shared, sums)))
        total_loss, stopping, *seconds = shared[: len(shared) - len(sums)].tolist()
        mean, times = total_loss / strategy.mesh.data_ranks, self._clock.add_step(seconds)
        return mean, stopping > 0, times, shared[len(shared) - len(sums) :]

    def _require_finite(self, **found: float) -> None:
        if all(map(math.isfinite, found.values())):
            return
        said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items())
        config = self._parts.config
        raise TrainingError(
            f"step {self._step}: {said}. Training diverged or a "
            "number overflowed. Resume from the last checkpoint with a lower optimizer.lr (now "
            f'{config.optimizer.lr}), a longer warm-up, or precision.dtype = "fp32".'
        )

    def _mfu(self, tokens_per_s: float) -> float | None:
        """Share of the measured peak; None above 1, where something disturbed the calibration."""
        parts = self._parts
        share = mfu(
            tokens_per_s=tokens_per_s,
            flops_per_token=parts.model.trained_spec().flops_per_token(),
            peak_flops_per_s=parts.calibration.peak_flops_per_s,
        )
        return share if share <= 1 else None

    def _record(self, row: StepMetrics) -> None:
        train = self._parts.config.train
        if self._parts.metrics is None:
            return
        self._parts.metrics.append(row)
        if row.mfu is None and not self._mfu_missed:
            self._mfu_missed = True
            log.warning(_NO_MFU)
        if row.step == 1 or row.step == train.steps or _due(row.step, train.log_every):
            share = "" if row.mfu is None else f"  MFU {row.mfu:.1%}"
            log.info(
                f"step {row.step:>{len(str(train.steps))}}/{train.steps}  loss {row.loss:.4f}  "
                f"lr {row.lr:.2e}  grad norm {row.grad_norm:.2f}  {row.tokens_per_s:,.0f} tokens/s"
                f"{share}{row.describe()}"
            )

    def _evaluate(self) -> bool:
        """Evaluate and record it. Returns whether any rank was asked to stop meanwhile."""
        parts = self._parts
        parts.heartbeat.tell(step=self._step, phase="eval")
        row = parts.task.evaluate(parts.model, self._eval_pass(parts.config.train.eval_tokens))
        if row is None:
            return True
        self._require_finite(validation_loss=row.val_loss)
        if parts.metrics is not None:
            parts.metrics.append(row)
            self._saving.evaluated(row.step, val_loss=row.val_loss)
            log.info(f"step {row.step}: {row.describe()}")
        return False

    def _eval_pass(self, max_tokens: int | None) -> EvalPass:
        parts = self._parts
        return EvalPass(
            world=parts.world,
            step=self._step,
            micro_batch_size=self._batch.sequences(),
            max_tokens=max_tokens,
            autocast=parts.accelerator.autocast,
            without_gradients=lambda: parts.strategy.without_gradients(parts.model),
            computes_together=parts.strategy.computes_together(),
            share=(parts.strategy.data_rank, parts.strategy.mesh.data_ranks),
            has_results=parts.strategy.has_results(),
            should_stop=lambda done, of: self._ask_to_stop("eval", done, of)(),
        )

    def _tell_step(self, done: int) -> None:
        self._parts.heartbeat.tell(
            step=self._step, phase="step", micro_step=done, of=self._accumulation
        )

    def _ask_to_stop(self, phase: str, done: int, of: int) -> Callable[[], bool]:
        """Between two passes: this rank is alive. The call tells whether any is asked to stop."""
        parts = self._parts
        parts.heartbeat.tell(step=self._step, phase=phase, micro_step=done, of=of)
        request = torch.tensor(float(parts.stop_requested()), device=parts.world.device)
        asked = parts.world.begin_sum(request)
        return lambda: bool(asked() > 0)

    def _check_sync(self) -> None:
        self._parts.heartbeat.tell(step=self._step, phase="sync check")
        passed_step = self._checked_step if self._checked_step >= 0 else None
        parts = self._parts
        parts.strategy.check(parts.optimizers, step=self._step, passed_step=passed_step)
        self._checked_step = self._step

    def _checkpoint(self) -> None:
        """Begin to write one; not when nothing is new, as after a stop before a step was done."""
        if not self._step or self._saved_step == self._step:
            return
        parts, self._saved_step = self._parts, self._step
        parts.heartbeat.tell(step=self._step, phase="checkpoint")
        with self._clock.of("checkpoint"):
            snapshot = parts.strategy.snapshot(parts.model, parts.optimizers)
        if not parts.world.is_main:
            if snapshot.is_shared():
                self._saving.send(snapshot)
            return
        if parts.metrics is not None:
            parts.metrics.require_written()
        meta = parts.task.meta
        self._saving.begin(
            parts.paths.checkpoint(self._step),
            model=parts.model,
            snapshot=snapshot,
            state=TrainerState(
                step=self._step,
                next_sample=self._next_sample,
                tokens=self._tokens,
                seed=parts.config.run.seed,
                dtype=parts.calibration.dtype,
                train_sha256=meta.files[TRAIN_NAME].sha256,
                data_sha256=meta.hashes(),
                wall_s=self.wall_s(),
                world_size=parts.world.world_size,
                tokenizer={"name": meta.tokenizer, "sha256": meta.tokenizer_sha256},
                base=parts.base,
                identity=parts.identity,
                config_toml=parts.config.to_toml(),
                versions=versions(),
            ),
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
