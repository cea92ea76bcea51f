"""The runs folder, and the state of runs without a supervisor."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from payload.config.launch_sections import LaunchSection
from payload.config.run_config import parse_run_config
from payload.core.errors import ConfigError, DataError, UsageError
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.estimates.network import Link
from payload.estimates.run_estimate import estimate_run
from payload.formats.data_folder import load_meta
from payload.launch.ranks import place_ranks
from payload.models.gpt2.spec import PRESETS
from payload.orchestrate.follow import follow
from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.runs.run_index import all_runs, create_run, find_run, view_run
from payload.orchestrate.runs.run_input_checks import check_data, memory_warning
from payload.orchestrate.sites.local import require_one_machine
from payload.run_record.approved_settings import record_approved
from payload.run_record.run_files import (
    RankProgress,
    RunPaths,
    RunState,
    StopRequest,
    new_run_id,
    point_latest_at,
    write_json,
)
from payload.run_record.run_lock import RunLock, is_supervised
from tests.launch.inventories import make_inventory
from tests.orchestrate.run_copies import state_text
from tests.supervise.planned import plan_stand_in
from tests.support.data_folders import make_data_folder
from tests.support.run_folders import make_run


@pytest.mark.parametrize(
    ("name", "plain"), [("a b", "a-b"), ("../x", "x"), ("$(x);'", "x"), ("\u00fc", "run")]
)
def test_run_ids_are_safe_names(name: str, plain: str) -> None:
    now = datetime(2026, 11, 21, 17, 5, 9)
    assert new_run_id(name, now=now, suffix="beef") == f"{plain}-20261121-170509-beef"


@pytest.mark.parametrize("run_id", ["", "a/b", "..", "-x", "latest", "a b"])
def test_unsafe_run_ids_are_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ConfigError, match="--run-id"):
        create_run(tmp_path, run_id)


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    create_run(tmp_path, "a")
    with pytest.raises(ConfigError, match="--resume a"):
        create_run(tmp_path, "a")


@pytest.mark.processes
def test_latest_leads_to_the_run_that_was_planned_last(tmp_path: Path) -> None:
    old, new = (plan_stand_in(tmp_path / name) for name in ("old", "new"))
    os.utime(old.plan, times=(time.time() - 100,) * 2)
    for paths in (new, old):
        point_latest_at(paths)
        assert (tmp_path / "latest").readlink() == Path("new")
    (tmp_path / "latest").unlink()
    point_latest_at(old)
    assert (tmp_path / "latest").readlink() == Path("old")
    point_latest_at(new)
    assert (tmp_path / "latest").readlink() == Path("new")


@pytest.mark.processes
def test_the_newest_run_is_the_default(tmp_path: Path) -> None:
    for age_s, name in ((100, "old"), (50, "new")):
        paths = plan_stand_in(tmp_path / name)
        os.utime(paths.plan, times=(time.time() - age_s,) * 2)
    assert [paths.run_id for paths in all_runs(tmp_path)] == ["new", "old"]
    assert find_run(tmp_path, None).run_id == "new"
    assert find_run(tmp_path, "old").run_id == "old"
    with pytest.raises(UsageError, match=r"no run 'x' .* newest runs: new, old"):
        find_run(tmp_path, "x")


def test_without_runs_the_error_shows_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Start one with"):
        find_run(tmp_path, None)


def test_a_lock_lives_as_long_as_its_holder(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert not is_supervised(paths)
    with RunLock(paths):
        assert is_supervised(paths)
    assert not is_supervised(paths)


@pytest.mark.processes
def test_a_running_state_without_a_supervisor_is_a_failure(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", status="running")
    view = view_run(paths, now_unix=time.time())
    assert (view.status, view.exit_class) == ("failed", "rank_lost")
    assert "the supervisor was killed" in str(view.error)
    with RunLock(paths):
        assert view_run(paths, now_unix=time.time()).status == "running"


@pytest.mark.processes
def test_a_run_that_never_began_is_starting_and_then_a_failure(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run")
    assert view_run(paths, now_unix=time.time()).status == "starting"
    assert view_run(paths, now_unix=time.time() + 60).status == "failed"


@pytest.mark.processes
def test_an_ended_run_shows_its_recorded_result(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", status="stopped")
    assert view_run(paths, now_unix=time.time()).status == "stopped"


def test_remote_machines_are_not_treated_as_this_one(tmp_path: Path) -> None:
    path = tmp_path / "inventory.json"
    path.write_text(make_inventory(num_nodes=2).to_json())
    with pytest.raises(ConfigError, match="2 node"):
        require_one_machine(load_cluster(str(path), env={}))
    path.write_text(make_inventory().to_json().replace('"kind": "local"', '"kind": "iap"'))
    with pytest.raises(ConfigError, match="access kind 'iap' is for other machines"):
        require_one_machine(load_cluster(str(path), env={}))
    path.write_text(make_inventory().to_json())
    chosen = load_cluster(str(path), env={})
    require_one_machine(chosen)
    assert chosen.inventory.head.name == "node-0"


def make_data(folder: Path, **changes: object) -> Path:
    make_data_folder(folder, num_train_tokens=100, num_val_tokens=10)
    meta = folder / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | changes))
    return folder


def test_a_whole_data_folder_passes(tmp_path: Path) -> None:
    assert check_data(make_data(tmp_path / "d"), sequence_length=99).vocab_size == 50257


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "meta.json").unlink(),
            "it is incomplete",
        ),
        (lambda folder: (folder / "meta.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "expected an object"),
        (lambda folder: (folder / "meta.json").write_text("{}"), "schema_version is None"),
        (
            lambda folder: (folder / "train.bin").unlink(),
            r"train\.bin: No such file .*, but meta\.json lists it",
        ),
        (
            lambda folder: (folder / "val.bin").write_bytes(b"1"),
            r"val\.bin: the file has 1 bytes, but meta\.json lists 20",
        ),
    ],
)
def test_a_damaged_data_folder_shows_how_to_make_it(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = make_data(tmp_path / "stdlib", source="stdlib: Python 3.13")
    damage(folder)
    with pytest.raises(DataError, match=message) as raised:
        check_data(folder, sequence_length=10)
    assert "python -m payload.data prepare --source stdlib --out" in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", "Infinity"),
        ("vocab_size", "-Infinity"),
        ("vocab_size", "NaN"),
        ("vocab_size", "1e999"),
        ("vocab_size", "50257.5"),
        ("vocab_size", '"50257"'),
        ("vocab_size", "true"),
        ("vocab_size", "0"),
        ("vocab_size", "9" * 4300),
        ("train_tokens", "[" * 20_000 + "]" * 20_000),
        ("train_tokens", "-1"),
        ("train_tokens", "null"),
        ("files", "[]"),
        ("files", '{"train.bin": 7}'),
        ("files", '{"../../x": {"bytes": 1}}'),
        ("files", json.dumps({"x" * 5000: {"bytes": "y" * 5000}})),
        ("dtype", json.dumps("x" * 20_000)),
        ("source", json.dumps("x" * 60_000)),
        ("source", r'"a\nb\u001b]52;c;eA==\u0007"'),
        ("schema_version", json.dumps("x" * 20_000)),
        ("split", r'"a\nb"'),
    ],
)
def test_a_hostile_value_in_meta_json_is_one_short_line(
    tmp_path: Path, field: str, value: str
) -> None:
    folder = make_data(tmp_path / "d")
    raw = json.loads((folder / "meta.json").read_text())
    raw[field] = "HERE"
    (folder / "meta.json").write_text(json.dumps(raw).replace('"HERE"', value))
    if field == "source":
        (folder / "val.bin").write_bytes(b"1")
    for check in (partial(check_data, folder, sequence_length=10), partial(load_meta, folder)):
        with pytest.raises(DataError) as raised:
            check()
        said = str(raised.value)
        assert str(folder) in said and said.isprintable()
        assert len(said.replace(str(folder), "")) < 600


def test_a_damaged_data_folder_of_ones_own_text_is_to_be_made_from_that_again(
    tmp_path: Path,
) -> None:
    folder = make_data(tmp_path / "mine", source="jsonl: corpus")
    (folder / "val.bin").write_bytes(b"1")
    with pytest.raises(
        DataError, match=r"with the option --force \(source: jsonl: corpus\)\.$"
    ) as raised:
        check_data(folder, sequence_length=10)
    assert "--source" not in str(raised.value)


def one_text(folder: Path) -> Path:
    (folder / "text.txt").write_text("my only copy")
    return folder / "text.txt"


def rows(folder: Path) -> Path:
    (folder / "rows.jsonl").write_text("{}")
    return folder / "rows.jsonl"


def own_texts(folder: Path) -> Path:
    (folder / "my texts").mkdir()
    one_text(folder / "my texts")
    return folder / "my texts"


@pytest.mark.parametrize(
    ("make", "message", "command"),
    [
        (one_text, "is a file, not a data folder", "--source text --input {} --out {}-tokens"),
        (rows, "is a file, not a data folder", "--source jsonl --input {} --out {}-tokens"),
        (own_texts, "it is not a data folder", "--source text --input {} --out {}-tokens"),
    ],
)
@pytest.mark.parametrize(
    "check",
    [lambda folder: check_data(folder, sequence_length=10), load_meta],
    ids=["run", "train"],
)
def test_no_command_is_suggested_that_writes_where_the_users_own_texts_are(
    tmp_path: Path, make: Any, message: str, command: str, check: Any
) -> None:
    given = make(tmp_path)
    with pytest.raises(DataError, match=message) as raised:
        check(given)
    words = shlex.split(str(raised.value).partition("prepare them with: ")[2])
    expected = command.format("GIVEN", "OUT").split()
    out = str(given.with_name(given.stem))
    expected = [word.replace("GIVEN", str(given)).replace("OUT", out) for word in expected]
    assert words[words.index("-m") :] == ["-m", "payload.data", "prepare", *expected]
    assert "does not exist" not in str(raised.value)


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_folder_without_a_name_of_its_own_is_no_data_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    one_text(tmp_path / "inner")
    monkeypatch.chdir(tmp_path / "inner")
    with pytest.raises(DataError, match="it is not a data folder"):
        load_meta(Path(name))


def test_missing_data_and_short_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        check_data(tmp_path / "none", sequence_length=10)
    with pytest.raises(DataError, match=r"has 100 tokens, .* data.sequence_length = 100"):
        check_data(make_data(tmp_path / "d"), sequence_length=100)


def test_a_plan_that_needs_more_memory_than_is_free_is_warned_of() -> None:
    placement = place_ranks(make_inventory().nodes, LaunchSection(ranks_per_node=2))
    config = parse_run_config("", where="test")
    numbers = estimate_run(config, spec=PRESETS["gpt2"], world_size=2, link=Link(bytes_per_s=1e9))
    warning = memory_warning(numbers, placement, free_bytes=2**30)
    assert warning is not None and "1.0 GiB are free" in warning
    assert memory_warning(numbers, placement, free_bytes=2**50) is None
    assert memory_warning(numbers, placement, free_bytes=None) is None


@pytest.mark.processes
def test_a_stop_waits_while_a_checkpoint_makes_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_MARGIN_S", 0.0)
    paths = plan_stand_in(tmp_path / "run", settings=("limits.hang_timeout_s=60",))
    now = StopRequest(grace_s=0.0)
    for phase, is_over in (("step", True), ("checkpoint", False), ("end", False), ("load", True)):
        beat = RankProgress(rank=0, node="a", pid=1, step=3, phase=phase, time_unix=1.0)
        write_json(paths.rank_progress(0), beat)
        assert follow.StopWait(paths, now).is_over() is is_over
    assert not follow.StopWait(paths, StopRequest()).is_over()


@pytest.mark.processes
@pytest.mark.parametrize(("results", "is_over"), [("none", True), ("/store", False)])
def test_a_stop_waits_for_the_store_of_a_run_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: str, is_over: bool
) -> None:
    monkeypatch.setattr(follow, "_MARGIN_S", 0.0)
    settings = (f"storage.results={results}", "storage.final_wait_s=9e5")
    paths = plan_stand_in(tmp_path / "run", settings=settings)
    record_approved(paths, {})
    wait = follow.StopWait(paths, StopRequest(grace_s=0.0))
    assert wait.is_over()
    state = parse_json(state_text("run"), where="test")
    write_json(paths.state, build(RunState, state | {"exit_class": "ok"}, where="test"))
    assert wait.is_over() is is_over
    # The wait is that of a run.toml which may have come from a store: an hour at most.
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3700.0)
    assert wait.is_over()
