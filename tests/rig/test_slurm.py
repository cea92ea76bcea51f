"""Runs in jobs of a real Slurm: they train like other runs and survive the end of a job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from payload.core.errors import INTERRUPTED, ExitCode
from payload.launch.ranks import load_ranks
from payload.orchestrate.sites.slurm import PENDING_REASONS
from payload.run_record.run_files import RunJob, RunPaths, RunState, read_json
from tests.rig.machine import Machine
from tests.rig.slurm_cluster import SlurmCluster
from tests.support.launching import losses, metrics, summary
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.timeout(1200)]

HANG_S = 9.0
SALLOC = ("salloc", "--quiet", "--nodes=2", "--exclusive", "--mem=0")
LONG = ("train.steps=1000000", "train.checkpoint_every=0", "train.eval_every=0")


def argv(*settings: str) -> list[str]:
    """Return the arguments with the run's file and additional settings."""
    chosen = ("launch.threads_per_rank=1", *settings)
    return ["--config", "run.toml", *(word for each in chosen for word in ("--set", each))]


def submit(cluster: SlurmCluster, *arguments: str) -> tuple[int, str]:
    """Return the arguments of `run --site slurm` on two nodes."""
    two = ("slurm.nodes=2", "launch.ranks_per_node=2")
    return cluster.do("run", "--site", "slurm", *argv(*two), *arguments)


def paths_of(cluster: SlurmCluster, run_id: str) -> RunPaths:
    return RunPaths(cluster.folder / "runs" / run_id)


def state(paths: RunPaths) -> RunState:
    found = read_json(RunState, paths.state)
    assert found is not None
    return found


def job_of(paths: RunPaths) -> RunJob:
    found = read_json(RunJob, paths.job)
    assert found is not None
    return found


def wait_for_steps(paths: RunPaths, *, beyond: int = 0) -> None:
    """Wait until the run has trained beyond a step."""

    def trained() -> bool:
        rows = metrics(paths.root) if paths.metrics.exists() else []
        return any(row["step"] > beyond + 3 for row in rows)

    wait_until(trained, what=f"a step beyond {beyond}")


def wait_for_end(paths: RunPaths) -> RunState:
    """Wait for the run's final state and return it."""
    wait_until(lambda: state(paths).exit_class is not None, what="the end")
    return state(paths)


def has_no_run(machine: Machine) -> bool:
    return not machine.exec(["pgrep", "-f", "payload[.](train|supervise)"], check=False).stdout


def newest_step(paths: RunPaths) -> int:
    checkpoint = paths.newest_checkpoint()
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step_"))


def test_two_nodes_of_a_job_train_what_one_process_trains(
    cluster: SlurmCluster, one_process: list[float]
) -> None:
    code, output = submit(cluster, "--run-id", "job", "--set", "train.steps=6")
    assert code == ExitCode.OK and "is running on node-[1-2]" in output, output
    job = paths_of(cluster, "job")
    result = summary(job.root)
    assert (result["world_size"], result["nodes"], result["ranks_identical"]) == (4, 2, True)
    plan = json.loads(job.plan.read_text(encoding="utf-8"))
    assert plan["launcher"] == "srun" and plan["ssh"] == []
    assert losses(job.root) == pytest.approx(one_process[:6], rel=1e-6)


def test_a_run_within_an_allocation_takes_its_nodes(
    cluster: SlurmCluster, one_process: list[float]
) -> None:
    settings = argv("train.steps=6", "launch.ranks_per_node=2")
    code, output = cluster.do(
        "run", "--inventory", "slurm", "--run-id", "within", *settings, before=SALLOC
    )
    assert (
        code == ExitCode.OK
        and "4 rank(s) through srun" in output
        and "--inventory slurm, job" in output
    ), output
    run = paths_of(cluster, "within").root
    result = summary(run)
    assert (result["world_size"], result["nodes"], result["ranks_identical"]) == (4, 2, True)
    assert losses(run) == pytest.approx(one_process[:6], rel=1e-6)


