"""Print the contents of MLflow's file store."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mlflow import MlflowClient

if __name__ == "__main__":
    folder = Path(sys.argv[1]) / "mlflow"
    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    run = client.get_run((folder / "mlflow_run_id").read_text(encoding="utf-8").strip())
    logged = {
        tag: [[each.step, each.value] for each in client.get_metric_history(run.info.run_id, tag)]
        for tag in ("loss", "val_loss")
    }
    texts = ["config"] if "optimizer.lr" in run.data.params else []
    texts += ["summary"] if "summary.steps" in run.data.tags else []
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["report.html"]
    sys.stdout.write(json.dumps([logged, texts]))
