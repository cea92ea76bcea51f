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
    folder = runs_dir_option(paths.root.absolute().parent)
    return command("orchestrate", *verb.split(), paths.run_id, *arguments, *folder)


def no_runs(runs_dir: Path) -> str:
    """Return the sentences that a command prints if it needs a run and the folder is empty."""
    return f"no runs in {runs_dir} yet. Start one with: {command('orchestrate', 'run')}"


def runs_dir_option(runs_dir: Path) -> list[str]:
    """Return `--runs-dir` with its value; empty for the default folder."""
    default = Path(DEFAULT_RUNS_DIR)
    if not default.is_symlink() and runs_dir.resolve() == default.resolve():
        return []
    within = runs_dir.is_relative_to(Path.cwd())
    return ["--runs-dir", str(runs_dir.relative_to(Path.cwd()) if within else runs_dir)]
