"""A peer for tests, which writes the report of a peer without training.

python -m tests.benchmarks.reporting_peer WORK
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.peers.work import Work

if __name__ == "__main__":
    work = Work.of(sys.argv[1])
    report = {"took_s": 2.0, "steps": work.steps, "versions": {"numpy": "1.0"}}
    Path(work.report).write_text(json.dumps(report), encoding="utf-8")
