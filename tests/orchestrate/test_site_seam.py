"""The sites: found by their files, so that a new one is one file; and Slurm's, without Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from payload.config.run_config import parse_run_config
from payload.core.errors import ConfigError, ExitCode, PreflightError
from payload.launch.budget import JobTime
from payload.launch.launcher import KilledRank
from payload.launch.launchers.registry import find
from payload.machines.inventory import Access
from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.planning import PlanTarget, require_launcher, resolve
from payload.orchestrate.runs.run_request import PlanRequest
from payload.orchestrate.sites.allocation import (
    NodeReport,
    SlurmAccess,
    allocation,
    time_left_s,
)
from payload.orchestrate.sites.registry import find_site, site_names
from payload.orchestrate.sites.slurm import render_script
from payload.run_record.run_files import RunPaths
from tests.launch.inventories import make_inventory
from tests.orchestrate import toy_site
from tests.orchestrate.operator import SETTINGS
from tests.support.data_folders import make_data_folder
from tests.support.launching import REPO, losses, summary
from tests.support.waiting import DEADLINE_S


def config_of(*overrides: str) -> object:
    return parse_run_config("", overrides=overrides, where="test")


def test_sites_are_the_files_that_there_are() -> None:
    assert site_names() == ["slurm"]
    assert find_site("slurm").name == "slurm"
    with pytest.raises(ConfigError, match=r"unknown site\. Use slurm"):
        find_site("choose")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_new_site_is_one_file_and_trains_what_this_machine_trains(tmp_path: Path) -> None:
    assert len(Path(toy_site.__file__).read_text(encoding="utf-8").splitlines()) <= 60
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(REPO / "payload", tmp_path / "payload", ignore=ignored)
    shutil.copy(toy_site.__file__, tmp_path / "payload/orchestrate/sites/toy.py")
    make_data_folder(tmp_path / "data", num_train_tokens=4000, num_val_tokens=200, vocab_size=512)
    chosen = (
        *SETTINGS,
        f"data.dir={tmp_path / 'data'}",
        "train.steps=4",
        "launch.ranks_per_node=2",
    )
    words = [word for setting in chosen for word in ("--set", setting)]
    for run_id, where in (("toy", ["--site", "toy"]), ("here", ["--inventory", "local"])):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "payload.orchestrate",
                "run",
                *where,
                "--run-id",
                run_id,
                *words,
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == ExitCode.OK, done.stderr
    assert (tmp_path / "elsewhere/toy/plan.json").exists()
    toy = tmp_path / "runs/toy"
    assert summary(toy)["status"] == "finished"
    assert losses(toy) == pytest.approx(losses(tmp_path / "runs/here"), rel=1e-6)


def test_a_batch_script_requests_the_configured_resources(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "at 100%")
    config = parse_run_config(
        "[slurm]\nnodes = 3\ntime = '1-00'\npartition = 'cpu'\nextra = '--constraint=\"a b\"'",
        where="test",
    )
    access = LocalAccess({})
    lines = render_script(paths, config, access=access, grace_s=60.0).splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert {"--nodes=3", "--time=1-00", "--partition=cpu", "--exclusive", "--mem=0"} <= set(options)
    assert "--constraint='a b'" in " ".join(options) or "'--constraint=a b'" in options
    assert f"'--output={tmp_path}/at 100%%/logs/supervisor.log'" in options
    assert lines[-1].startswith("exec ") and "--run-dir" in lines[-1]


@pytest.mark.parametrize("where", ["the run's folder", "the current folder"])
def test_a_line_break_becomes_no_line_of_the_batch_script(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = tmp_path / "a\ntouch owned\n#"
    hostile.mkdir()
    if where == "the current folder":
        monkeypatch.chdir(hostile)
    paths = RunPaths(hostile if where == "the run's folder" else tmp_path)
    config = parse_run_config("", where="test")
    with pytest.raises(ConfigError, match="has a control character, such as a line break"):
        render_script(paths, config, access=LocalAccess({}), grace_s=60.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("slurm.time=soon", r"slurm\.time = 'soon': write minutes"),
        ("slurm.partition=a b", r"slurm\.partition = 'a b': use a name"),
        ("slurm.nodes=0", r"slurm\.nodes = 0: must be at least 1"),
        ("slurm.extra='--nodes=4'", r"'--nodes=4' is an option that the run sets"),
        *(
            (f"slurm.extra='{word}'", f"{word.split('=')[0]}.* is an option that the run sets")
            for word in (
                *("-N4", "-HN4", "--node=4", "--arr=1-3", "--wra=id", "-a1-2", "-Mother"),
                *("--clusters=other", "--test-only", "--n=4", "-QJname"),
            )
        ),
        ("slurm.extra='--exclude=n1 --mem-bind=local --time-min=5 -Cn'", r""),
        ("slurm.extra=constraint", r"'constraint' is not an option"),
        ("launch.launcher=srun", r""),
    ],
)
def test_a_wrong_setting_is_named(setting: str, message: str) -> None:
    if not message:
        config_of(setting)
        return
    with pytest.raises(ConfigError, match=message):
        config_of(setting)


def test_a_time_needs_no_quotes_on_the_command_line() -> None:
    assert (
        parse_run_config("", overrides=["slurm.time=12:00:00"], where="t").slurm.time == "12:00:00"
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:58", 58.0), ("1:02:03", 3723.0), ("2-00:00:01", 172801.0), ("UNLIMITED", None)],
)
def test_the_time_that_a_job_has_left_is_read(text: str, seconds: float | None) -> None:
    assert time_left_s(text) == seconds


def test_a_slurm_inventory_is_for_the_job_that_it_was_read_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"submit a job with `run --site slurm`"):
        load_cluster("slurm", env={})
    inventory = make_inventory(num_nodes=2)
    text = replace(inventory, source="slurm", access=Access(kind="slurm")).to_json()
    (tmp_path / "inventory.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"each job runs on different nodes"):
        load_cluster(str(tmp_path / "inventory.json"), env={})


def test_srun_is_refused_where_there_is_no_job() -> None:
    config = parse_run_config("", overrides=["launch.launcher=srun"], where="test")
    with pytest.raises(ConfigError, match=r"'srun' starts ranks in a Slurm job, but .* is not a"):
        require_launcher(config, make_inventory(num_nodes=2))


def test_mpirun_is_refused_in_a_job_of_several_nodes_with_the_reason() -> None:
    in_job = replace(make_inventory(num_nodes=2), source="slurm", access=Access(kind="slurm"))
    wanted = ["launch.launcher=mpirun", "slurm.nodes=2"]
    config = parse_run_config("", overrides=wanted, where="test")
    why = (
        r"^launch\.launcher = 'mpirun' reaches other nodes by SSH with the run's key, which the 2 "
        r"nodes of a Slurm job do not have\. Use 'auto', 'srun' or 'torchrun'\.$"
    )
    with pytest.raises(ConfigError, match=why):
        require_launcher(config, in_job)
    with pytest.raises(ConfigError, match=why):
        find_site("slurm").check(config, {})
    require_launcher(config, replace(in_job, nodes=in_job.nodes[:1]))
    for name in ("auto", "srun", "torchrun"):
        wanted = [f"launch.launcher={name}"]
        require_launcher(parse_run_config("", overrides=wanted, where="test"), in_job)


@pytest.mark.processes
@pytest.mark.parametrize("granted", ["SLURM_GPUS_ON_NODE=1", "SLURM_STEP_GPUS=0"])
def test_in_a_job_srun_reaches_the_nodes_and_a_failing_nvidia_smi_is_a_note(
    granted: str, tmp_path: Path
) -> None:
    """Slurm's commands as stubs; the node's answer is this program's own.

    The job has a GPU on n-1. From n-2's, Slurm keeps it away, and nvidia-smi says the same there.
    """
    stubs = {
        "srun": 'while [ "$1" != --quiet ]; do shift; done; shift\n'
        f'env SLURMD_NODENAME=n-1 {granted} "$@"\n'
        'env SLURMD_NODENAME=n-2 SLURM_GPUS_ON_NODE=0 "$@"',
        "scontrol": 'if [ "$2" = hostnames ]; then echo n-1; echo n-2; else\n'
        "for n in 1 2; do echo NodeName=n-$n NodeAddr=127.0.0.$n RealMemory=4000; done; fi",
        "nvidia-smi": "echo No devices were found; exit 6",
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="ascii")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n-[1-2]",
    }
    found = allocation(env, why="--inventory slurm")
    [note], [other] = found.chosen.gpu_notes, found.chosen.cuda_notes
    said = "nvidia-smi fails with status 6: No devices were found."
    assert note.startswith(f"no GPU was found on n-1: {said} See the kernel's log")
    assert other.startswith(f"no GPU was found on n-2: {said} Slurm gave the job no GPU. Request")
    reach = found.access.reach()
    assert reach.ssh == () and reach.node_command[0] == "srun"
    assert reach.off_head
    assert reach.each_node_command[:3] == (str(tmp_path / "srun"), "--nodes=2", "--ntasks=2")
    data = tmp_path / "data"
    make_data_folder(data, num_train_tokens=4000, num_val_tokens=200, vocab_size=512)
    for kind, noted in (("auto", {note}), ("cuda", {note, other}), ("cpu", set())):
        wanted = [*SETTINGS, f"data.dir={data}", "launch.launcher=torchrun", f"device.kind={kind}"]
        wanted += ["launch.ranks_per_node=2", "batch.global_batch_size=8"]
        config = parse_run_config("", overrides=wanted, where="test")
        planned = resolve(
            PlanRequest(config=config, vocab_size=512),
            PlanTarget(
                chosen=found.chosen,
                profile=found.access,
                paths=RunPaths(tmp_path / "run"),
                work_dir=tmp_path,
                port=29400,
            ),
        )
        assert planned.plan.argv[0] == str(tmp_path / "srun") and planned.plan.off_head
        assert {note, other} & set(planned.plan.notes) == noted


@pytest.mark.processes
def test_a_job_s_node_that_is_not_this_machine_is_reached_by_srun_too(tmp_path: Path) -> None:
    """salloc's shell stays on the login node: no rank may start on it."""
    (tmp_path / "srun").write_text("#!/bin/sh\necho slurm 22.05\n", encoding="ascii")
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    sight = NodeReport(node="n-1", domains=(), memory_bytes=2**30, interface=None)
    login = SlurmAccess(env, {"n-1": sight})
    assert login.reach().off_head and login.reach().each_node_command[1] == "--nodes=1"
    assert login.executable(find("srun")) == str(tmp_path / "srun")
    for name in ("mpirun", "torchrun"):
        with pytest.raises(
            ConfigError, match=rf"'{name}' would start the ranks on .* is n-1\. Use"
        ):
            login.executable(find(name))
    node = SlurmAccess({**env, "SLURMD_NODENAME": "n-1"}, {"n-1": sight})
    assert not node.reach().off_head and node.reach().node_command == ()
    assert node.executable(find("torchrun")) == node.python
    two = {"n-1": sight, "n-2": replace(sight, node="n-2")}
    for here, off_head in (("n-1", False), ("n-2", True)):
        reach = SlurmAccess({**env, "SLURMD_NODENAME": here}, two).reach()
        assert reach.node_command and reach.off_head is off_head


