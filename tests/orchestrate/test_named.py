"""A resumed run's own records name no data, model, store or sbatch option of another user."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from payload.config.run_config import RunConfig, load_run_config, parse_run_config
from payload.config.store_address import parse_store_address
from payload.core.errors import ConfigError, ExitCode, SshUnreachableError, UsageError
from payload.machines.inventory import Access
from payload.machines.rank_variables import RUN_DIR
from payload.orchestrate.__main__ import main
from payload.orchestrate.commands import collect as collecting
from payload.orchestrate.runs.mirror import Mirrored, write_mirrored
from payload.orchestrate.sites.local import Local
from payload.orchestrate.sites.ssh import Ssh
from payload.run_record.approved_settings import (
    bounded_wait_s,
    record_approved,
    require_approved,
    settings_to_approve,
    unapproved_settings,
)
from payload.run_record.run_files import RunPaths
from payload.run_record.run_repair import config_to_resume
from payload.storage.opening import open_store
from payload.storage.records import fetch_records
from payload.train.__main__ import _is_launched as is_launched
from payload.train.__main__ import _load_config as settings_of
from payload.train.__main__ import _named as named_here
from payload.train.__main__ import parser
from tests.launch.inventories import make_inventory
from tests.orchestrate.test_commands import Workplace
from tests.storage.folders import write_checkpoint
from tests.storage.uploading import upload_all
from tests.support.data_folders import make_data_folder
from tests.support.identities import MINE, THEIRS, write_identity
from tests.support.run_folders import make_run

Plant = Callable[..., str]


class StartedError(Exception):
    """Something is being started."""


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture
def plant(tmp_path: Path, workplace: Workplace) -> Plant:
    """Put a run into a store, with a run.toml that says more than it should."""

    def put(*settings: str) -> str:
        usual = [
            f"data.dir={workplace.data}",
            f"storage.results={tmp_path / 'results'}",
            "data.sequence_length=16",
            "model.preset=tiny",
        ]
        planted = make_run(tmp_path / "node" / "one", settings=[*usual, *settings])
        write_identity(planted)
        write_checkpoint(planted.checkpoints, 10, seed=1, run=MINE)
        address = str(tmp_path / "results" / "one")
        upload_all(planted, open_store(parse_store_address(address)), is_new=True)
        return address

    return put


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a start when the site is selected."""

    def start(*_: object) -> None:
        raise StartedError

    for site in (Local, Ssh):
        monkeypatch.setattr(site, "start", start)


@pytest.fixture(params=["local", "cluster"])
def resume(
    request: pytest.FixtureRequest, workplace: Workplace, tmp_path: Path
) -> Callable[..., int]:
    """Resume a run at a site."""
    inventory = "local"
    if request.param == "cluster":
        nodes = replace(make_inventory(num_nodes=2), access=Access(kind="direct"))
        path = tmp_path / "inventory.json"
        path.write_text(nodes.to_json(), encoding="utf-8")
        inventory = str(path)

    def run(named: str, *more: str) -> int:
        words = ("run", "--resume", named, "--inventory", inventory, *more)
        return main(workplace.arguments(*words), os.environ)

    return run


