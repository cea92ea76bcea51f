"""The current code lists and resumes a run from a store of 9e71e47."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.formats.commands import Commands
from tests.formats.recorded import Recorded, read_json
from tests.formats.test_fixtures import require_continued
from tests.storage.server import BUCKET, GcsServer
from tests.support.formats import assert_keys, tensors_in

pytestmark = pytest.mark.processes


def test_a_store_lists_its_runs_and_their_checkpoints(
    commands: Commands, recorded: Recorded
) -> None:
    assert commands.do("storage", "list", recorded.store, folder=recorded.root).out == "kept\n"
    found = commands.do("storage", "list", recorded.store / "kept", folder=recorded.root).out
    assert [line.split()[0] for line in found.splitlines()] == ["step_00000004", "step_00000008"]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_resumed_from_the_store_alone_has_the_recorded_losses(
    commands: Commands, recorded: Recorded
) -> None:
    shutil.rmtree(recorded.run_dir("kept"))
    token = read_json(recorded.store / "kept" / "owner.json")["token"]
    words = ("run", "--resume", recorded.store / "kept", "--inventory", "local")
    more = ("--set", "train.steps=12", "--set", "data.dir=data/text")
    commands.do(*words, *more, folder=recorded.project)
    require_continued(recorded.run_dir("kept"), "kept")
    optimizer = recorded.stored_checkpoint("kept") / "optimizer.safetensors"
    tensors = tensors_in(optimizer)
    assert_keys("optimizer.muon.gpt2", tensors, version=1, refuses_unknown_keys=True)
    # The resumed run owns the store and has uploaded its new checkpoint.
    assert read_json(recorded.store / "kept" / "owner.json")["token"] != token
    found = commands.do("storage", "list", recorded.store / "kept", folder=recorded.root).out
    assert found.splitlines()[-1].startswith("step_00000012")


def test_the_same_objects_in_a_bucket_are_listed_and_restored(
    commands: Commands, recorded: Recorded
) -> None:
    run_dir = recorded.run_dir("kept")
    config = run_dir / "run.toml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("/srv/ada/results", f"gs://{BUCKET}/results"), "utf-8")
    with GcsServer() as server:
        env = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.port}"}
        for path in sorted(path for path in recorded.store.rglob("*") if path.is_file()):
            name = quote(f"results/{path.relative_to(recorded.store)}", safe="")
            where = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}"
            status, _ = server.request("POST", where, path.read_bytes())
            assert status == 200, path
        listed = commands.do(
            *("storage", "list", f"gs://{BUCKET}/results/kept"), folder=recorded.root, env=env
        )
        names = [line.split()[0] for line in listed.out.splitlines()]
        assert names == ["step_00000004", "step_00000008"]
        words = ("storage", "restore", "--run-dir", run_dir)
        assert (
            "set only in the run's own files"
            in commands.run(*words, folder=recorded.root, env=env).err
        )
        named = ("--set", f"storage.results=gs://{BUCKET}/results")
        commands.do(*words, *named, folder=recorded.root, env=env)
    restored = run_dir / "checkpoints" / "step_00000008"
    stored = recorded.store / "kept" / "checkpoints" / "step_00000008"
    assert same_files(restored, stored)


def same_files(first: Path, second: Path) -> bool:
    """Return True if two folders have the same content."""
    done = subprocess.run(["diff", "-r", str(first), str(second)], check=False)
    return done.returncode == 0
