"""Print the values that TensorBoard reads from a run's event files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

if __name__ == "__main__":
    found = EventAccumulator(str(Path(sys.argv[1]) / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    logged = {
        tag: [[each.step, each.value] for each in found.Scalars(tag)]
        for tag in ("loss", "val_loss")
    }
    sys.stdout.write(json.dumps([logged, found.Tags()["tensors"]]))
