"""A real run of two ranks that a real Prometheus scrapes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.monitor.local import local_stack
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.run_record.run_files import RunPaths
from tests.monitoring.watched import Gpus, Watched, short_thresholds
from tests.supervise.planned import REPO, wait_for_steps
from tests.support.launching import TINY_RUN
from tests.support.waiting import DEADLINE_S


@pytest.fixture(scope="module")
def watched(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A long run, scraped by a Prometheus whose alerts have short thresholds."""
    folder = tmp_path_factory.mktemp("watched")
    config = folder / "run.toml"
    config.write_text(TINY_RUN.format(data=tiny_data), encoding="utf-8")
    settings = (
        *("train.steps=1000000", "train.eval_every=20", "train.eval_tokens=256"),
        *("train.checkpoint_every=5", "train.keep_checkpoints=2", "limits.max_hours=5"),
        *("limits.hang_timeout_s=500", "launch.ranks_per_node=2", "launch.threads_per_rank=1"),
        f"storage.results={folder / 'store'}",
    )
    orchestrate = [sys.executable, "-m", "payload.orchestrate"]
    runs_dir = ["--runs-dir", str(folder / "runs")]
    start = [*orchestrate, "run", "--config", str(config), "--run-id", "watched", "--detach"]
    start += [*runs_dir, "--inventory", "local"]
    start += [argument for each in settings for argument in ("--set", each)]
    subprocess.run(start, cwd=REPO, check=True, timeout=DEADLINE_S, capture_output=True)
    paths = RunPaths(folder / "runs" / "watched")
    try:
        pids = wait_for_steps(paths, step=45)
        files = folder / "files"
        with Gpus() as gpus:
            short_thresholds(files, gpus=gpus.address)
            access = LocalAccess(os.environ)
            env = access.code_environment()
            with local_stack(
                paths, python=access.python, env=env, say=lambda _: None, files=files
            ) as pages:
                yield Watched(url=pages[-1].removesuffix("/alerts"), paths=paths, pids=pids)
    finally:
        stop = [*orchestrate, "stop", "watched", "--force", *runs_dir]
        subprocess.run(stop, cwd=REPO, timeout=DEADLINE_S, capture_output=True)
