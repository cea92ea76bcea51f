"""Trackers' real packages for tests: each in a folder of its own in the tests' cache.

They are large, and each wants its own versions of what others need: none is in the lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_CACHE = Path.home() / ".cache" / "tileforge" / "trackers"
PACKAGES = {
    "trackio": "trackio==0.43.0",
    "tensorboard": "tensorboard==2.21.0",
    "wandb": "wandb==0.31.0",
    "mlflow": "mlflow-skinny==3.17.2",
}


def package_folder(tracker: str) -> Path:
    """Return the folder with a tracker's package and all that it needs; installs it once."""
    package = PACKAGES[tracker]
    folder = _CACHE / package.replace("==", "-")
    if not (folder / ".done").exists():
        subprocess.run(
            [
                *(sys.executable, "-m", "uv", "pip", "install", "--quiet"),
                *("--python", sys.executable, "--target", str(folder), package),
            ],
            check=True,
            timeout=300,
        )
        (folder / ".done").touch()
    return folder


def environment(tracker: str, **more: str) -> dict[str, str]:
    """Return an environment in which the tracker's package can be imported."""
    # The file store of MLflow's newest releases has to be asked for.
    more["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return {**os.environ, "PYTHONPATH": str(package_folder(tracker)), **more}
