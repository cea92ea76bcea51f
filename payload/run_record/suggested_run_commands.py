"""Builds the commands for a run that messages suggest."""

from __future__ import annotations

from pathlib import Path

from payload.core.suggested_commands import command
from payload.run_record.run_files import DEFAULT_RUNS_DIR, RunPaths


def run_command(verb: str, paths: RunPaths, *arguments: str) -> str:
    """Return the orchestrate command that applies `verb` to this run.

    The run id follows `verb`, as in `status RUN` or `run --resume RUN`. `--runs-dir` is added if
    the run is not in the default folder.
    """
    argv = [*verb.split(), paths.run_id, *arguments]
    runs_dir = paths.root.absolute().parent
    default = Path(DEFAULT_RUNS_DIR)
    if default.is_symlink() or runs_dir.resolve() != default.resolve():
        within = runs_dir.is_relative_to(Path.cwd())
        argv += ["--runs-dir", str(runs_dir.relative_to(Path.cwd()) if within else runs_dir)]
    return command("orchestrate", *argv)