def test_torchrun_s_agents_within_an_allocation_train_what_one_process_trains(
    cluster: SlurmCluster, one_process: list[float]
) -> None:
    settings = argv("train.steps=6", "launch.ranks_per_node=2", "launch.launcher=torchrun")
    where = ("--inventory", "slurm")
    code, output = cluster.do("plan", *where, *settings, before=SALLOC)
    assert code == ExitCode.OK, output
    assert "/srun --nodes=2 --ntasks=2 --ntasks-per-node=1" in output, output
    code, output = cluster.do("run", *where, "--run-id", "agents", *settings, before=SALLOC)
    assert code == ExitCode.OK and "4 rank(s) through torchrun" in output, output
    run = paths_of(cluster, "agents").root
    result = summary(run)
    assert (result["world_size"], result["nodes"], result["ranks_identical"]) == (4, 2, True)
    assert losses(run) == pytest.approx(one_process[:6], rel=1e-6)
    cores = {rank.rank: rank.cores for rank in load_ranks(RunPaths(run).ranks)}
    assert cores[0] != cores[1] and (cores[2], cores[3]) == (cores[0], cores[1])


@contextmanager
def within_salloc(
    cluster: SlurmCluster, *arguments: str, salloc: tuple[str, ...] = SALLOC
) -> Iterator[Future[tuple[int, str]]]:
    """Run with command and supervisor on the login node until the block ends."""
    with ThreadPoolExecutor() as pool:
        try:
            yield pool.submit(cluster.do, "run", "--inventory", "slurm", *arguments, before=salloc)
        except BaseException:
            cluster.slurm("scancel --user=trainer")  # otherwise the command would be waited for
            raise


def require_nothing_left(cluster: SlurmCluster) -> None:
    """Fail if a process of a run remains on a machine."""
    for machine in (cluster.login, *cluster.nodes):
        left = machine.exec(["pgrep", "-fa", "payload[.](train|supervise)"], check=False)
        assert not left.stdout, left.stdout


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.seeds)])
def test_ctrl_c_on_the_login_node_saves_and_stops_a_run_within_salloc(
    cluster: SlurmCluster, launcher: str
) -> None:
    run, two = f"typed-{launcher}", ("launch.ranks_per_node=2", f"launch.launcher={launcher}")
    paths = paths_of(cluster, run)
    with within_salloc(cluster, "--run-id", run, *argv(*LONG, *two)) as command:
        wait_for_steps(paths)
        assert state(paths).node == "node-0"
        cluster.login.exec(["pkill", "-INT", "-f", "^python3 -m payload[.]orchestrate run"])
        code, output = command.result()
    assert code == INTERRUPTED, output
    assert (state(paths).status, state(paths).error) == ("stopped", None), output
    stopped = newest_step(paths)
    assert stopped > 3 and stopped == metrics(paths.root)[-1]["step"]
    require_nothing_left(cluster)
    more = ("--resume", run, "--set", f"train.steps={stopped + 3}")
    with within_salloc(cluster, *more) as command:
        code, output = command.result()
    assert code == ExitCode.OK, output
    rows = [row["step"] for row in metrics(paths.root) if "loss" in row]
    assert rows == list(range(1, stopped + 4)), "a step is missing or repeated"
    require_nothing_left(cluster)


@pytest.mark.seeds
def test_a_run_within_salloc_saves_before_its_time_is_over_and_sees_a_frozen_first_node(
    cluster: SlurmCluster,
) -> None:
    steps, _, no_eval = LONG
    settings = argv(
        *(steps, no_eval, "train.checkpoint_every=20", "launch.ranks_per_node=2"),
        *("limits.max_restarts=0", f"limits.hang_timeout_s={HANG_S}"),
    )
    paths = paths_of(cluster, "timed")
    with within_salloc(
        cluster, "--run-id", "timed", *settings, salloc=(*SALLOC, "--time=1")
    ) as command:
        code, output = command.result()
    assert code == ExitCode.BUDGET and "time limit is near" in output, output
    stopped = newest_step(paths)
    assert stopped > 3 and stopped == metrics(paths.root)[-1]["step"]
    require_nothing_left(cluster)
    first = cluster.nodes[0]
    with within_salloc(cluster, "--resume", "timed") as command:
        wait_until(lambda: newest_step(paths) > stopped, what="a checkpoint")
        first.freeze()
        try:
            code, output = command.result()
        finally:
            first.thaw()
    assert code == ExitCode.HANG, output
    assert "does not answer): node-1" in str(state(paths).error)
    wait_until(
        lambda: cluster.slurm("sinfo -h -o %t:%D") == "idle:2",
        what="both nodes",
    )
    require_nothing_left(cluster)


