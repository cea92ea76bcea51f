"""Last output of a finished run: samples before and after the run, and the next commands."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from payload.config.run_config import RunConfig
from payload.core.files import size_of
from payload.core.one_line import printable_line
from payload.core.suggested_commands import chat_command, command
from payload.run_record.run_files import DEFAULT_RUNS_DIR, RunPaths
from payload.run_record.run_samples import Sample
from payload.run_record.suggested_run_commands import run_command

_SHOWN_CHARS = 400
_SHOWN_BYTES = 10**8
"""Size of a run's folder, in bytes, from which the size is printed."""


def sample_lines(samples: Sequence[Sample], *, width: int) -> list[str]:
    """Return the prompts with the model's texts before and after the run."""
    lines = []
    for number, sample in enumerate(samples, 1):
        # The end of a prompt has the question; a chat template begins with other text.
        prompt = printable_line(sample.prompt)
        rows = [
            (
                f"prompt {number}",
                f"...{prompt[-_SHOWN_CHARS:]}" if len(prompt) > _SHOWN_CHARS else prompt,
            ),
            ("before", sample.before),
            ("after", sample.after),
        ]
        for name, text in rows:
            if text is not None:
                lines += textwrap.wrap(
                    f"{name:<9} {printable_line(text)[: _SHOWN_CHARS + 3] or '(no text)'}",
                    width=width,
                    subsequent_indent=" " * 10,
                )
    return lines


def next_lines(paths: RunPaths, config: RunConfig) -> list[str]:
    """Return the commands that use, measure and share the run's model."""
    model, task = model_name(paths), config.task.data()
    use = [command("generate", model, "--prompt", "TEXT")]
    if task == "classify":
        use = [command("generate", model, "--classify", "--input", "FILE")]
    elif task in ("chat", "preference"):
        use = [chat_command(model)]
    share = ["--format", "gguf", *(["--merge"] if config.adapter.is_on() else [])]
    if task == "classify":
        share[:2] = ["--format", "hf"]
    commands = [
        *use,
        command("evaluate", "--model", model, "--data", str(config.data.folder())),
        command("export", "--model", model, *share),
    ]
    return ["next:", *(f"  {each}" for each in commands), *_disk_lines(paths)]


def _disk_lines(paths: RunPaths) -> list[str]:
    """Return the size of a run's folder, and the command that frees the space; an empty list for a
    small folder."""
    size_bytes = size_of(paths.root)
    if size_bytes < _SHOWN_BYTES:
        return []
    return [
        f"disk: the run has {size_bytes / 1e9:,.2f} GB. To delete the run, after an export:",
        f"  {run_command('remove', paths, '--now')}",
    ]


def model_name(paths: RunPaths) -> str:
    """Return the model's name in commands: the run's id, or its path outside the default folder."""
    default = Path(DEFAULT_RUNS_DIR)
    is_default = not default.is_symlink() and paths.root.parent.resolve() == default.resolve()
    return paths.run_id if is_default else str(paths.root)
