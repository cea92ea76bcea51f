"""A temporary git worktree with the files of another commit."""

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
        raise SystemExit(f"error: --against {commit}: not a commit. Name one from `git log`.")
    return found.stdout.strip()


@contextmanager
def worktree(commit: str, *, repo: Path) -> Iterator[Path]:
    """Yield a folder with the files of `commit`, which is always removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "code"
        try:
            added = _git(repo, "worktree", "add", "--detach", str(code), commit)
            if added.returncode:
                raise SystemExit(f"error: git worktree add {commit}: {added.stderr.strip()}")
            yield code
        finally:
            # --force: the folder also has compiled modules.
            _git(repo, "worktree", "remove", "--force", str(code))


def _git(repo: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(repo), *words], capture_output=True, text=True, check=False
    )