def test_one_node_of_salloc_has_the_ranks_and_the_login_node_has_none(
    cluster: SlurmCluster,
) -> None:
    one, settings = (*SALLOC[:2], "--nodes=1", *SALLOC[3:]), ("train.steps=6",)
    where, paths = ("--inventory", "slurm", "--run-id", "alone"), paths_of(cluster, "alone")
    code, output = cluster.do("run", *where, *argv(*settings, "launch.launcher=mpirun"), before=one)
    assert code == ExitCode.CONFIG and "would start the ranks on node-0" in output, output
    code, output = cluster.do("run", *where, *argv(*settings), before=one)
    assert code == ExitCode.OK and "through srun" in output, output
    assert {rank.node for rank in load_ranks(paths.ranks)} <= {"node-1", "node-2"}
    require_nothing_left(cluster)


@pytest.mark.seeds
def test_torchrun_in_a_job_a_killed_rank_is_41_and_a_frozen_node_42(
    cluster: SlurmCluster, one_process: list[float]
) -> None:
    settings = (
        *("launch.launcher=torchrun", "train.steps=1000000", "train.checkpoint_every=20"),
        *("train.eval_every=0", "limits.max_restarts=1", f"limits.hang_timeout_s={HANG_S}"),
    )
    chosen = [word for setting in settings for word in ("--set", setting)]
    code, output = submit(cluster, "--run-id", "torn", "--detach", *chosen)
    assert code == ExitCode.OK, output
    paths, node = paths_of(cluster, "torn"), cluster.nodes[1]
    wait_until(lambda: newest_step(paths) > 0, what="a checkpoint")
    node.exec(["pkill", "-KILL", "-o", "-f", "^[^ ]*python[^ ]* -m payload[.]train "])
    wait_until(lambda: state(paths).attempt == 2, what="a restart")
    note = str(state(paths).note)
    assert "on node-2 was killed by signal 9 (SIGKILL)" in note and "(restart 1 of 1)" in note
    seen = len(metrics(paths.root))
    wait_until(lambda: len(metrics(paths.root)) > seen, what="further steps")
    node.freeze()
    try:
        ended = wait_for_end(paths)
    finally:
        node.thaw()
    assert ended.exit_class == "hang", ended
    assert "does not answer): node-2" in str(ended.error)
    code, output = cluster.do("attach", "torn")
    assert code == ExitCode.HANG, output
    wait_until(
        lambda: cluster.slurm("sinfo -h -o %t:%D") == "idle:2",
        what="both nodes",
    )
    steps = max(metrics(paths.root)[-1]["step"] + 20, len(one_process))
    more = ("--set", f"train.steps={steps}")
    code, output = cluster.do("run", "--site", "slurm", "--resume", "torn", *more)
    assert code == ExitCode.OK, output
    trained = losses(paths.root)
    assert len(trained) == steps
    assert trained[: len(one_process)] == pytest.approx(one_process, rel=1e-6)
    require_nothing_left(cluster)


