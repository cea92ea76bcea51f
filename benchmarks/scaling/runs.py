"""Processes of `benchmarks.scaling`: trainers and exchanges under mpirun, each rank on one core."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import REPO
from benchmarks.meshes import mesh_settings
from benchmarks.scaling.hosts import Hosts
from benchmarks.scaling.watch import Watched, watch
from payload.config.run_config import parse_run_config
from payload.estimates.gradient_buckets import buckets
from payload.launch.environment import (
    Rendezvous,
    common_environment,
    launcher_environment,
    rank_environment,
)
from payload.launch.launcher import Reach
from payload.launch.launchers.registry import find
from payload.launch.ranks import Rank
from payload.models.gpt2.spec import PRESETS
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.run_record.run_files import RunPaths

_TIMEOUT_S = 900
_MANY_STEPS = 100_000
_PORT_OF_HOSTS = 29400


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of each rank."""

    model: str
    data: str
    micro_batch_size: int
    accumulation: int
    sequence_length: int
    dtype: str
    grad_dtype: str
    connections: int
    steps: int
    """Number of measured steps, which follow one warm-up step."""
    mesh: str = "replicate"
    """Short name of the mesh, as in `benchmarks.meshes`."""
    program: tuple[str, ...] = ("payload.train",)
    """The module that a rank runs, and its first arguments."""
    python_path: str = str(REPO)

    def config(self, ranks: int) -> str:
        """Return the text of run.toml."""
        batch = self.micro_batch_size * self.accumulation * ranks
        sections: dict[str, dict[str, object]] = {
            "data": {"dir": self.data, "sequence_length": self.sequence_length},
            "model": {"preset": self.model},
            "batch": {"global_batch_size": batch, "micro_batch_size": self.micro_batch_size},
            "precision": {"dtype": self.dtype},
            "distributed": {"grad_dtype": self.grad_dtype, **self._mesh_settings()},
            "train": {
                # The run is killed after its steps, so it never writes its last checkpoint.
                "steps": _MANY_STEPS,
                "eval_every": 0,
                "eval_tokens": 1,
                "checkpoint_every": 0,
                "keep_checkpoints": 1,
                "sync_check_every": 0,
            },
        }
        lines = []
        for section, keys in sections.items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        return "\n".join(lines) + "\n"

    def _mesh_settings(self) -> dict[str, object]:
        found = mesh_settings(self.mesh)
        return {key.removeprefix("distributed."): each for key, each in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Where ranks run: `alone`, `side-by-side`, `loopback`, `hosts:GBIT`, `exchange:RANKS[:GBIT]`.

    `loopback:RANKS` has another number of ranks. `side-by-side` is two independent runs of one
    rank each.
    """

    name: str
    ranks: int
    gbit_per_s: float | None
    """Rate of each host's cable in each direction; None if all ranks are on one machine."""
    exchanges_only: bool = False

    @classmethod
    def parse(cls, name: str) -> Arrangement:
        """Parse the name of an arrangement. Raises ValueError."""
        kind, *numbers = name.split(":")
        if kind == "exchange" and len(numbers) in (1, 2) and int(numbers[0]) > 1:
            gbit = float(numbers[1]) if len(numbers) == 2 else None
            return cls(name=name, ranks=int(numbers[0]), gbit_per_s=gbit, exchanges_only=True)
        if kind == "hosts" and len(numbers) == 1:
            return cls(name=name, ranks=2, gbit_per_s=float(numbers[0]))
        if kind == "loopback" and len(numbers) == 1 and int(numbers[0]) > 1:
            return cls(name=name, ranks=int(numbers[0]), gbit_per_s=None)
        ranks = {"alone": 1, "side-by-side": 1, "loopback": 2}
        if numbers or kind not in ranks:
            raise ValueError(name)
        return cls(name=name, ranks=ranks[kind], gbit_per_s=None)


def measure(arrangement: Arrangement, work: Work) -> dict[str, Any]:
    """Return a record: the arrangement, the work, and the times of its steps or exchanges."""
    load = os.getloadavg()[0]
    network = (
        Hosts(arrangement.ranks, gbit_per_s=arrangement.gbit_per_s)
        if arrangement.gbit_per_s is not None
        else nullcontext()
    )
    with tempfile.TemporaryDirectory(prefix="tileforge-scaling-") as folder, network as hosts:
        if arrangement.exchanges_only:
            found = _exchange(arrangement, work, hosts=hosts, folder=Path(folder))
        elif arrangement.name == "side-by-side":
            found = _train(work, [[0], [1]], hosts=None, folder=Path(folder))
        else:
            cores = [_cores(arrangement.ranks)]
            found = _train(work, cores, hosts=hosts, folder=Path(folder))
    return {
        "arrangement": arrangement.name,
        "ranks": arrangement.ranks,
        "gbit_per_s": arrangement.gbit_per_s,
        "model": work.model,
        "micro_batch_size": work.micro_batch_size,
        "accumulation": work.accumulation,
        "sequence_length": work.sequence_length,
        "dtype": work.dtype,
        "grad_dtype": work.grad_dtype,
        "connections": work.connections,
        "load_before": round(load, 2),
        **found,
    }


def _train(
    work: Work, runs: Sequence[Sequence[int]], *, hosts: Hosts | None, folder: Path
) -> dict[str, Any]:
    """Train one run per list of cores at the same time; return rank 0's steps after the first."""
    watched: list[Watched] = []
    with _ended() as processes:
        try:
            for index, cores in enumerate(runs):
                run_dir = folder / f"run-{index}"
                config = folder / f"run-{index}.toml"
                config.write_text(work.config(len(cores)), encoding="utf-8")
                program = ["-m", *work.program, "--config", str(config), "--run-dir", str(run_dir)]
                process = _start(
                    program, cores, run_dir=run_dir, work=work, hosts=hosts, folder=folder
                )
                processes.append(process)
                watched.append(Watched(process, RunPaths(run_dir), ranks=len(cores)))
            if not watch(watched, steps=work.steps + 1, timeout_s=_TIMEOUT_S):
                for run in watched:
                    if run.process.poll() is not None:
                        _finish(run.process)
                raise SystemExit(
                    f"error: a run did not take {work.steps + 1} steps within {_TIMEOUT_S} s."
                )
        finally:
            # A graceful stop would save a checkpoint first.
            for run in watched:
                run.kill()
    rows = [row for run in watched for row in run.rows[1 : work.steps + 1]]
    cpu_s = [seconds for run in watched for seconds in run.step_cpu_s()[: work.steps]]
    return {
        "step_s": [round(row["step_time_s"], 4) for row in rows],
        "sync_s": [round(row["sync_time_s"], 4) for row in rows],
        "cpu_s": [round(seconds, 2) for seconds in cpu_s],
        "last_loss": rows[-1]["loss"],
        "peak_bytes": max(run.peak_bytes for run in watched),
    }


def _cores(ranks: int) -> list[int]:
    """Return the core of each rank; ranks share cores if there are fewer cores."""
    return [rank % (os.cpu_count() or 1) for rank in range(ranks)]


def _exchange(
    arrangement: Arrangement, work: Work, *, hosts: Hosts | None, folder: Path
) -> dict[str, Any]:
    """Run only the gradients' all-reduces; those of one step all start together."""
    numbers = [bucket.elements for bucket in buckets(PRESETS[work.model])]
    request = {"numbers": numbers, "dtype": work.grad_dtype, "rounds": work.steps}
    program = ["-m", "benchmarks.scaling.exchange", json.dumps(request)]
    cores = _cores(arrangement.ranks)
    with _ended() as processes:
        process = _start(program, cores, run_dir=folder, work=work, hosts=hosts, folder=folder)
        processes.append(process)
        found: dict[str, Any] = json.loads(_finish(process).splitlines()[-1])
    return {"buckets": len(numbers), "numbers": sum(numbers), **found}


def _start(
    program: Sequence[str],
    cores: Sequence[int],
    *,
    run_dir: Path,
    work: Work,
    hosts: Hosts | None,
    folder: Path,
) -> subprocess.Popen[str]:
    """Start mpirun with one rank per core, in the environment of a planned run."""
    access = LocalAccess(os.environ)
    addresses = hosts.addresses if hosts else ["127.0.0.1"] * len(cores)
    nodes = [f"host-{index}" if hosts else "host-0" for index in range(len(cores))]
    interface = hosts.interface if hosts else "lo"
    # An interface that is named N times gets N connections to each other rank.
    several = dict.fromkeys(nodes, ",".join([interface] * work.connections))
    common = common_environment(
        run_id=run_dir.name,
        run_dir=str(run_dir),
        rendezvous=Rendezvous(
            address=addresses[0],
            port=_PORT_OF_HOSTS if hosts else _free_port(access),
            interfaces=several,
        ),
        malloc=parse_run_config(work.config(len(cores)), where="the benchmark").malloc(),
        tcmalloc=None,
        oversubscribed=len(cores) > len(set(cores)),
        python_path=work.python_path,
    )
    launcher = find("mpirun")
    mpirun = access.executable(launcher)
    argv = [*(hosts.enter(0) if hosts else []), mpirun]
    argv += [word for item in sorted(common.items()) for word in ("-genv", *item)]
    for index, core in enumerate(cores):
        rank = Rank(
            rank=index,
            node=nodes[index],
            node_rank=index if hosts else 0,
            local_rank=0 if hosts else index,
            numa_domain=None,
            cores=(core,),
            threads=1,
        )
        ranks_per_node = 1 if hosts else len(cores)
        own = rank_environment(
            rank, world_size=len(cores), ranks_per_node=ranks_per_node, interfaces=several
        )
        argv += [":"] if index else []
        argv += ["-host", addresses[index]] if hosts else []
        argv += ["-n", "1", *(word for item in sorted(own.items()) for word in ("-env", *item))]
        argv += ["taskset", "--cpu-list", str(core), sys.executable, *program]
    settings = launcher.settings(Reach(interface=interface))
    settings |= _by_exec(hosts, folder) if hosts else {}
    # mpirun searches PATH for its own programs.
    settings["PATH"] = f"{Path(mpirun).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return subprocess.Popen(
        argv,
        env=launcher_environment(os.environ, settings),
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _by_exec(hosts: Hosts, folder: Path) -> dict[str, str]:
    ssh = hosts.write_ssh(folder / "enter")
    return {"I_MPI_HYDRA_BOOTSTRAP": "ssh", "I_MPI_HYDRA_BOOTSTRAP_EXEC": str(ssh)}


def _free_port(access: LocalAccess) -> int:
    with access.reserve_port() as holder:
        return int(holder.getsockname()[1])


def _finish(process: subprocess.Popen[str]) -> str:
    """Return the process's output. Raises SystemExit with the last lines if it failed."""
    output, _ = process.communicate(timeout=_TIMEOUT_S)
    if process.returncode:
        tail = "\n".join(output.splitlines()[-15:])
        raise SystemExit(f"error: a run ended with status {process.returncode}:\n{tail}")
    return output


@contextmanager
def _ended() -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a list whose processes are killed at the end, with their child processes here."""
    processes: list[subprocess.Popen[str]] = []
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
