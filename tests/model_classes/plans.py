"""Plans of saved models in a process that fails if anything imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.plan import plan_arguments
from tests.support.launching import REPO

_PROGRAM = """
import json, os, sys
from contextlib import redirect_stdout
from io import StringIO
for name in ("torch", "transformers", "numpy"):
    sys.modules[name] = None
from payload.orchestrate.__main__ import main
codes = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(StringIO()):
        codes.append(main(words, os.environ))
print(json.dumps(codes))
"""


def plan_codes(folders: Mapping[str, Path], runs: Path) -> dict[str, int]:
    """Return the exit code of a plan, with an adapter, for the model in each folder."""
    more = ["--set", "adapter.kind=lora"]
    words = [[*plan_arguments(each, runs=runs), *more] for each in folders.values()]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(words)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(folders, json.loads(done.stdout.splitlines()[-1]), strict=True))
