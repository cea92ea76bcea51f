"""Starts real training ranks for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support import fork_server, forked
from tests.support.ports import free_port
from tests.support.several_runs import Planned
from tests.support.waiting import DEADLINE_S

REPO = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PYTHON = (sys.executable, "-I", "-S", forked.__file__)
"""Runs `-m MODULE` or a file like Python, in a fork that has imported torch."""
SEVERAL = ("-m", "tests.support.several_runs")
NUM_VAL_TARGETS = 999
"""Every validation token of `make_data_folder` except the first."""

TINY_RUN = """
[data]
dir = "{data}"
sequence_length = 32
[model]
preset = "tiny"
n_layer = 2
n_head = 2
n_embd = 32
[batch]
global_batch_size = 8
micro_batch_size = 2
[optimizer]
lr = 1e-3
min_lr = 1e-4
[schedule]
warmup_steps = 2
decay_steps = 20
[train]
steps = 20
eval_every = 0
checkpoint_every = 10
[precision]
dtype = "fp32"
"""


def rank_env(**extra: str) -> dict[str, str]:
    """Return the environment of a rank on this machine: one thread, loopback interface, no hub."""
    every = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        **every,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "I_MPI_HYDRA_IFACE": "lo",
        forked.VARIABLE: fork_server.server_name(**every),
        **extra,
    }


def mpirun(num_ranks: int, *program: str) -> list[str]:
    """Return the command that starts `num_ranks` ranks of a Python program."""
    if num_ranks == 1:
        return [*PYTHON, *program]
    return ["mpirun", "-n", str(num_ranks), *PYTHON, *program]


def torchrun(num_ranks: int, *program: str) -> list[str]:
    """Return the command that starts the ranks by torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "--master-port", str(free_port()), *program]


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command; the result has its output."""
    return subprocess.run(
        command,
        env=env or rank_env(),
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def train(
    run_dir: Path,
    config: Path,
    *overrides: str,
    num_ranks: int = 1,
) -> subprocess.CompletedProcess[str]:
    """Train through mpirun and expect success."""
    result = run(mpirun(num_ranks, *train_program(run_dir, config, *overrides)))
    assert result.returncode == 0, result.stderr + result.stdout
    return result


def train_several(
    runs: Mapping[Path, Sequence[str]],
    config: Path | Mapping[Path, Path],
    *,
    num_ranks: int,
    env: Mapping[str, str] | None = None,
    spoiled: Mapping[Path, tuple[int, str]] | None = None,
    program: Sequence[str] = SEVERAL,
) -> dict[Path, str]:
    """Train runs in turn on the same ranks, each with its own overrides; return their outputs.

    The start of the ranks takes most of the CPU time of a short run. `config` is one for all runs
    or one per run. Runs in `spoiled` must fail: see `Planned`. `program` ends with
    `several_runs.main`.
    """
    configs = {folder: config if isinstance(config, Path) else config[folder] for folder in runs}
    planned = [
        Planned(
            port=free_port(),
            printed=str(_printed(folder)),
            arguments=train_program(folder, configs[folder], *overrides)[2:],
            spoiled=(spoiled or {}).get(folder),
        )
        for folder, overrides in runs.items()
    ]
    _run_several(planned, num_ranks=num_ranks, env=env, program=program)
    return {folder: _output(_printed(folder)) for folder in runs}


def evaluate_several(arguments: Mapping[Path, Sequence[str]], *, num_ranks: int) -> dict[Path, str]:
    """Evaluate checkpoints in turn on the same ranks; return the output of each.

    A key is the path of the output files without the suffix of the rank.
    """
    planned = [
        Planned(port=free_port(), printed=str(path), arguments=list(words), evaluates=True)
        for path, words in arguments.items()
    ]
    _run_several(planned, num_ranks=num_ranks)
    return {path: _output(path) for path in arguments}


def _run_several(
    planned: Sequence[Planned],
    *,
    num_ranks: int,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = SEVERAL,
) -> None:
    text = json.dumps([asdict(each) for each in planned])
    result = run(mpirun(num_ranks, *program, text), env=env)
    outputs = [_output(Path(each.printed)) for each in planned]
    said = "\n".join([result.stderr, result.stdout, *outputs])
    assert result.returncode == 0, f"exit code {result.returncode}\n{said}"


def _printed(folder: Path) -> Path:
    """Return `Planned.printed` of a run."""
    return folder.with_name(f"{folder.name}.printed")


def _output(printed: Path) -> str:
    """Return the output of all ranks so far."""
    return "".join(path.read_text() for path in sorted(printed.parent.glob(f"{printed.name}.*")))


def train_program(run_dir: Path, config: Path, *overrides: str) -> list[str]:
    """Return `-m payload.train` with its arguments."""
    sets = [word for override in overrides for word in ("--set", override)]
    return ["-m", "payload.train", "--config", str(config), "--run-dir", str(run_dir), *sets]


def losses(run_dir: Path) -> list[float]:
    """Return the training losses of a run by step."""
    rows = [row for row in metrics(run_dir) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def evaluations(run_dir: Path) -> list[float]:
    """Return the validation losses of a run by step, each over all validation tokens."""
    rows = [row for row in metrics(run_dir) if "val_loss" in row]
    assert {row["val_tokens"] for row in rows} == {NUM_VAL_TARGETS}
    return [row["val_loss"] for row in rows]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return all rows of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def summary(run_dir: Path) -> dict[str, Any]:
    """Return summary.json."""
    loaded: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return loaded
