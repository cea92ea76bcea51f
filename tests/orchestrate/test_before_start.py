"""Checks of `run` and `plan` before the start, and the leftovers of a failed run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from payload.config.run_config import RunConfig, load_run_config, parse_run_config
from payload.core.errors import ConfigError, ExitCode, UsageError
from payload.core.file_hash import sha256_of
from payload.estimates import disk_room
from payload.estimates.network import Link
from payload.estimates.run_estimate import estimate_run
from payload.formats.data_folder import load_meta
from payload.models.gpt2.spec import Gpt2Spec
from payload.orchestrate.__main__ import main
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.run_input_checks import settle_initial
from payload.run_record.run_files import RunPaths
from tests.orchestrate.test_commands import ENDLESS, Workplace
from tests.supervise.planned import plan_stand_in, wait_for, wait_for_steps, wait_until_gone
from tests.support.run_folders import make_run
from tests.support.waiting import DEADLINE_S

GPT2_CONFIG = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "n_positions": 64,
    "vocab_size": 50257,
}


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


def make_checkpoint(folder: Path) -> Path:
    """A checkpoint with valid files and without weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(GPT2_CONFIG))
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json"):
        (folder / name).write_bytes(b"weights")
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in folder.iterdir()
    }
    (folder / "manifest.json").write_text(json.dumps({"files": files, "schema_version": 1}))
    return folder


def latest_run(workplace: Workplace, run_id: str) -> RunPaths:
    """Make the latest run, with two valid checkpoints."""
    paths = make_run(workplace.runs / run_id)
    for step in (5, 10):
        make_checkpoint(paths.checkpoint(step))
    (workplace.runs / "latest").symlink_to(run_id)
    return paths


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "words", [["run", "--resume", "one"], ["remove", "one", "--force", "--yes"]]
)
def test_a_run_that_is_being_started_is_not_started_or_removed_by_another_command(
    workplace: Workplace, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = latest_run(workplace, "one")
    os.utime(paths.root, times=(1.0, 1.0))
    words = [*words, "--runs-dir", str(workplace.runs)]
    if words[0] == "run":
        words += ["--inventory", "local", *workplace.settings()]
    seen: list[int] = []

    class StartsOther(LocalAccess):
        """This machine; another command runs just before the supervisor starts."""

        def start_supervisor(self, paths: RunPaths, *, detached: bool, grace_s: float) -> NoReturn:
            os.utime(paths.root, times=(1.0, 1.0))
            before = files_below(paths.root)
            seen.append(main(words, os.environ))
            assert files_below(paths.root) == before
            raise UsageError("started")

    mine = ["run", "--resume", "one", "--detach", "--inventory", "local", *workplace.settings()]
    mine += ["--runs-dir", str(workplace.runs)]
    assert main(mine, os.environ, access=StartsOther(os.environ)) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert seen == [ExitCode.USAGE]
    assert "another command is starting, ending or removing run one" in said
    assert said.splitlines()[-1] == "error: started"


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_links_that_lead_to_each_other_are_no_runs_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for words in (["list"], ["status"], ["run", "--resume", "x"], ["remove", "--keep", "1"]):
        assert main([*words, "--runs-dir", str(tmp_path / "a")], os.environ) == ExitCode.USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("the symbolic links in this path form a loop. Choose another folder.")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "below", ["", pytest.param("/checkpoints/step_00000010", marks=pytest.mark.slow)]
)
def test_a_run_starts_from_the_latest_run_and_records_the_very_checkpoint(
    workplace: Workplace, below: str
) -> None:
    before = latest_run(workplace, "before")
    init = f"model.init={workplace.runs}/latest{below}"
    status, _, err = workplace.call("run", "--run-id", "after", "--set", init)
    assert status == 0, err
    config = load_run_config(workplace.run_paths("after").config)
    assert config.model.init == str(before.checkpoint(10))
    assert (workplace.runs / "latest").readlink() == Path("after")


def settings(*extra: str) -> RunConfig:
    sets = ["model.preset=tiny", "data.sequence_length=16", *extra]
    return parse_run_config("", overrides=sets, where="test")


@pytest.mark.processes
def test_a_damaged_checkpoint_of_the_initial_run_is_passed_over_and_named(
    workplace: Workplace,
) -> None:
    run = latest_run(workplace, "before")
    (run.checkpoint(10) / "model.safetensors").write_bytes(b"Weights")
    said: list[str] = []
    data = f"data.dir={workplace.data}"
    config = settings(f"model.init={run.root}", data)
    meta = load_meta(workplace.data)
    # The caller has read it, and no second read may find other data.
    (workplace.data / "meta.json").unlink()
    settled = settle_initial(config, meta=meta, say=said.append, download=False)
    assert settled.model.init == str(run.checkpoint(5))
    assert len(said) == 1 and "step_00000010 is skipped: model.safetensors: its" in said[0]
    with pytest.raises(ConfigError, match="the checkpoint is damaged: model"):
        settle_initial(
            settings(f"model.init={run.checkpoint(10)}", data),
            meta=meta,
            say=said.append,
            download=False,
        )