@pytest.mark.seeds
def test_torchrun_s_ranks_save_when_slurm_tells_the_first_node_s_agent_alone(
    cluster: SlurmCluster,
) -> None:
    """As with proctrack/cgroup; the rig has linuxproc, which signals all descendants."""
    settings = (*LONG, "launch.launcher=torchrun", "limits.max_restarts=0")
    long = [word for each in settings for word in ("--set", each)]
    code, output = submit(cluster, "--run-id", "told", "--detach", *long)
    assert code == ExitCode.OK, output
    paths = paths_of(cluster, "told")
    wait_for_steps(paths)
    task = "^[^ ]*python[^ ]* -m payload[.]supervise[.]agents --task "
    cluster.nodes[1].exec(["pkill", "-TERM", "-f", task])
    seen = metrics(paths.root)[-1]["step"]
    wait_for_steps(paths, beyond=seen)
    cluster.nodes[0].exec(["pkill", "-TERM", "-f", task])
    ended = wait_for_end(paths)
    assert ended.exit_class == "rank_lost", ended
    assert "rank 0 on node-1 was sent SIGTERM" in str(ended.error), ended
    assert "the ranks saved and ended" in str(ended.error), ended
    assert newest_step(paths) == metrics(paths.root)[-1]["step"] > seen


@pytest.mark.seeds
def test_torchrun_s_stuck_ranks_end_after_their_supervisor_while_the_allocation_stays(
    cluster: SlurmCluster,
) -> None:
    settings = argv(*LONG, "launch.ranks_per_node=2", "launch.launcher=torchrun")
    run = ["run", "--inventory", "slurm", "--run-id", "orphans", "--grace", "5", *settings]
    typed = f"{shlex.join(['python3', '-m', 'payload.orchestrate', *run])}; sleep 300"
    asked = ["salloc", "--quiet", "--nodes=2", "--exclusive", "--mem=0", "sh", "-c", typed]
    paths, (first, second) = paths_of(cluster, "orphans"), cluster.nodes
    with ThreadPoolExecutor() as pool:
        allocation = pool.submit(cluster.type, asked, timeout_s=DEADLINE_S)
        wait_for_steps(paths)
        second.exec(["pkill", "-STOP", "-f", "^[^ ]*python[^ ]* -m payload[.]train "])
        supervisor = "^[^ ]*python[^ ]* -P -m payload[.]supervise --run-dir "
        cluster.login.exec(["pkill", "-KILL", "-f", supervisor])
        for node in (first, second):
            wait_until(partial(has_no_run, node), what=f"{node.name}'s end")
        assert not allocation.done()
        cluster.login.exec(["pkill", "-x", "sleep"])
        allocation.result()


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.seeds)])
def test_a_job_that_is_cancelled_or_queued_again_saves_and_goes_on(
    cluster: SlurmCluster, launcher: str
) -> None:
    settings = (*LONG, f"launch.launcher={launcher}")
    long = [word for setting in settings for word in ("--set", setting)]
    run = f"kept-{launcher}"
    code, output = submit(cluster, "--run-id", run, "--detach", *long)
    assert code == ExitCode.OK, output
    paths = paths_of(cluster, run)
    wait_for_steps(paths)
    cluster.slurm(f"scancel {job_of(paths).job_id}")
    ended = wait_for_end(paths)
    assert ended.exit_class == "rank_lost" and "stopped by the system" in str(ended.error)
    first = newest_step(paths)
    assert first > 3
    code, output = cluster.do("attach", run)
    assert code == ExitCode.RANK_LOST and f"run --resume {run} --site slurm" in output, output

    code, output = cluster.do("run", "--site", "slurm", "--resume", run, "--detach")
    assert code == ExitCode.OK, output
    wait_for_steps(paths, beyond=first)
    job = job_of(paths)
    cluster.slurm(f"scontrol requeue {job.job_id}")
    assert wait_for_end(paths).exit_class == "rank_lost"
    second = newest_step(paths)
    assert second > first
    wait_until(
        lambda: "PENDING" in cluster.slurm(f"squeue -h -j {job.job_id} -o %T"),
        what="the queue",
    )
    code, output = cluster.do("status", run)
    assert code == ExitCode.OK, output
    # By default Slurm would let it wait for two minutes.
    cluster.slurm(f"scontrol update jobid={job.job_id} starttime=now")
    wait_for_steps(paths, beyond=second)
    assert job_of(paths).job_id == job.job_id and job_of(paths).restarts == 1
    code, output = cluster.do("stop", run)
    assert code == ExitCode.OK and "saving and stopping" in output, output
    assert (state(paths).status, state(paths).exit_class) == ("stopped", "ok")
    assert newest_step(paths) > second
    rows = [row["step"] for row in metrics(paths.root) if "loss" in row]
    assert rows == list(range(1, newest_step(paths) + 1)), "a step is missing or repeated"


