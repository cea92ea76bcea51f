"""The trackers' real packages for tests, each in a separate folder of the tests' cache.

They are not in the lock, because they are large and their requirements conflict.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import DEADLINE_S

_CACHE = Path.home() / ".cache" / "tileforge" / "trackers"
PACKAGES = {
    "trackio": "trackio==0.43.0",
    "tensorboard": "tensorboard==2.21.0",
    "wandb": "wandb==0.31.0",
    "mlflow": "mlflow-skinny==3.17.2",
}


def package_folder(tracker: str) -> Path:
    """Return the folder with a tracker's package and its requirements, installed on first use."""
    package = PACKAGES[tracker]
    folder = _CACHE / package.replace("==", "-")
    if not (folder / ".done").exists():
        subprocess.run(
            [
                *(sys.executable, "-m", "uv", "pip", "install", "--quiet"),
                *("--python", sys.executable, "--target", str(folder), package),
            ],
            check=True,
            timeout=DEADLINE_S,
        )
        (folder / ".done").touch()
    return folder


def environment(tracker: str, **variables: str) -> dict[str, str]:
    """Return an environment in which the tracker's package can be imported."""
    # MLflow's newest releases require this for a file store.
    variables["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return {**os.environ, "PYTHONPATH": str(package_folder(tracker)), **variables}
