"""An nvidia-smi program that prints given GPUs in the real formats."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

# In the format of nvidia-smi --format=csv,noheader,nounits: an L4 of a g2-standard-8 shows
# 23034 MiB and [N/A] for MIG, an A100 of an a2-highgpu-1g 40960 and Disabled.
L4 = {
    "name": "NVIDIA L4",
    "memory.total": "23034",
    "driver_version": "580.95.05",
    "compute_cap": "8.9",
    "mig.mode.current": "[N/A]",
    "ecc.mode.current": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0",
}
A100 = {
    **L4,
    "name": "NVIDIA A100-SXM4-40GB",
    "memory.total": "40960",
    "compute_cap": "8.0",
    "mig.mode.current": "Disabled",
}

_PROGRAM = """#!{python} -S
import json, sys, time
gpus, status, said, pause_s = json.loads({content!r})
time.sleep(pause_s)
if status or not gpus:
    print(said)
    sys.exit(status)
options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:])
assert options["format"] == "csv,noheader,nounits", sys.argv
for field in options["query-gpu"].split(","):
    if field not in gpus[0]:
        print(f'Field "{{field}}" is not a valid field to query.\\n')
        sys.exit(2)
if said:
    print(said)
for gpu in gpus:
    print(", ".join(gpu[field] for field in options["query-gpu"].split(",")))
"""


def make_nvidia_smi(
    folder: Path,
    *gpus: Mapping[str, str],
    status: int = 0,
    said: str = "",
    pause_s: float = 0.0,
) -> Path:
    """Put the program into `folder` and return the folder, for PATH.

    It prints `said` before its rows, or instead of them if it fails with `status`.
    """
    rows = [
        {"index": str(index), "uuid": f"GPU-{index:08x}-0000-0000-0000-000000000000", **gpu}
        for index, gpu in enumerate(gpus)
    ]
    content = json.dumps([rows, status, said, pause_s])
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(_PROGRAM.format(python=sys.executable, content=content), encoding="utf-8")
    program.chmod(0o755)
    return folder


def make_torch(folder: Path, *, version: str = "2.13.0+cu130", cuda: str | None = "13.0") -> Path:
    """Write a version.py of torch into `folder`, in the real format."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "version.py"
    path.write_text(
        f"from typing import Optional\n\n__version__ = {version!r}\ndebug = False\n"
        f"cuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n",
        encoding="utf-8",
    )
    return path
