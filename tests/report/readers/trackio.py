"""Print the contents of trackio's database."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from pathlib import Path

if __name__ == "__main__":
    database = sqlite3.connect(next(Path(os.environ["TRACKIO_DIR"]).glob("*.db")))
    cursor = database.execute("select step, metrics from metrics order by id")
    rows = [(step, json.loads(values)) for step, values in cursor]
    logged = {
        tag: [[step, values[tag]] for step, values in rows if tag in values]
        for tag in ("loss", "val_loss")
    }
    configs = [json.loads(text) for (text,) in database.execute("select config from configs")]
    texts = ["config"] if any("optimizer.lr" in config for config in configs) else []
    texts += ["summary"] if any("summary/steps" in values for _, values in rows) else []
    sys.stdout.write(json.dumps([logged, texts]))
