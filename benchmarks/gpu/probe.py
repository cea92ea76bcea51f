"""Describe the device as JSON: names, versions, and the error of an fp32 matmul.

It is a separate process, as a broken driver can hang it.

    python -m benchmarks.gpu.probe cuda FILE
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import describe_machine

_SIZE = 2048
_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def main(device: str, path: Path) -> None:
    """Write the facts to `path`."""
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    facts["has_gpu"] = torch.cuda.is_available()
    if device == "cuda" and facts["has_gpu"]:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        }
    elif device == "cpu":
        facts |= {"device": describe_machine()}
    if "device" in facts:
        facts["fp32_error"] = fp32_error(torch.device(device))
    path.write_text(json.dumps(facts), encoding="utf-8")


def fp32_error(device: torch.device) -> float:
    """Return the norm of an fp32 matmul's error relative to float64.

    It is about 1e-6, and 3e-4 with TF32.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIZE, _SIZE, generator=generator).to(device) for _ in range(2))
    reference = left.double() @ right.double()
    return float((left @ right - reference).norm() / reference.norm())


def _driver() -> str:
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return done.stdout.splitlines()[0].strip() if done.stdout else "unknown"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