@pytest.mark.processes
@pytest.mark.parametrize("is_here", [False, True])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model.init", "PRIVATE"),
        ("storage.results", "ELSEWHERE"),
        ("slurm.extra", "--container=/store/bundle"),
        ("slurm.account", "theirs"),
    ],
)
def test_a_store_names_nothing_of_this_machine(
    setting: str,
    value: str,
    is_here: bool,
    plant: Plant,
    resume: Callable[..., int],
    workplace: Workplace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attacks: private weights and data were sent, another store written, sbatch misused."""
    (tmp_path / "private").mkdir()
    value = {"PRIVATE": str(tmp_path / "private"), "ELSEWHERE": str(tmp_path / "other")}.get(
        value, value
    )
    stored = plant(f"{setting}={value}")
    if is_here:
        assert main(workplace.arguments("collect", stored), os.environ) == ExitCode.OK
    capsys.readouterr()
    assert resume("one" if is_here else stored) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert f"data.dir={workplace.data}" in said
    is_pinned = setting == "storage.results" and not is_here
    assert (f"--set {setting}={value}" in said) is not is_pinned
    assert not (tmp_path / "other").exists()
    named = ["--set", f"data.dir={workplace.data}", "--set", f"{setting}={value}"]
    if setting != "model.init":  # there is no model in it
        with pytest.raises(StartedError):
            resume("one", *named)


@pytest.mark.processes
def test_what_was_found_in_a_store_stays_there(
    plant: Plant, resume: Callable[..., int], workplace: Workplace, tmp_path: Path
) -> None:
    stored = plant()
    with pytest.raises(StartedError):
        resume(stored, "--set", f"data.dir={workplace.data}")
    paths = RunPaths(workplace.runs / "one")
    known = json.loads(paths.named.read_text(encoding="utf-8"))["settings"]
    assert known == {"storage.results": [str(tmp_path / "results")]}
    assert unapproved_settings(paths, {"storage.results": str(tmp_path / "results")}) == {}


def planted(workplace: Workplace, tmp_path: Path, *settings: str) -> RunPaths:
    """Create a run folder at its path in the clone of a project."""
    usual = [f"data.dir={workplace.data}", "data.sequence_length=16", "model.preset=tiny"]
    paths = make_run(tmp_path / "runs" / "demo", settings=[*usual, *settings])
    write_identity(paths)
    if (tmp_path / "inventory.json").exists():  # that of `resume`
        shutil.copyfile(tmp_path / "inventory.json", paths.inventory)
    return paths


def reach_of(paths: RunPaths) -> dict[str, str]:
    return settings_to_approve(load_run_config(paths.config))


@pytest.mark.processes
@pytest.mark.parametrize("ships_record", [False, True])
@pytest.mark.parametrize(
    "setting", ["model.init=~/private", "model.init=org/private", "storage.results=/tmp/evil"]
)
def test_settings_of_a_foreign_folder_are_not_trusted(
    setting: str,
    ships_record: bool,
    resume: Callable[..., int],
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attacks: a cloned project's run was resumed, with its own named.json or without one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "private").mkdir()
    paths = planted(workplace, tmp_path, setting)
    if ships_record:
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
            record_approved(paths, reach_of(paths))
            require_approved(paths, reach_of(paths))
    assert resume("demo") == ExitCode.CONFIG
    said = " ".join(capsys.readouterr().err.split())
    for each in (f"data.dir={workplace.data}", setting):
        key, _, value = each.partition("=")
        assert f"--set {key}={value}" in said or f"--set '{each}'" in said
    require_approved(paths, reach_of(paths), named={"data.dir", setting.partition("=")[0]})


@pytest.mark.processes
def test_a_setting_named_on_this_machine_is_approved_for_this_run_alone(
    workplace: Workplace, tmp_path: Path
) -> None:
    """The attack: a record and an identity were copied into a folder with other settings."""
    paths = planted(workplace, tmp_path, "model.init=org/model", "storage.results=/mnt/store")
    reach = reach_of(paths)
    record_approved(paths, reach)
    assert paths.named.stat().st_mode & 0o777 == 0o600
    require_approved(paths, reach)
    (tmp_path / "link").symlink_to(paths.root)
    require_approved(RunPaths(tmp_path / "link"), reach)
    # Limits that were not given here are those of the run's settings.
    loose = {key: value for key, value in reach.items() if key not in NO_LIMITS}
    copy = RunPaths(tmp_path / "copy" / "demo")
    copy.root.mkdir(parents=True)
    for path in (paths.named, paths.identity):
        shutil.copyfile(path, copy.root / path.name)
    assert unapproved_settings(copy, reach) == loose
    moved = RunPaths(paths.root.rename(tmp_path / "moved"))
    assert unapproved_settings(moved, reach) == loose  # one request
    record_approved(moved, reach)
    require_approved(moved, reach)
    write_identity(moved, THEIRS)
    assert unapproved_settings(moved, reach) == loose
    write_identity(moved)
    record = json.loads(moved.named.read_text())
    record["settings"]["storage.results"].append("/mnt/evil")
    moved.named.write_text(json.dumps(record))
    assert unapproved_settings(moved, reach) == loose


@pytest.mark.processes
def test_a_person_s_train_obeys_no_folder_s_own_data_or_model(
    workplace: Workplace, tmp_path: Path
) -> None:
    """The attack: `train --run-dir` in a cloned project trained on private data."""
    paths = planted(workplace, tmp_path, "model.init=~/private")
    words = ["--run-dir", str(paths.root)]
    with pytest.raises(ConfigError, match=r"--set data\.dir=.* --set 'model\.init=~/private'"):
        settings_of(parser().parse_args(words), is_launched=False)
    for more in (
        ["--set", f"data.dir={workplace.data}", "--set", "model.init=scratch"],
        ["--config", str(paths.config)],
    ):
        settings_of(parser().parse_args([*words, *more]), is_launched=False)
    env = {RUN_DIR: str(paths.root)}
    assert is_launched(paths.root, env) and not is_launched(tmp_path, env)
    assert not is_launched(paths.root, {})
    settings_of(parser().parse_args(words), is_launched=True)


def test_a_person_s_train_names_what_its_config_has_and_no_more(tmp_path: Path) -> None:
    """The attack: `train --run-dir` recorded a tracker that only the folder's settings had."""
    settings = ["track.to=wandb", "data.dir=d"]
    config = parse_run_config("", overrides=settings, where="test")
    whole = named_here(parser().parse_args(["--config", "c.toml"]), config)
    assert whole == settings_to_approve(config) and whole["track.to"] == "wandb"
    words = ["--run-dir", "runs/a", "--set", "data.dir=d"]
    assert named_here(parser().parse_args(words), config) == {"data.dir": "d"}
    words += ["--set", "track.to=wandb"]
    assert named_here(parser().parse_args(words), config)["track.to"] == "wandb"


def test_a_linked_runs_folder_is_refused_before_training_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").symlink_to("elsewhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=f"To use its target, add --run-dir {tmp_path}/elsewhere/NAME$"
    ):
        settings_of(parser().parse_args(["--config", "absent.toml"]), is_launched=False)


