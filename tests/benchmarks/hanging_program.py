"""A program that writes its and its child's process ids to FILE, and then hangs with the child.

python -m tests.benchmarks.hanging_program FILE
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from payload.core.files import write_whole

if __name__ == "__main__":
    sys.stdout.write("waiting for the device\n")
    sys.stdout.flush()
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    write_whole(Path(sys.argv[1]), f"{os.getpid()} {child.pid}", durable=False)
    signal.pause()
