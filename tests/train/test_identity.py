"""A rank creates the run's identity, and loads no checkpoint of another run."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from payload.core.errors import CheckpointError
from payload.core.file_hash import sha256_of
from payload.run_record.run_files import RunPaths
from payload.run_record.run_identity import checkpoint_identity, known_identity
from tests.train.alone import train_alone

pytestmark = pytest.mark.usefixtures("one_thread")


def forget(paths: RunPaths) -> None:
    """Remove the files that older versions of a run lack."""
    paths.identity.unlink()
    for trainer in paths.checkpoints.glob("step_*/trainer.json"):
        state = json.loads(trainer.read_text(encoding="utf-8"))
        del state["identity"]
        trainer.write_text(json.dumps(state), encoding="utf-8")
        manifest = trainer.with_name("manifest.json")
        files = json.loads(manifest.read_text(encoding="utf-8"))
        entry = {"bytes": trainer.stat().st_size, "sha256": sha256_of(trainer)}
        files["files"]["trainer.json"] = entry
        manifest.write_text(json.dumps(files), encoding="utf-8")


def test_a_run_has_one_identity_and_refuses_another_run_s_checkpoint(
    tmp_path: Path, tiny_config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The attack: the run's folder has a checkpoint of another run with the same name."""
    mine, theirs = RunPaths(tmp_path / "mine" / "exp1"), RunPaths(tmp_path / "theirs" / "exp1")
    with caplog.at_level(logging.WARNING):
        for paths, steps in ((mine, 1), (theirs, 2)):
            train_alone(paths.root, tiny_config, f"train.steps={steps}")
            assert checkpoint_identity(paths.checkpoint(steps)) == known_identity(paths).identity
    assert "identity" not in caplog.text
    own, other = known_identity(mine).identity, known_identity(theirs).identity
    assert own is not None and other is not None and own != other
    shutil.copytree(theirs.checkpoint(2), mine.checkpoint(2))
    with pytest.raises(CheckpointError, match=f"{other}.*{own}.*two runs with the same name"):
        train_alone(mine.root, tiny_config, "train.steps=3")
    shutil.rmtree(mine.checkpoint(2))
    train_alone(mine.root, tiny_config, "train.steps=3")
    assert known_identity(mine).identity == own == checkpoint_identity(mine.checkpoint(3))


def test_an_older_run_gets_its_identity_at_its_first_resume_with_a_warning(
    tmp_path: Path, tiny_config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = RunPaths(tmp_path / "exp1")
    train_alone(paths.root, tiny_config, "train.steps=1")
    forget(paths)
    assert known_identity(paths).identity is None
    with caplog.at_level(logging.WARNING):
        train_alone(paths.root, tiny_config, "train.steps=2")
    own = known_identity(paths)
    assert own.is_older and checkpoint_identity(paths.checkpoint(2)) == own.identity is not None
    assert (
        f"run exp1 is from an older version and had no identity. Its identity is now {own.identity}"
        in (caplog.text)
    )
    caplog.clear()
    train_alone(paths.root, tiny_config, "train.steps=3")
    assert known_identity(paths) == own and "identity" not in caplog.text
    # A folder with only the checkpoints is still that run.
    paths.identity.unlink()
    train_alone(paths.root, tiny_config, "train.steps=4")
    assert known_identity(paths).identity == own.identity