@pytest.mark.processes
def test_the_default_data_folder_is_named_like_any_other(
    resume: Callable[..., int],
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attack: without a data.dir, a store's run.toml had `data/openwebtext` sent."""
    paths = planted(workplace, tmp_path)
    text = paths.config.read_text(encoding="utf-8")
    paths.config.write_text(text.replace(str(workplace.data), "data/openwebtext"))
    monkeypatch.chdir(tmp_path)
    make_data_folder(tmp_path / "data" / "openwebtext")
    assert resume("demo") == ExitCode.CONFIG
    assert "--set data.dir=data/openwebtext" in " ".join(capsys.readouterr().err.split())


@pytest.mark.processes
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_hub_s_model_needs_no_name_where_the_checkpoint_here_is_read(
    adapter: str,
    resume: Callable[..., int],
    workplace: Workplace,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Remote ranks may lack it, and an adapter's run reads its base."""
    paths = planted(workplace, tmp_path, "model.init=org/model", f"adapter.kind={adapter}")
    record_approved(paths, {"data.dir": str(workplace.data)})
    assert resume("demo") == ExitCode.CONFIG
    write_checkpoint(paths.checkpoints, 10, seed=1, run=MINE)
    if adapter == "none" and "local" in request.node.callspec.id:
        with pytest.raises(StartedError):
            resume("demo")
    else:
        assert resume("demo") == ExitCode.CONFIG


class Unreachable:
    """A run on a cluster whose head does not answer."""

    is_copied = True

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths

    def collect_results(self) -> NoReturn:
        raise SshUnreachableError("no answer.")

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.processes
def test_collect_uses_no_store_that_only_the_settings_name(
    plant: Plant,
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attack: it also became one that a person had named. So for a run that was adopted."""
    stored = plant()
    paths = planted(workplace, tmp_path, f"storage.results={tmp_path / 'results'}")
    paths.root.rename(paths.root.with_name("one"))
    paths = RunPaths(paths.root.with_name("one"))
    paths.inventory.unlink()
    record_approved(paths, {})
    write_mirrored(paths, Mirrored(alive=False, seen_unix=1.0, ssh_key="/key"))
    monkeypatch.setattr(collecting, "site_run", lambda paths, _: Unreachable(paths))
    assert main(workplace.arguments("collect", "one"), os.environ) == ExitCode.SSH_UNREACHABLE
    said = " ".join(capsys.readouterr().err.split())
    assert f"collect {stored}" in said and not paths.checkpoints.exists()
    results = {"storage.results": str(tmp_path / "results")}
    assert unapproved_settings(paths, results) == results
    assert main(workplace.arguments("collect", stored), os.environ) == ExitCode.OK
    assert unapproved_settings(paths, results) == {}
    assert main(workplace.arguments("collect", "one"), os.environ) == ExitCode.OK


@pytest.mark.processes
def test_a_checkpoint_says_how_a_run_was_trained_and_not_where_it_goes(tmp_path: Path) -> None:
    """The attack: one planted checkpoint with another seed imported all of its settings."""
    paths = make_run(tmp_path / "one", settings=["storage.results=/mine", "data.dir=/my/data"])
    theirs = parse_run_config(
        "",
        overrides=[
            *("run.seed=7", "storage.results=/theirs", "data.dir=/their/data"),
            *("slurm.extra=--container=x", "limits.max_hours=900"),
        ],
        where="test",
    )
    checkpoint = write_checkpoint(paths.checkpoints, 3, seed=0, run=MINE)
    state = json.dumps({"identity": MINE.identity, "config_toml": theirs.to_toml(), "step": 3})
    replace_in(checkpoint, "trainer.json", state)
    config, warning = config_to_resume(paths, overrides=["train.steps=9"])
    assert warning is not None and config.run.seed == 7 and config.train.steps == 9
    kept = (config.storage.results, config.data.dir, config.slurm.extra, config.limits.max_hours)
    assert kept == ("/mine", "/my/data", "", RunConfig().limits.max_hours)


def replace_in(checkpoint: Path, name: str, text: str) -> None:
    """Put another file into a checkpoint, and into its manifest."""
    import hashlib

    (checkpoint / name).write_text(text, encoding="utf-8")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {
        "bytes": len(text.encode()),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_what_was_named_once_is_known_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "one")
    paths.root.mkdir()
    monkeypatch.chdir(tmp_path)
    record_approved(paths, {"data.dir": "data"})
    record_approved(paths, {"data.dir": "gs://b/data", "model.init": str(tmp_path / "model")})
    for place in ("data", str(tmp_path / "data"), "gs://b/data"):
        require_approved(paths, {"data.dir": place})
    for place in ("data/more", "gs://b/data2", "/", str(tmp_path), str(tmp_path / "model")):
        with pytest.raises(ConfigError, match=r"data\.dir = .* set only in"):
            require_approved(paths, {"data.dir": place})
        require_approved(paths, {"data.dir": place}, named={"data.dir"})
    with pytest.raises(ConfigError, match=r"model\.init = .* set only in") as raised:
        require_approved(paths, {"model.init": "\x1b[31m"}, named={"data.dir"})
    assert "\x1b" not in str(raised.value)


NO_LIMITS = {"limits.max_hours": "none", "limits.max_usd": "none"}


def test_what_reaches_beyond_a_run_is_the_data_and_all_that_is_no_default() -> None:
    data = {"data.dir": "data/openwebtext", **NO_LIMITS}
    assert settings_to_approve(RunConfig()) == data
    hub = parse_run_config("", overrides=["model.init=org/model"], where="test")
    assert settings_to_approve(hub) == {**data, "model.init": "org/model"}
    assert settings_to_approve(hub, reads_init=False) == data


@pytest.mark.parametrize("value", ["a\0b", "~nobody-has-this-name/x", "../../x", "file:/x"])
def test_an_odd_place_is_asked_for_in_one_line(value: str, tmp_path: Path) -> None:
    for key in ("data.dir", "model.init", "storage.results"):
        with pytest.raises(ConfigError, match="set only in"):
            require_approved(RunPaths(tmp_path), {key: value})


@pytest.mark.parametrize("key", ["storage.final_wait_s", "limits.hang_timeout_s"])
def test_a_wait_of_over_an_hour_is_a_person_s_to_name(tmp_path: Path, key: str) -> None:
    """The attack: a store's run.toml kept the machines, and `stop`, waiting for eleven days."""
    paths = RunPaths(tmp_path)
    settings = [f"{key}=9e5", "distributed.timeout_s=9e6"]
    config = parse_run_config("", overrides=settings, where="test")
    record_approved(paths, {})
    with pytest.raises(ConfigError, match=rf"{key} = '900000\.0'.* set only in"):
        require_approved(paths, settings_to_approve(config))
    assert bounded_wait_s(paths, config, key) == 3600
    require_approved(
        paths, settings_to_approve(config), named={key, "distributed.timeout_s", "data.dir"}
    )
    record_approved(paths, settings_to_approve(config))
    require_approved(paths, settings_to_approve(config))
    assert bounded_wait_s(paths, config, key) == 9e5


def test_a_limit_that_the_user_has_named_is_not_raised_by_a_store(tmp_path: Path) -> None:
    """The attack: a store's run.toml had no limit of cost any more."""
    paths = RunPaths(tmp_path)

    def settings(limit: str) -> dict[str, str]:
        more = [f"limits.max_usd={limit}"]
        return settings_to_approve(parse_run_config("", overrides=more, where="test"))

    record_approved(paths, settings("50"))
    for lower in ("50", "5"):
        require_approved(paths, settings(lower))
    for higher in ("51", "none"):
        with pytest.raises(ConfigError, match=r"limits\.max_usd = .* set only in"):
            require_approved(paths, settings(higher))
    require_approved(paths, settings("none"), named={"limits.max_usd"})
    record_approved(paths, settings("none"))
    require_approved(paths, settings("51"))


@pytest.mark.parametrize(
    "content", ["", "{", '{"settings": "/"}', '{"settings": {"data.dir": "/"}}', "[]"]
)
def test_a_damaged_record_allows_nothing(content: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.named.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="set only in"):
        require_approved(paths, {"data.dir": "/"})


def test_the_record_never_comes_from_a_store(tmp_path: Path) -> None:
    (tmp_path / "store" / "one").mkdir(parents=True)
    for name in ("named.json", "run.toml"):
        (tmp_path / "store" / "one" / name).write_text('{"settings": {"data.dir": ["/"]}}')
    store = open_store(parse_store_address(str(tmp_path / "store" / "one")))
    assert fetch_records(store, tmp_path / "run") == ["run.toml"]