@pytest.mark.processes
def test_a_run_that_fails_before_its_first_step_does_not_become_the_latest(
    workplace: Workplace,
) -> None:
    latest_run(workplace, "before")
    run = workplace.start(("--loads",), "run", "--run-id", "never")
    paths = workplace.run_paths("never")
    wait_for(lambda: paths.rank_progress(0).exists(), "the ranks to load")
    assert (workplace.runs / "latest").readlink() == Path("before")
    run.terminate()
    run.communicate(timeout=DEADLINE_S)
    assert (workplace.runs / "latest").readlink() == Path("before")
    wait_until_gone(paths)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.init=gtp2", "Did you mean gpt2?"),
        ("model.init=payload/lates", "the folder does not exist"),
        ("model.init=./gpt2", "the folder does not exist"),
        ("model.init=README.md", "this is a file"),
        ("model.init=a b", "the folder does not exist"),
        ("model.init={before}/nothing", "the folder does not exist"),
        ("engine.kind=ipex", " needs intel-extension-for-pytorch"),
        ("distributed.backend=ccl", " needs oneccl_bind_pt"),
        ("distributed.backend=nccl", "has no CUDA device"),
        ("device.kind=cuda", "has no CUDA device"),
        ("distributed.strategy=zero3", " needs deepspeed"),
        ("model.init={before}", "above the 64 positions"),
        ("train.keep_checkpoints=1000000000", "GB free, but"),
    ],
)
def test_errors_that_are_detectable_before_the_start_start_nothing(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, setting: str, message: str
) -> None:
    # Nothing listens on this port: the hub is unreachable immediately. Its client may be imported.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    before = latest_run(workplace, "before")
    if "positions" in message:
        config = GPT2_CONFIG | {"n_positions": 8}
        for path in (before.checkpoint(5), before.checkpoint(10)):
            shutil.rmtree(path)
        (make_checkpoint(before.checkpoint(10)) / "manifest.json").unlink()
        (before.checkpoint(10) / "config.json").write_text(json.dumps(config))
        setting, message = f"model.init={before.checkpoint(10)}", "above the 8 positions"
    words = ["--run-id", "one", "--set", setting.format(before=before.root)]
    status, _, err = workplace.call("run", *words)
    assert status == ExitCode.CONFIG, err
    assert err.count("error: ") == 1 and message in err.splitlines()[-1]
    assert not workplace.run_paths("one").root.exists()
    assert (workplace.runs / "latest").readlink() == Path("before")
    status, _, err = workplace.call("plan", *words)
    # A local model without sizes cannot be planned; a missing model cannot be fetched.
    refused = any(each in message for each in ("this is a file", " needs ", "has no CUDA device"))
    assert status == (ExitCode.CONFIG if refused else 0)
    mark = "error: " if refused else "note: a run would fail: "
    assert mark in err and message in err


def test_a_full_disk_is_found_before_the_start(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Gpt2Spec(n_layer=4, n_head=4, n_embd=128)
    config = settings("train.keep_checkpoints=2")
    needed = shape.num_params() * 12 * 4
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: needed - 1)
    with pytest.raises(ConfigError, match=r"4 more checkpoint\(s\) .*hold 4 checkpoints"):
        disk_room.require_room(
            workplace.runs / "x", checkpoint_bytes=shape.checkpoint_bytes(), keep=2, uploads=False
        )
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: needed)
    disk_room.require_room(
        workplace.runs / "x", checkpoint_bytes=shape.checkpoint_bytes(), keep=2, uploads=False
    )
    numbers = estimate_run(config, spec=shape, world_size=2, link=Link(bytes_per_s=1e9))
    assert numbers.params == shape.num_params()


def test_the_room_of_an_interrupted_checkpoint_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer removes leftovers of an interrupted write before its first write."""
    partial = tmp_path / "checkpoints" / "step_00000010.partial"
    partial.mkdir(parents=True)
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: 3 * 12 * 1000 - 8192)
    with pytest.raises(ConfigError, match="GB free"):
        disk_room.require_room(tmp_path, checkpoint_bytes=12_000, keep=1, uploads=False)
    (partial / "model.safetensors").write_bytes(b"x" * 8192)
    disk_room.require_room(tmp_path, checkpoint_bytes=12_000, keep=1, uploads=False)


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_error_of_a_failed_run_is_printed_once(workplace: Workplace, rank: int) -> None:
    run = workplace.start((f"--fail={rank}:40",), "run", "--run-id", f"rank-{rank}")
    out, err = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == ExitCode.TRAINING
    assert (out + err).count("the loss is nan") == 1, err
    assert f"error: rank {rank} on " in err


@pytest.mark.ranks
def test_a_run_whose_folder_is_deleted_ends_with_one_line_and_recreates_nothing(
    workplace: Workplace,
) -> None:
    run = workplace.start(ENDLESS, "run", "--run-id", "one")
    paths = workplace.run_paths("one")
    wait_for_steps(paths)
    moved = workplace.runs.parent / "deleted"
    paths.root.rename(moved)  # atomically: a file manager leaves no half-removed folder
    _, err = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == ExitCode.TRAINING, err
    assert "Traceback" not in err
    assert f"error: {paths.root} was removed while the run was active" in err
    assert not paths.root.exists()
    wait_until_gone(RunPaths(moved))


@pytest.mark.ranks
def test_latest_means_the_newest_run_with_a_step(workplace: Workplace) -> None:
    assert workplace.call("run", "--run-id", "good")[0] == 0
    plan_stand_in(workplace.runs / "never")
    status, out, _ = workplace.call("status", "latest", "--json")
    assert status == 0 and json.loads(out)["run_id"] == "good"
    status, out, _ = workplace.call("status", "--json")
    assert status == 0 and json.loads(out)["run_id"] == "never"
