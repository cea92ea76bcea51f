"""The outcome of a run, in a sentence or two, with every number from its file."""

from __future__ import annotations

from collections.abc import Iterator

from payload.core.durations import in_words
from payload.report.markup import Html, count, figure, join, loss
from payload.report.source import Run

_FLAT = 0.0005
"""Below this share, a change of the loss is none."""


def verdict(run: Run) -> Html:
    """Return how the run ended, what it did to the loss, and what is to be known besides."""
    return join(_parts(run))


def _parts(run: Run) -> Iterator[str]:
    yield from _ending(run)
    yield from _effect(run)
    for key, words in (
        ("restarts", " After a failure it was started again "),
        ("resumes", " It was resumed "),
    ):
        times = run.summary.get(key)
        if times:
            yield words
            yield figure(times, count, f"summary.json#{key}", run=run.run_id)
            yield " time." if times == 1 else " times."
    if run.status == "finished":
        if run.summary.get("ranks_identical") and run.summary.get("world_size", 1) > 1:
            yield " All ranks ended with identical weights."
    elif run.status in ("failed", "stopped") and run.has_checkpoint():
        yield " It can be continued from its last checkpoint."
    missing = run.summary.get("missing_metrics")
    if missing:
        yield " Rows of some steps are lost; the curves have gaps."


def _ending(run: Run) -> Iterator[str]:
    steps = run.summary.get("steps", run.steps[-1]["step"] if run.steps else 0)
    source = "summary.json#steps" if run.summary else "metrics.jsonl#last.step"
    of = run.config.train.steps
    done = figure(steps, count, source, run=run.run_id)
    planned = figure(of, count, "run.toml#train.steps", run=run.run_id)
    match run.status:
        case "finished":
            yield "Finished "
            yield done
            yield " steps"
            if run.summary.get("wall_s"):
                yield " in "
                yield figure(run.summary["wall_s"], in_words, "summary.json#wall_s", run=run.run_id)
            yield "."
            return
        case "stopped":
            yield "Stopped after "
        case "failed":
            yield "Failed after "
        case "running" | "starting":
            yield "Still running when this page was written: "
        case _:
            yield "How it ended is not known: "
    yield done
    yield " of "
    yield planned
    yield " steps"
    yield f": {run.error.rstrip('.')}." if run.error else "."


def _effect(run: Run) -> Iterator[str]:
    """Say what the run did to the validation loss; without two of them, to the training loss."""
    if len(run.evaluations) >= 2:
        name, key, rows = "validation loss", "val_loss", run.evaluations
        kind = "evaluations"
    elif len(run.steps) >= 2:
        name, key, rows, kind = "training loss", "loss", run.steps, "steps"
    else:
        return
    first, last = rows[0][key], rows[-1][key]
    if abs(last - first) <= _FLAT * abs(first):
        word = "stayed at"
    else:
        word = "fell from" if last < first else "rose from"
    yield f" The {name} {word} "
    yield figure(first, loss, f"metrics.jsonl#{kind}.first.{key}", run=run.run_id)
    yield " to "
    yield figure(last, loss, f"metrics.jsonl#{kind}.last.{key}", run=run.run_id)
    if run.summary.get("tokens"):
        yield " over "
        yield figure(run.summary["tokens"], count, "summary.json#tokens", run=run.run_id)
        yield " tokens"
    yield "."