def test_a_node_that_goes_down_is_41_and_a_near_time_limit_is_50(cluster: SlurmCluster) -> None:
    settings = (*LONG[:1], "train.checkpoint_every=20", LONG[2], "limits.max_restarts=0")
    long = [word for setting in settings for word in ("--set", setting)]
    code, output = submit(cluster, "--run-id", "down", "--detach", *long)
    assert code == ExitCode.OK, output
    paths = paths_of(cluster, "down")
    wait_until(lambda: newest_step(paths) > 0, what="a checkpoint")
    node = cluster.nodes[1]
    node.kill()
    ended = wait_for_end(paths)
    assert ended.exit_class == "rank_lost" and "node-2" in str(ended.error), ended
    kept = newest_step(paths)
    assert kept > 0
    node.restore_link()
    node.start()
    cluster.start_node(node)
    cluster.slurm("scontrol update nodename=node-2 state=resume")
    wait_until(
        lambda: cluster.slurm("sinfo -h -o %t:%D") == "idle:2",
        what="both nodes",
    )
    code, output = cluster.do(
        "run", "--site", "slurm", "--resume", "down", "--set", "slurm.time=1", timeout_s=DEADLINE_S
    )
    assert code == ExitCode.BUDGET, output
    assert "time limit is near" in output and "--site slurm --resume down" in output
    stopped = newest_step(paths)
    assert stopped > kept
    more = ("--set", "slurm.time=5", "--set", f"train.steps={stopped + 3}")
    code, output = cluster.do("run", "--site", "slurm", "--resume", "down", *more)
    assert code == ExitCode.OK, output
    result = summary(paths.root)
    assert (result["status"], result["steps"]) == ("finished", stopped + 3)


def test_what_slurm_refuses_is_one_line_and_leaves_no_run(cluster: SlurmCluster) -> None:
    code, output = submit(cluster, "--run-id", "refused", "--set", "slurm.partition=nope")
    assert code == ExitCode.CONFIG, output
    assert "error: slurm.partition = 'nope': Invalid partition name specified" in output
    assert "This cluster has main." in output
    assert not paths_of(cluster, "refused").root.exists()
    code, output = submit(cluster, "--run-id", "refused", "--set", "launch.launcher=mpirun")
    assert code == ExitCode.CONFIG and "Use 'auto', 'srun' or 'torchrun'" in output, output
    code, output = cluster.do("run", "--inventory", "slurm", *argv())
    assert code == ExitCode.CONFIG and "this is not a Slurm job" in output, output


def test_a_job_that_waits_says_why_and_can_be_cancelled(cluster: SlurmCluster) -> None:
    eight = ("--set", "slurm.nodes=4", "--set", "batch.micro_batch_size=1")
    code, output = submit(cluster, "--run-id", "waits", "--detach", *eight)
    assert code == ExitCode.OK, output
    # Ctrl-C detaches the command.
    code, output = cluster.do(
        "attach", "waits", before=("timeout", "--foreground", "--signal=INT", "20")
    )
    assert code in (INTERRUPTED, 124) and "detached; run waits continues" in output, output
    # The reason depends on which part of Slurm examined the job last.
    assert any(
        f"is pending ({reason}): {PENDING_REASONS[reason]}" in output
        for reason in ("PartitionConfig", "PartitionNodeLimit")
    ), output
    code, output = cluster.do("stop", "waits")
    assert code == ExitCode.OK and "cancelled before the run began" in output, output
