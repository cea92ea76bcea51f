"""A run that has a store is resumed in another place, but not while it is active anywhere."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from payload.config.run_config import RunConfig, load_run_config, parse_run_config
from payload.core.errors import ConfigError, ExitCode, UsageError
from payload.machines.inventory import Access, ClusterInventory
from payload.machines.machine import discover
from payload.orchestrate.__main__ import main
from payload.orchestrate.inventories.chosen import ResolvedInventory
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.mirror import mirror_file, record_contact
from payload.orchestrate.runs.planning import PlanTarget, resolve
from payload.orchestrate.runs.run_request import RunRequest
from payload.orchestrate.sites.local import Local
from payload.orchestrate.sites.ssh import Ssh
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import RunPaths
from payload.run_record.run_lock import RunLock, start_lock
from tests.launch.inventories import make_inventory
from tests.support.run_folders import make_run

pytestmark = pytest.mark.processes


def cluster(name: str) -> ClusterInventory:
    return replace(make_inventory(num_nodes=2), cluster=name, access=Access(kind="direct"))


def stored_run(tmp_path: Path, *, store: bool = True) -> RunPaths:
    results = tmp_path / "results" if store else "none"
    return make_run(tmp_path / "runs" / "one", settings=[f"storage.results={results}"])


def make_copy(paths: RunPaths, *, alive: bool) -> None:
    """Make a run one of cluster `first`, as when it was last reached."""
    paths.inventory.write_text(cluster("first").to_json(), encoding="utf-8")
    record_contact(paths, alive=alive, ssh_key=Path("/key"))


def write_trainer_state(checkpoint: Path, *, dtype: str) -> None:
    checkpoint.mkdir(parents=True)
    text = json.dumps({"step": 1, "dtype": dtype, "config_toml": ""})
    (checkpoint / "trainer.json").write_text(text, encoding="utf-8")


def hold(paths: RunPaths, *, name: str | None) -> None:
    """Request the run at cluster `name`, or at this machine."""
    talk = text_console(stderr=True)
    with ExitStack() as held:
        if name is None:
            access = LocalAccess(os.environ)
            here = ResolvedInventory(inventory=make_inventory(), why="test", domains={})
            Local(here, access).hold_to_resume(paths, lambda: None, held, talk)
        else:
            chosen = ResolvedInventory(inventory=cluster(name), why="test", domains={})
            site = Ssh(chosen, env=os.environ, talk=talk)
            site.hold_to_resume(paths, lambda: None, held, talk)


def test_a_run_that_is_active_on_this_machine_is_not_resumed_on_a_cluster(tmp_path: Path) -> None:
    paths = stored_run(tmp_path)
    with RunLock(paths), pytest.raises(ConfigError, match="run one is running"):
        hold(paths, name="first")
    with start_lock(paths), pytest.raises(UsageError, match="another command is starting"):
        hold(paths, name="first")
    hold(paths, name="first")


def test_a_run_that_is_active_on_a_cluster_is_not_resumed_elsewhere(tmp_path: Path) -> None:
    paths = stored_run(tmp_path)
    make_copy(paths, alive=True)
    for name in ("second", None):
        with pytest.raises(ConfigError, match=r"was running when its cluster .* remove .*mirror"):
            hold(paths, name=name)
    hold(paths, name="first")  # whose head knows
    mirror_file(paths).unlink()
    for name in ("second", None):
        hold(paths, name=name)


def test_an_ended_run_of_a_cluster_is_resumed_anywhere_if_it_has_a_store(
    tmp_path: Path,
) -> None:
    paths = stored_run(tmp_path)
    make_copy(paths, alive=False)
    for name in ("first", "second", None):
        hold(paths, name=name)


def test_without_a_store_a_run_stays_where_it_was(tmp_path: Path) -> None:
    paths = stored_run(tmp_path, store=False)
    make_copy(paths, alive=False)
    hold(paths, name="first")
    with pytest.raises(ConfigError, match="its checkpoints are not on second"):
        hold(paths, name="second")
    with pytest.raises(ConfigError, match="this folder is a local copy"):
        hold(paths, name=None)


@pytest.mark.parametrize("resumes", [True, False])
def test_a_plan_of_a_request_records_whether_the_run_is_resumed(
    tmp_path: Path, resumes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("payload.orchestrate.machine_profiles.local_profile.has_bf16", lambda: True)
    paths = stored_run(tmp_path)
    if resumes:
        for step, dtype in ((1, "bf16"), (2, "fp32")):
            write_trainer_state(paths.checkpoint(step), dtype=dtype)
        (paths.checkpoint(3) / "trainer.json").mkdir(parents=True)
    with ExitStack() as held:
        order = RunRequest(
            paths=paths,
            config=load_run_config(paths.config),
            vocab_size=512,
            resumes=resumes,
            detach=False,
            grace_s=1.0,
            env=os.environ,
            talk=text_console(stderr=True),
            held=held,
        )
        access = LocalAccess(os.environ)
        here = ResolvedInventory(inventory=make_inventory(), why="test", domains={})
        target = PlanTarget(chosen=here, profile=access, paths=paths, port=12345)
        planned = resolve(order.to_plan(), target)
        planned.write(paths)
    assert planned.plan.resumes is resumes
    if resumes:
        local = Local(
            ResolvedInventory(inventory=discover().inventory(), why="test", domains={}), access
        )
        again = local.plan(paths, order.config, vocab_size=512)
        assert planned.predicted.dtype() == again.predicted.dtype() == "fp32"


def test_a_device_is_looked_for_on_the_nodes_not_here(tmp_path: Path) -> None:
    overrides = ("distributed.backend=nccl", "device.kind=cuda", "batch.global_batch_size=8")
    config = parse_run_config("", overrides=overrides, where="test")
    chosen = ResolvedInventory(inventory=cluster("first"), why="test", domains={})
    Ssh(chosen, env=os.environ, talk=text_console(stderr=True)).check(config, os.environ)


def test_an_ended_run_whose_copy_is_damaged_is_still_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = stored_run(tmp_path, store=False)
    make_copy(paths, alive=False)
    paths.inventory.write_text("{", encoding="utf-8")
    paths.rank_log(0).parent.mkdir(exist_ok=True)
    paths.rank_log(0).write_text("last words\n", encoding="utf-8")
    runs = ("--runs-dir", str(paths.root.parent))
    assert main(["status", "one", *runs], os.environ) == ExitCode.OK
    assert "inventory.json" in capsys.readouterr().out
    assert main(["logs", "one", *runs], os.environ) == ExitCode.OK
    assert "last words" in capsys.readouterr().out
    for verb in ("collect", "attach"):
        assert main([verb, "one", *runs], os.environ) == ExitCode.CONFIG
        assert "inventory.json" in capsys.readouterr().err


def test_plan_refuses_for_a_cluster_what_run_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = tmp_path / "inventory.json"
    inventory.write_text(cluster("first").to_json(), encoding="utf-8")
    asked: list[RunConfig] = []
    monkeypatch.setattr(Ssh, "check", lambda site, config, env: asked.append(config))
    words = ["plan", "--inventory", str(inventory), "--set", "model.preset=tiny"]
    words += ["--set", f"data.dir={tmp_path / 'none'}", "--runs-dir", str(tmp_path / "runs")]
    assert main(words, os.environ) == ExitCode.OK, capsys.readouterr().err
    assert len(asked) == 1
