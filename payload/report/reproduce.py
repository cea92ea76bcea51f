"""The page's section with the commands that make a run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from payload.config.store_address import is_bucket_address
from payload.core.one_line import printable_line
from payload.core.suggested_commands import command, quoted
from payload.formats.data_folder import FOLDER_WORD, DataMeta
from payload.report.source import Run
from payload.run_record.suggested_run_commands import run_command

_NAMED = ("stdlib", "openwebtext")
"""Sources of `prepare` whose name is all that it needs."""
_HUB = ("hf", "openwebtext")
_FILES = ("text", "jsonl", "parquet", "csv")
_OPENWEBTEXT = "Skylion007/openwebtext"


def commands(run: Run) -> Sequence[str]:
    """Return the lines of a shell that repeat the run, resume it and show it."""
    lines = []
    if run.plan is not None:
        lines.append(f"cd {quoted(run.plan.work_dir)}")
    if run.data is not None:
        lines += prepare_lines(run.data, out=run.config.data.dir)
    lines.append(command("orchestrate", "run", "--config", _short(run.paths.config)))
    lines.append("")
    lines.append("# Read its logs, show its report, or resume it:")
    if run.status in ("stopped", "failed"):
        lines.append(run_command("run --resume", run.paths))
    lines.append(run_command("logs", run.paths, "--rank", "0"))
    lines.append(command("report", _short(run.paths.root), "--open"))
    return lines


def prepare_lines(meta: DataMeta, *, out: str) -> Sequence[str]:
    """Return the lines of a shell that prepare the data again, as far as its meta.json tells how.

    meta.json has the source as people read it: of several inputs it may not have all. A run brings
    data that is in a bucket by itself.
    """
    if is_bucket_address(out):
        return [_comment(f"The run brings its data from {out} by itself.")]
    kind, _, place = meta.source.partition(": ")
    source = _source_words(kind, place, revision=meta.revision)
    if source is None:
        return [_comment(f"Repeat the command that made {out} of {meta.source}.")]
    words = [*source, *_task_words(meta), "--tokenizer", meta.tokenizer]
    lines = [command("data", "prepare", *words, "--out", out)]
    if kind not in _NAMED or meta.task != "text":
        lines.append(
            "# If it was made with other options (columns, labels, a chat template, a limit), "
            "repeat that command: meta.json does not have them."
        )
    return lines


def _comment(words: str) -> str:
    return "# " + printable_line(words)


def _source_words(kind: str, place: str, *, revision: str | None) -> list[str] | None:
    """Return the source's flags; None where its description does not tell all inputs."""
    words = ["--source", kind]
    if kind == "stdlib":
        return words
    if kind in _HUB:
        given, _, split = place.rpartition(", split ")
        given = given.removeprefix(f"{FOLDER_WORD} ")
        if not given:
            return None
        if kind == "hf" or given != _OPENWEBTEXT:
            words += ["--input", given]
        if kind == "hf" and revision is not None:
            words += ["--revision", revision]
        return words if split == "train" else [*words, "--split", split]
    if kind not in _FILES or not place or ", " in place:
        return None
    return [*words, "--input", place]


def _task_words(meta: DataMeta) -> list[str]:
    """Return the flags of the data's task that meta.json has."""
    words = [] if meta.task == "text" else ["--task", meta.task]
    record = meta.chat or meta.preference
    if record is not None:
        words += ["--sequence-length", str(record.sequence_length)]
    if meta.chat is not None and meta.chat.packing == "none":
        words += ["--packing", "none"]
    return words


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
