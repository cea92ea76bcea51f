"""Export to Slurm: a batch script that starts ranks with srun on nodes that share a folder."""

from __future__ import annotations

import math
import re
import shlex

from payload.launch.exports.base import Engine, ExportJob, source_environment_lines, source_lines
from payload.machines.inventory import RANK_PORTS

# Slurm signals the ranks to save this many seconds before the job ends. GPT-2 needs 5 s to save.
_NOTICE_S = 120


class Sbatch(Engine):
    """The engine Slurm; the payload is a checkout on a file system that all nodes share."""

    start = "sbatch FILE"
    takes_image = False
    storage = "a folder that all nodes share (default: the folder in which sbatch was called)"
    storage_pattern = re.compile(r"[\w./][\w./-]*", re.ASCII)
    storage_characters = "letters, digits and . / - _"

    def render(self, job: ExportJob) -> str:
        """Return the text of the batch script."""
        venv, checkout = '"$checkout"/.venv', '"$checkout"'
        port = f"{RANK_PORTS.start} + SLURM_JOB_ID % {len(RANK_PORTS)}"
        folder = "$SLURM_SUBMIT_DIR" if job.storage is None else job.storage
        exports = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in job.environment.items()
        )
        return (
            "#!/bin/bash\n"
            + "".join(f"#SBATCH {shlex.quote(option)}\n" for option in _options(job))
            + "set -euo pipefail\n"
            "checkout=$SLURM_SUBMIT_DIR\n"
            f'cd "{folder}"\n'
            f'run_dir="$PWD/{job.run_dir}"\n'
            # Exported before the set-up, which runs Python in a folder that others can write.
            f"{exports}[ -x {venv}/bin/python ] || {source_lines(checkout, venv=venv)}"
            f"{source_environment_lines(checkout, venv=venv)}"
            'mkdir -p "$run_dir"\n'
            f"{job.config_lines('$run_dir/run.toml')}"
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            f"export MASTER_ADDR MASTER_PORT=$(({port}))\n"
            "# A run folder with a checkpoint in it is resumed.\n"
            f"srun --kill-on-bad-exit=1 --cpu-bind=cores --cpus-per-task={job.threads_per_rank} "
            'python3 -m payload.train --config "$run_dir/run.toml" --run-dir "$run_dir"\n'
            + _requeue(job)
        )


def _options(job: ExportJob) -> list[str]:
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--cpus-per-task={job.threads_per_rank}",
        "--hint=nomultithread",
        f"--mem={job.memory_gib_per_node}G",
        f"--output={job.name}-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=TERM@{_NOTICE_S}",
    ]
    if job.max_hours is not None and job.slurm.time is None:
        options.insert(6, f"--time={max(1, math.ceil(job.max_hours * 60))}")
    return [*options, *job.slurm.job_options()]


def _requeue(job: ExportJob) -> str:
    """Return shell text that requeues the job after its time limit has stopped it.

    If the run itself has a time limit, the text is empty, and the user resumes with `sbatch FILE`.
    """
    if job.max_hours is not None:
        return ""
    return (
        "# Stopped with a checkpoint by the time limit: the next job continues.\n"
        'if grep -q \'"status": "stopped"\' "$run_dir/summary.json"; then\n'
        '  scontrol requeue "$SLURM_JOB_ID"\n'
        "fi\n"
    )


ENGINE = Sbatch()
