"""Builds the commands on the report page that repeat a run."""

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
"""Sources of `prepare` that need no further options."""
_HUB = ("hf", "openwebtext")
_FILES = ("text", "jsonl", "parquet", "csv")
_OPENWEBTEXT = "Skylion007/openwebtext"


def commands(run: Run) -> Sequence[str]:
    """Return shell lines that repeat the run, resume it and show it."""
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
    """Return shell lines that prepare the data again, or a comment if meta.json lacks details.

    meta.json describes the source in text for readers, and might list only some of several inputs.
    Data in a bucket needs no command: the run downloads it.
    """
    if is_bucket_address(out):
        return [_comment(f"The run downloads its data from {out} by itself.")]
    kind, _, location = meta.source.partition(": ")
    source = _source_options(kind, location, revision=meta.revision)
    if source is None:
        return [_comment(f"Repeat the command that made {out} of {meta.source}.")]
    options = [*source, *_task_options(meta), "--tokenizer", meta.tokenizer]
    lines = [command("data", "prepare", *options, "--out", out)]
    if kind not in _NAMED or meta.task != "text":
        lines.append(
            "# If this data folder was made with other options (columns, labels, a chat template, "
            "a limit), repeat that command: meta.json does not record these options."
        )
    return lines


def _comment(text: str) -> str:
    return "# " + printable_line(text)


def _source_options(kind: str, location: str, *, revision: str | None) -> list[str] | None:
    """Return the source options of `prepare`; None if meta.json does not list all inputs."""
    options = ["--source", kind]
    if kind == "stdlib":
        return options
    if kind in _HUB:
        name, _, split = location.rpartition(", split ")
        name = name.removeprefix(f"{FOLDER_WORD} ")
        if not name:
            return None
        if kind == "hf" or name != _OPENWEBTEXT:
            options += ["--input", name]
        if kind == "hf" and revision is not None:
            options += ["--revision", revision]
        return options if split == "train" else [*options, "--split", split]
    if kind not in _FILES or not location or ", " in location:
        return None
    return [*options, "--input", location]


def _task_options(meta: DataMeta) -> list[str]:
    """Return the task options of `prepare` that meta.json records."""
    options = [] if meta.task == "text" else ["--task", meta.task]
    record = meta.chat or meta.preference
    if record is not None:
        options += ["--sequence-length", str(record.sequence_length)]
    if meta.chat is not None and meta.chat.packing == "none":
        options += ["--packing", "none"]
    return options


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
