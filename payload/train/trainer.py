"""The training loop. All ranks run the loop in lockstep, with one optimizer update per step."""

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
from payload.run_record.metrics_log import StepMetrics, read_val_losses
from payload.train.checkpoints.checkpoint import TrainerState
from payload.train.checkpoints.saving import Saving
from payload.train.models.stage import Stage
from payload.train.optimizers.schedule import lr_at
from payload.train.parts import TrainContext
from payload.train.profile import profiled
from payload.train.rank_metrics_and_heartbeat import rss_bytes, versions
from payload.train.step_clock import StepClock
from payload.train.step_results import StepResults, begin_results
from payload.train.strategies.pipeline import run_schedule, schedule_order
from payload.train.tasks.evaluate import EvalPass
from payload.train.torch_engines import without_compilation

log = logging.getLogger(__name__)

_STAGE_BIT = 53
"""Index of a bit that is 0 in every dropout seed: seeds are below 2**32 x 1,000,003."""
_NO_MFU = (
    "a step was faster than the calibration's peak allows, so its MFU is unknown: another program "
    "used the cores during the calibration"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a training loop."""

    step: int
    stopped: bool
    """True after a request to stop, if steps or evaluations remain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepResult:
    """The result of one step's forward and backward passes on this rank."""

    loss: torch.Tensor
    """A float64 scalar; its mean over the ranks is the step's mean loss."""
    tokens: int
    """Tokens of all ranks' samples."""
    sync_time_s: float
    """Seconds spent waiting for gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnreadStep:
    """A step whose results the host has not read."""

    step: int
    started_s: float
    """When the step began, in seconds of `time.perf_counter`."""
    tokens: int
    """Tokens of the run so far."""
    lr: float
    data_time_s: float
    passes: _StepResult
    results: Callable[[], StepResults]


class Trainer:
    """Trains from a new or saved state to `train.steps`, or until a stop is requested."""

    def __init__(self, context: TrainContext, *, start: TrainerState | None) -> None:
        self._context = context
        self._batch = context.config.batch
        self._accumulation = context.config.passes(context.world.world_size)
        self._order = BlockOrder(
            num_blocks=context.task.train.num_samples(), seed=context.config.run.seed
        )
        self._resumes = start is not None
        self._step = start.step if start else 0
        self._next_sample = start.next_sample if start else 0
        self._chosen: dict[int, Indices] = {}
        self._tokens = start.tokens if start else 0
        self._saved_step = start.step if start else -1
        self._checked_step = -1
        self._mfu_missed = False
        self._unread: _UnreadStep | None = None
        self._read_s = 0.0
        self._clock = StepClock(rank=context.world.rank, world_size=context.world.world_size)
        self._wall_before_s = start.wall_s if start else 0.0
        self._started_s = time.perf_counter()
        self._saving = Saving(
            context.paths.checkpoints,
            keep=context.config.train.keep_checkpoints,
            tokenizer=context.tokenizer,
            copied=context.copied,
            val_losses=read_val_losses(context.paths.metrics) if context.world.is_main else {},
            waiting=lambda: context.heartbeat.report(step=self._step, phase="checkpoint"),
        )

    def run(self, *, evaluate_first: bool) -> Outcome:
        """Run the loop and return its result.

        On an error, the checkpoint that is being written is completed first. Raises TrainingError,
        RanksDifferError, and RuntimeError if a different rank has disappeared.
        """
        try:
            return self._run(evaluate_first=evaluate_first)
        except Exception:
            # No further update follows, so the tensors of the checkpoint no longer change.
            with suppress(Exception):
                self._saving.finish()
            raise

    def _run(self, *, evaluate_first: bool) -> Outcome:
        train, context = self._context.config.train, self._context
        with without_compilation(context.config.engine):
            begun = context.task.begin(
                context.model,
                self._eval_pass(None),
                dtype=context.calibration.dtype,
                resumes=self._resumes,
            )
        stopping = not begun or (evaluate_first and self._evaluate())
        while self._step < train.steps and not stopping:
            self._report_step(0)
            with self._profiling():
                stopping = self._train_step()
                if stopping or self._needs_results():
                    stopping = self._read_newest() or stopping
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

    def _needs_results(self) -> bool:
        """Return whether more than a step follows, which needs this step's results.

        A profile is also more: the profiler takes time to start and to write.
        """
        train, step = self._context.config.train, self._step
        every = train.checkpoint_every, train.sync_check_every, train.eval_every
        is_beside_profile = train.profile_step in (step, step + 1)
        return step == train.steps or is_beside_profile or any(_due(step, each) for each in every)

    def _profiling(self) -> AbstractContextManager[None]:
        """Return a profiler if the config selects the next step and this rank."""
        context, step = self._context, self._step + 1
        train, rank = context.config.train, context.world.rank
        if (step, rank) != (train.profile_step, train.profile_rank):
            return nullcontext()
        return profiled(context.paths.profile, step=step, rank=rank, is_cpu=context.world.is_cpu)

    def wall_s(self) -> float:
        """Return the seconds spent training, over all attempts."""
        return self._wall_before_s + time.perf_counter() - self._started_s

    def samples(self, micro_step: int) -> Indices:
        """Return the indices of this rank's samples in micro-batch `micro_step` of the next step.

        A step trains on the same samples with any number of ranks and micro-batches. The
        micro-batch after the last micro-batch of a step is the first micro-batch of the following
        step.
        """
        size, strategy = self._batch.micro_batch(), self._context.strategy
        step, micro_step = divmod(micro_step, self._accumulation)
        chosen = self._step_samples(step)
        first = (micro_step * strategy.mesh.data_ranks + strategy.data_rank) * size
        return chosen[first : first + size]

    def _step_samples(self, ahead: int = 0) -> Indices:
        """Return the samples of the next step, or of the step that is `ahead` steps later.

        The samples of two steps are cached, because each of possibly a million micro-batches of a
        step calls this function.
        """
        size = self._batch.global_batch_size
        first = self._next_sample + ahead * size
        if first not in self._chosen:
            positions = np.arange(first, first + size, dtype=np.int64)
            found = self._context.task.train.arrange_samples(
                self._order.blocks(positions), micro_batch_size=self._batch.micro_batch()
            )
            kept = {start: each for start, each in self._chosen.items() if start + size == first}
            self._chosen = {**kept, first: found}
        return self._chosen[first]

    def _train_step(self) -> bool:
        """Train one step; return whether to stop.

        A stop request before the update skips the update. If the device computes while the host
        continues, this step's results are read after the next step has been queued, so that the
        device never waits for the host.
        """
        context, started_s = self._context, time.perf_counter()
        lr = lr_at(self._step, context.config)
        context.optimizers.set_lr(lr)
        passes = self._accumulate_gradients()
        if passes is None:
            context.optimizers.zero_grad()
            return True
        grad_norm = context.optimizers.clip(context.config.optimizer.grad_clip or math.inf)
        data_time_s = self._clock.seconds("data")
        with self._clock.of("checkpoint"):
            self._saving.before_update()
        # Without this report, delays of other ranks would be shown as a wait for the writer.
        self._report_step(self._accumulation)
        context.observer.before_update(self._step)
        context.optimizers.step()
        self._step += 1
        self._next_sample += self._batch.global_batch_size
        self._tokens += passes.tokens
        earlier = self._unread
        self._unread = _UnreadStep(
            step=self._step,
            started_s=started_s,
            tokens=self._tokens,
            lr=lr,
            data_time_s=data_time_s,
            passes=passes,
            results=self._begin_results(passes.loss, grad_norm),
        )
        if context.world.queues_work():
            return earlier is not None and self._read(earlier)
        return self._read_newest()

    def _begin_results(self, loss: torch.Tensor, norm: torch.Tensor) -> Callable[[], StepResults]:
        context = self._context
        return begin_results(
            context.world,
            loss=loss if context.strategy.has_results() else torch.zeros_like(loss),
            gradient_norm=norm,
            stop_requested=context.stop_requested(),
            seconds=self._clock.take(),
            loss_sums=context.task.loss.take_sums(),
            expert_tokens=context.model.take_expert_tokens(),
        )

    def _read_newest(self) -> bool:
        """Check and record the newest step, if that has not been done; return whether to stop."""
        unread, self._unread = self._unread, None
        return unread is not None and self._read(unread)

    def _read(self, unread: _UnreadStep) -> bool:
        """Check and record a step; return whether to stop."""
        context, found = self._context, unread.results()
        mean_loss = found.loss / context.strategy.mesh.data_ranks
        self._require_finite(unread.step, loss=mean_loss, gradient_norm=found.gradient_norm)
        # On a GPU, a step begins on the host before the device has completed the one before.
        now_s = time.perf_counter()
        step_time_s = now_s - max(unread.started_s, self._read_s)
        self._read_s = now_s
        tokens, experts = unread.passes.tokens, found.expert_tokens
        row = StepMetrics(
            step=unread.step,
            tokens=unread.tokens,
            loss=mean_loss,
            lr=unread.lr,
            grad_norm=found.gradient_norm,
            step_time_s=step_time_s,
            tokens_per_s=tokens / step_time_s,
            mfu=self._mfu(tokens / step_time_s),
            data_time_s=unread.data_time_s,
            sync_time_s=unread.passes.sync_time_s,
            rss_bytes=rss_bytes(),
            ranks=self._clock.add_step(found.seconds),
            idle_experts=int((experts == 0).sum()) if len(experts) else None,
        )
        samples = self._batch.global_batch_size
        self._record(context.task.loss.step_row(row, found.loss_sums, samples=samples))
        return found.stop_requests > 0

    def _accumulate_gradients(self) -> _StepResult | None:
        """Run all micro-batches of a step; ranks exchange gradients only in the last micro-batch.

        Return None if a rank requests a stop: a step of many micro-batches can take minutes, and a
        preempted machine may not have that time.
        """
        context, clock = self._context, self._clock
        stage = context.strategy.stage()
        if stage is not None:
            return self._run_pipeline(stage)
        total = torch.zeros((), dtype=torch.float64, device=context.world.device)
        is_to_stop: Callable[[], bool] | None = None
        train, step_samples = context.task.train, self._step_samples()
        # Divided by the data ranks, since gradients are averaged over them afterwards.
        step_weight = train.weight(step_samples) / context.strategy.mesh.data_ranks
        for micro_step in range(self._accumulation):
            with clock.of("data"):
                batch = train.batch(self.samples(micro_step))
                train.prefetch(self.samples(micro_step + 1))
            if context.model.draws_masks():
                self._seed_masks(micro_step)
            last = micro_step == self._accumulation - 1
            with clock.of("forward"):
                loss = context.trained(*context.model.sent(batch.inputs, context.world.send))
            if last:
                context.strategy.begin(batch.tokens)
            divisor = step_weight / batch.weight
            with clock.of("backward"):
                context.accelerator.backward(loss / divisor)
            total += loss.detach().double() / divisor
            # Read the result one micro-batch later, so that no rank waits between micro-batches.
            if not last:
                with clock.of("wait"):
                    stops = is_to_stop is not None and is_to_stop()
                if stops:
                    return None
                is_to_stop = self._poll_stop("step", micro_step + 1, self._accumulation)
        sync_time_s = self._finish_exchange()
        if is_to_stop is not None:
            is_to_stop()  # The step is complete; its results have the requests again.
        return _StepResult(
            loss=total,
            tokens=train.num_tokens(step_samples),
            sync_time_s=sync_time_s,
        )

    def _run_pipeline(self, stage: Stage) -> _StepResult:
        """Run all micro-batches of a step on one pipeline stage, in the schedule's order.

        Stop requests are read at the end of the step: stages work on different micro-batches.
        """
        context, clock = self._context, self._clock
        total = torch.zeros((), dtype=torch.float64, device=context.world.device)
        train, step_samples = context.task.train, self._step_samples()
        step_weight = train.weight(step_samples) / context.strategy.mesh.data_ranks

        def forward(micro_step: int) -> torch.Tensor:
            with clock.of("data"):
                batch = train.batch(self.samples(micro_step))
                train.prefetch(self.samples(micro_step + 1))
            if context.model.draws_masks():
                self._seed_masks(micro_step)
            self._report_step(micro_step)
            with clock.of("forward"):
                result: torch.Tensor = context.trained(*batch.inputs)
            if not stage.is_last():
                return result
            divisor = step_weight / batch.weight
            total.add_(result.detach().double() / divisor)
            return result / divisor

        def backward(result: torch.Tensor, gradient: torch.Tensor | None) -> None:
            with clock.of("backward"):
                torch.autograd.backward(result, gradient)

        schedule = context.config.distributed.pipeline_schedule
        passes = schedule_order(
            schedule, stage=stage.index, stages=stage.stages, passes=self._accumulation
        )
        run_schedule(stage, passes, forward=forward, backward=backward)
        return _StepResult(
            loss=total,
            tokens=train.num_tokens(step_samples),
            sync_time_s=self._finish_exchange(),
        )

    def _finish_exchange(self) -> float:
        """Set the mean gradients; return the seconds that this rank waited for other ranks."""
        before_s = self._clock.seconds("wait")
        with self._clock.of("wait"):
            sync_time_s = self._context.strategy.finish()
        # A sharded model also waits inside forward and backward; so far this was counted as
        # compute.
        self._clock.move_compute_to_wait(sync_time_s - (self._clock.seconds("wait") - before_s))
        return sync_time_s

    def _seed_masks(self, micro_step: int) -> None:
        """Seed dropout by the micro-batch's position in the run, so that a resume is exact.

        Each pipeline stage draws different masks; ranks that compute a layer together draw equal
        masks.
        """
        strategy = self._context.strategy
        stage = strategy.mesh.place(self._context.world.rank).pipeline
        passes = micro_step * strategy.mesh.data_ranks + strategy.data_rank
        first = self._next_sample + passes * self._batch.micro_batch()
        torch.manual_seed(
            (self._context.config.run.seed * 1_000_003 + first) ^ (stage << _STAGE_BIT)
        )

    def _require_finite(self, step: int, **found: float) -> None:
        if all(map(math.isfinite, found.values())):
            return
        values = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items())
        config = self._context.config
        raise TrainingError(
            f"step {step}: {values}. Training diverged or a "
            "number overflowed. Resume from the last checkpoint with a lower optimizer.lr (now "
            f'{config.optimizer.lr}), a longer warm-up, or precision.dtype = "fp32".'
        )

    def _mfu(self, tokens_per_s: float) -> float | None:
        """Return the MFU. Returns None above 1, because the calibration was then disturbed."""
        context = self._context
        share = mfu(
            tokens_per_s=tokens_per_s,
            flops_per_token=context.model.trained_spec().flops_per_token(),
            peak_flops_per_s=context.calibration.peak_flops_per_s,
        )
        return share if share <= 1 else None

    def _record(self, row: StepMetrics) -> None:
        train = self._context.config.train
        if self._context.metrics is None:
            return
        self._context.metrics.append(row)
        if row.mfu is None and not self._mfu_missed:
            self._mfu_missed = True
            log.warning(_NO_MFU)
        if row.step == 1 or row.step == train.steps or _due(row.step, train.log_every):
            share = "" if row.mfu is None else f"  MFU {row.mfu:.1%}"
            # The most important fields come first: a narrow terminal leaves out the last ones.
            log.info(
                f"step {row.step:>{len(str(train.steps))}}/{train.steps}  loss {row.loss:.4f}"
                f"{row.describe()}  {row.tokens_per_s:,.0f} tokens/s  lr {row.lr:.2e}{share}  "
                f"grad norm {row.grad_norm:.2f}"
            )

    def _evaluate(self) -> bool:
        """Evaluate and record the result. Return True if a rank requested a stop before the end."""
        context = self._context
        context.heartbeat.report(step=self._step, phase="eval")
        with without_compilation(context.config.engine):
            row = context.task.evaluate(
                context.model, self._eval_pass(context.config.train.eval_tokens)
            )
        if row is None:
            return True
        self._require_finite(self._step, validation_loss=row.val_loss)
        if context.metrics is not None:
            context.metrics.append(row)
            self._saving.evaluated(row.step, val_loss=row.val_loss)
            log.info(f"step {row.step}: {row.describe()}")
        return False

    def _eval_pass(self, max_tokens: int | None) -> EvalPass:
        context = self._context
        return EvalPass(
            world=context.world,
            step=self._step,
            micro_batch_size=self._batch.micro_batch(),
            max_tokens=max_tokens,
            autocast=context.accelerator.autocast,
            without_gradients=lambda: context.strategy.without_gradients(context.model),
            computes_together=context.strategy.computes_together(),
            share=(context.strategy.data_rank, context.strategy.mesh.data_ranks),
            has_results=context.strategy.has_results(),
            should_stop=lambda done, of: self._poll_stop("eval", done, of)(),
        )

    def _report_step(self, done: int) -> None:
        self._context.heartbeat.report(
            step=self._step, phase="step", micro_step=done, of=self._accumulation
        )

    def _poll_stop(self, phase: str, done: int, of: int) -> Callable[[], bool]:
        """Write a heartbeat between micro-batches; return a function that checks for a stop."""
        context = self._context
        context.heartbeat.report(step=self._step, phase=phase, micro_step=done, of=of)
        # On the host, also with GPUs: the ranks' hosts agree without waiting for their devices.
        request = torch.tensor(float(context.stop_requested()))
        requests = context.world.begin_sum(request)
        return lambda: bool(requests() > 0)

    def _check_sync(self) -> None:
        self._context.heartbeat.report(step=self._step, phase="sync check")
        passed_step = self._checked_step if self._checked_step >= 0 else None
        context = self._context
        context.strategy.check(context.optimizers, step=self._step, passed_step=passed_step)
        self._checked_step = self._step

    def _checkpoint(self) -> None:
        """Begin to write a checkpoint if the state has changed since the last checkpoint."""
        if not self._step or self._saved_step == self._step:
            return
        context, self._saved_step = self._context, self._step
        context.heartbeat.report(step=self._step, phase="checkpoint")
        with self._clock.of("checkpoint"):
            snapshot = context.strategy.snapshot(context.model, context.optimizers)
        if not context.world.is_main:
            if snapshot.is_shared():
                self._saving.send(snapshot)
            return
        if context.metrics is not None:
            context.metrics.require_written()
        meta = context.task.meta
        self._saving.begin(
            context.paths.checkpoint(self._step),
            model=context.model,
            snapshot=snapshot,
            state=TrainerState(
                step=self._step,
                next_sample=self._next_sample,
                tokens=self._tokens,
                seed=context.config.run.seed,
                dtype=context.calibration.dtype,
                train_sha256=meta.files[TRAIN_NAME].sha256,
                data_sha256=meta.hashes(),
                wall_s=self.wall_s(),
                world_size=context.world.world_size,
                tokenizer={"name": meta.tokenizer, "sha256": meta.tokenizer_sha256},
                base=context.base,
                identity=context.identity,
                router_loss=context.model.has_router_loss(),
                config_toml=context.config.to_toml(),
                versions=versions(),
            ),
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