def test_srun_s_messages_name_killed_ranks_and_lost_nodes() -> None:
    srun = find("srun")
    said = "srun: error: node-2: task 3: Killed\n"
    assert srun.report(said).killed == KilledRank(rank=3, address="node-2", signal=9)
    assert srun.report("srun: error: node-2: tasks 2-3: Exited with exit code 1").killed is None
    lost = srun.report("srun: error: Node failure on node-2\n").lost
    assert lost is not None and lost.address == "node-2"
    refused = srun.report("srun: error: Unable to create step for job 7: Job violates policy\n")
    assert refused.not_started is not None and "Job violates policy" in refused.not_started


def test_a_job_s_end_leaves_time_to_save() -> None:
    job = JobTime(left_s=36_000.0, run_id="one")
    assert job.stop_after_s(grace_s=60.0) == 36_000.0 - 120.0
    assert job.stop_after_s(grace_s=600.0) == 36_000.0 - 600.0
    assert JobTime(left_s=60.0, run_id="one").stop_after_s(grace_s=60.0) == 54.0
    assert "--resume one" in job.message(spent_s=1.0)


def test_without_sbatch_the_message_shows_where_to_find_it() -> None:
    with pytest.raises(PreflightError, match=r"no sbatch on PATH\. Slurm's commands are on"):
        find_site("slurm").check(parse_run_config("", where="t"), {"PATH": "/nowhere"})
