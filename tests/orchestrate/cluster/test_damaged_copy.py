"""`collect` with a damaged local copy of a run, and an intact one on the head."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.formats.checkpoint_listing import manifest_problems
from payload.run_record.run_files import RunPaths
from tests.orchestrate.cluster.conftest import STEPS, Trained
from tests.orchestrate.cluster.operating import Operator
from tests.orchestrate.damage import WAYS, damage_file
from tests.orchestrate.run_copies import exit_text, progress_text, state_text, summary_text
from tests.support.sampled import sampled

pytestmark = [pytest.mark.sshd, pytest.mark.ranks]

CHECKPOINT = f"checkpoints/step_{STEPS:08d}"
RECORDS = (
    *("state.json", "summary.json", "progress/rank_0000.json", "progress/rank_0001.json"),
    *("exits/rank_0000.json", "exits/rank_0001.json"),
)
GROWING = (
    *("metrics.jsonl", "logs/rank_0000.log", "logs/rank_0001.log"),
    *("logs/launcher.log", "logs/supervisor.log"),
)
FILES = (
    *RECORDS,
    *GROWING,
    *("run.toml", "hosts", "accelerate_node_0.yaml", "accelerate_node_1.yaml"),
    *(f"{CHECKPOINT}/{name}" for name in ("model.safetensors", "manifest.json", "trainer.json")),
)
IN_THE_WAY = ("a folder in its place", "a symlink")


def another_runs(folder: Path, far: RunPaths) -> Path:
    """The same files of another run."""
    shutil.copytree(far.root, folder, symlinks=True)
    other = RunPaths(folder)
    other.state.write_text(state_text("other"))
    other.summary.write_text(summary_text("other"))
    for rank in range(2):
        other.rank_progress(rank).write_text(progress_text(rank, node="elsewhere"))
        other.rank_exit(rank).parent.mkdir(exist_ok=True)
        other.rank_exit(rank).write_text(exit_text(rank, node="elsewhere"))
        other.rank_log(rank).write_text("another run's\n" * 999)
    other.metrics.write_text(other.metrics.read_text().replace("loss", "lass"))
    return folder


def older(folder: Path, far: RunPaths) -> Path:
    """The same files from the middle of the run."""
    shutil.copytree(far.root, folder, symlinks=True)
    for name in GROWING:
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[: len(lines) // 2]))
    (folder / "state.json").write_text(state_text("far"))
    return folder


@pytest.mark.parametrize("way", sampled(WAYS, sample=("missing", "truncated", "another run's")))
def test_a_valid_checkpoint_is_fetched_to_a_copy_whose_other_files_are_damaged(
    trained: Trained, tmp_path: Path, way: str
) -> None:
    far = trained.operator.paths("far")
    operator = Operator(tmp_path, trained.operator.nodes)
    here = operator.paths("far")
    shutil.copytree(far.root, here.root, symlinks=True)
    make = older if way == "an older copy" else another_runs
    source, outside = make(tmp_path / "source", far), tmp_path / "outside"
    for name in FILES:
        damage_file(here.root / name, way=way, source=source / name, outside=outside)
    code, said = operator.do("collect", "far")
    assert not manifest_problems(here.root / CHECKPOINT), said
    assert f"checkpoint: {here.root / CHECKPOINT}" in said
    assert outside.read_text() == "not the run's"
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if way in IN_THE_WAY:
        assert code == ExitCode.CONFIG and len(errors) == 1, said
        return
    assert code == ExitCode.OK and not errors, said
    # Of a file that grows, only the end is compared with the head's file.
    mended = RECORDS if way == "a bit flipped" else (*RECORDS, *GROWING)
    for name in mended:
        there = trained.on_head(name)
        if there.exists():
            assert (here.root / name).read_bytes() == there.read_bytes(), name
    code, said = operator.do("status", "far")
    assert code == ExitCode.OK and "finished" in said, said
