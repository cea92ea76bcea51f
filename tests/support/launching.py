"""Starts real training ranks for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

REPO = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DEADLINE_S = 300
NUM_VAL_TARGETS = 999
"""Every validation token of `make_data_folder` but the first."""

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
    """The environment of a rank on this machine: one thread, the loopback interface."""
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "I_MPI_HYDRA_IFACE": "lo",
        **extra,
    }


def mpirun(num_ranks: int, *program: str) -> list[str]:
    """The command that starts `num_ranks` ranks of a Python program."""
    if num_ranks == 1:
        return [sys.executable, *program]
    return ["mpirun", "-n", str(num_ranks), sys.executable, *program]


def torchrun(num_ranks: int, *program: str) -> list[str]:
    """The same by torch's own launcher."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "--master-port", str(free_port()), *program]


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to the end; what it printed is in the result."""
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
    runs: Mapping[Path, Sequence[str]], config: Path, *, num_ranks: int
) -> subprocess.CompletedProcess[str]:
    """Train one run after the other on the same ranks, each with overrides of its own.

    Most of the processor time of a short run is the start of its ranks.
    """
    each = [
        (free_port(), train_program(folder, config, *overrides)[2:])
        for folder, overrides in runs.items()
    ]
    result = run(mpirun(num_ranks, "-c", _SEVERAL, json.dumps(each)))
    assert result.returncode == 0, result.stderr + result.stdout
    return result


_SEVERAL = """
import json, os, sys
from payload.train.__main__ import main
for port, words in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = str(port)
    assert main(words, os.environ) == 0
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(reset_partial_state=True)
"""


def train_program(run_dir: Path, config: Path, *overrides: str) -> list[str]:
    """`python -m payload.train`, less the interpreter."""
    sets = [word for override in overrides for word in ("--set", override)]
    return ["-m", "payload.train", "--config", str(config), "--run-dir", str(run_dir), *sets]


def losses(run_dir: Path) -> list[float]:
    """Training losses of a run, by step."""
    rows = [row for row in metrics(run_dir) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def evaluations(run_dir: Path) -> list[float]:
    """Validation losses of a run, each over all of its validation tokens."""
    rows = [row for row in metrics(run_dir) if "val_loss" in row]
    assert {row["val_tokens"] for row in rows} == {NUM_VAL_TARGETS}
    return [row["val_loss"] for row in rows]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def summary(run_dir: Path) -> dict[str, Any]:
    """summary.json."""
    loaded: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return loaded
