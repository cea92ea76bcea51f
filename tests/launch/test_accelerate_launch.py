"""Accelerate itself accepts the config unchanged and forms the process group of the plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from payload.launch.launchers.registry import find
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.run_record.run_files import RunPaths
from tests.supervise.planned import plan_stand_in
from tests.support.waiting import DEADLINE_S

SCRIPT = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum")
if accelerator.is_main_process:
    print("RESULT", accelerator.distributed_type.value, accelerator.num_processes,
          accelerator.mixed_precision, total.item())
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_accelerate_launch_starts_all_ranks_from_the_heads_config(tmp_path: Path) -> None:
    paths: RunPaths = plan_stand_in(tmp_path / "run", ranks=2)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    bin_dir = str(Path(LocalAccess(os.environ).executable(find("mpirun"))).parent)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", str(paths.accelerate_config(0)), str(script)),
        ],
        env={**os.environ, "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "RESULT MULTI_CPU 2 bf16 3.0" in ended.stdout
