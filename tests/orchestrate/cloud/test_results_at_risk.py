"""A cluster without a bucket: possible losses are printed, and spot needs an option."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from infra.config import ClusterConfig
from payload.config.run_config import RunConfig, parse_run_config
from payload.core.errors import ExitCode
from payload.machines.inventory import Access, Source
from payload.orchestrate.__main__ import main
from payload.orchestrate.runs.at_risk import cluster_warning, loses_checkpoints, run_warning
from payload.orchestrate.runs.remote_run import RemoteRun
from payload.orchestrate.sites.operator_checkpoint_copies import CheckpointCopies
from payload.orchestrate.sites.ssh_run import ClusterRun
from payload.orchestrate.terminal.console import text_console
from payload.stack.operator_key_file import make_operator_key
from tests.launch.inventories import make_inventory
from tests.orchestrate.cloud.conftest import KEY, Site
from tests.orchestrate.cloud.stacks import Capture, words
from tests.orchestrate.cloud.standin import PROJECT
from tests.orchestrate.sshd import Sshd
from tests.orchestrate.test_hostile_checkpoints import write_checkpoint
from tests.support.waiting import wait_until

OURS = replace(make_inventory(), source="pulumi")
NO_STORE = parse_run_config("", overrides=["storage.results=none"], where="test")


@pytest.mark.processes
@pytest.mark.parametrize("spot", ["true", "auto"])
def test_spot_without_a_bucket_is_refused_unless_results_may_be_lost(
    site: Site, capsys: Capture, spot: str
) -> None:
    site.build()
    site.pulumi.on("preview")
    site.pulumi.on("up")
    site.configure(cluster="mine", project=PROJECT, spot=spot)
    assert main(["up", "--yes"], site.env) == ExitCode.CONFIG
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"spot = '{spot}', and bucket = none" in last
    assert "pulumi config set bucket create" in last and "up --results-may-be-lost" in last
    assert words(site) == []
    assert main(["up", "--dry-run"], site.env) == ExitCode.OK
    assert main(["up", "--yes", "--results-may-be-lost"], site.env) == ExitCode.OK
    assert "are lost whenever Google preempts the spot machines" in capsys.readouterr().err
    site.configure(cluster="mine", project=PROJECT, spot=spot, bucket="create")
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    assert "bucket = none" not in capsys.readouterr().err


@pytest.mark.processes
def test_up_on_demand_says_when_the_checkpoints_end(site: Site, capsys: Capture) -> None:
    site.build()
    site.pulumi.on("preview")
    site.pulumi.on("up")
    site.configure(cluster="mine", project=PROJECT, maxLifetime="90m")
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert "warning: bucket = none: checkpoints are only on the head's disk, and are lost" in err
    assert "at the end of maxLifetime (90m)" in err and "spot" not in err
    warning = cluster_warning({})
    assert warning is not None and f"({ClusterConfig().max_lifetime})" in warning


@pytest.mark.processes
@pytest.mark.parametrize("command", ["plan", "run"])
def test_plan_and_run_say_it_on_a_cluster_of_a_stack(
    site: Site, capsys: Capture, tiny_config: Path, command: str
) -> None:
    path = site.folder / "inventory.json"
    # The address is unreachable.
    node = replace(OURS.head, address="127.0.0.1", ssh_port=9, host_keys=(f"ssh-ed25519 {KEY}",))
    path.write_text(replace(OURS, access=Access(kind="direct"), nodes=(node,)).to_json())
    make_operator_key(site.folder / "key")
    argv = [command, "--inventory", str(path), "--config", str(tiny_config)]
    argv += ["--ssh-key", str(site.folder / "key")] if command == "run" else []
    main(argv, site.env)
    err = capsys.readouterr().err
    assert "warning: the run has no store. Its checkpoints are on node-0's disk" in err
    assert "the newest checkpoint is copied here every 30 min" in err
    main([*argv, "--set", "storage.results=/srv/shared/runs"], site.env)
    assert "no store" not in capsys.readouterr().err


@pytest.mark.parametrize("source", ["file", "local", "slurm"])
def test_machines_that_nobody_takes_away_are_no_risk(source: Source) -> None:
    assert run_warning(source, NO_STORE, head="node-0") is None
    assert loses_checkpoints("pulumi", NO_STORE)
    assert loses_checkpoints("pulumi", RunConfig())


@pytest.mark.sshd
def test_the_newest_checkpoint_is_copied_while_a_command_follows_the_run(
    run: RemoteRun, head: Sshd, tmp_path: Path
) -> None:
    there, said = head.home / "tileforge" / "runs" / "one" / "checkpoints", list[str]()
    here = run.paths.checkpoints
    own = here / "step_00000001"
    write_checkpoint(own)
    copies = CheckpointCopies(run, say=said.append, check_s=0.05, every_s=0.05)
    try:
        write_checkpoint(there / "step_00000010")
        wait_until(lambda: (here / "step_00000010").is_dir(), what="the first copy")
        write_checkpoint(there / "step_00000020", **{"model.safetensors": b"newer"})
        wait_until(lambda: not (here / "step_00000010").exists(), what="the second copy")
    finally:
        copies.close()
    # Its own older copy is gone; earlier files are kept.
    assert sorted(path.name for path in here.iterdir()) == ["step_00000001", "step_00000020"]
    assert (here / "step_00000020" / "model.safetensors").read_bytes() == b"newer"
    assert said == [
        "checkpoint step_00000010 was copied to this machine",
        "checkpoint step_00000020 was copied to this machine",
    ]
    assert run.collect_checkpoint() == here / "step_00000020"


@pytest.mark.sshd
def test_what_cannot_be_copied_is_said_once_and_leaves_the_copy(run: RemoteRun, head: Sshd) -> None:
    there, said = head.home / "tileforge" / "runs" / "one" / "checkpoints", list[str]()
    write_checkpoint(there / "step_00000010")
    copies = CheckpointCopies(run, say=said.append, check_s=0.05, every_s=0.05)
    try:
        wait_until(lambda: len(said) == 1, what="the first copy")
        write_checkpoint(there / "step_00000020")
        (there / "step_00000020" / "model.safetensors").write_bytes(b"w\0ights")
        wait_until(lambda: len(said) == 2, what="a warning")
        # The command itself reports the lost head.
        head.stop()
        time.sleep(0.5)
    finally:
        copies.close()
    assert said[1].startswith("warning: checkpoint step_00000020 is skipped: ")
    assert len(said) == 2
    assert (run.paths.checkpoints / "step_00000010" / "manifest.json").is_file()


@pytest.mark.sshd
@pytest.mark.parametrize("source", ["pulumi", "file"])
def test_a_run_without_a_store_on_a_stack_is_copied_when_it_is_followed(
    run: RemoteRun, monkeypatch: pytest.MonkeyPatch, source: Source
) -> None:
    begun = []

    class Copies:
        def __init__(self, run: RemoteRun, *, say: object) -> None:
            begun.append("begun")

        def close(self) -> None:
            begun.append("ended")

    monkeypatch.setattr("payload.orchestrate.sites.ssh_run.CheckpointCopies", Copies)
    run.inventory = replace(run.inventory, source=source)
    with ClusterRun(run, talk=text_console(stderr=True)).followed(print):
        pass
    assert begun == (["begun", "ended"] if source == "pulumi" else [])
