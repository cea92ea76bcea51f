"""The files of another commit, for as long as they are needed."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def resolve(commit: str, *, repo: Path) -> str:
    """Return the full hash of a commit, branch or tag. Raises SystemExit for an unknown one."""
    found = _git(repo, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if found.returncode:
        raise SystemExit(f"error: --against {commit}: no such commit. Name one that `git log` has.")
    return found.stdout.strip()


@contextmanager
def worktree(commit: str, *, repo: Path) -> Iterator[Path]:
    """Yield a folder with the files of `commit`, and remove it at the end, whatever the end is."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "code"
        try:
            added = _git(repo, "worktree", "add", "--detach", str(place), commit)
            if added.returncode:
                raise SystemExit(f"error: git worktree add {commit}: {added.stderr.strip()}")
            yield place
        finally:
            # --force: its compiled modules are not in the commit.
            _git(repo, "worktree", "remove", "--force", str(place))


def _git(repo: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(repo), *words], capture_output=True, text=True, check=False
    )
