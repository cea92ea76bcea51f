"""Train as `payload.train` does with these arguments, and add the device's peak memory to the run.

python -m benchmarks.gpu.measured_run --config FILE --run-dir DIR
"""

from __future__ import annotations

import json
import os
import sys

from payload.core.errors import ExitCode
from payload.core.files import write_whole
from payload.run_record.run_files import RunPaths
from payload.train.__main__ import exit_now, parser
from payload.train.__main__ import main as train

MEMORY_FILE = "device_memory.json"
"""Name of the file with the peak memory, in the run's folder."""


def main() -> ExitCode:
    """Train, and write the peak memory."""
    code = train(sys.argv[1:], os.environ)
    # torch takes seconds to import; the visit imports this module for the name of the file.
    from benchmarks.device_memory import peak_memory
    from payload.config.run_config import load_run_config

    paths = RunPaths(parser().parse_args(sys.argv[1:]).run_dir)
    kind = load_run_config(paths.config).device.kind
    write_whole(paths.root / MEMORY_FILE, json.dumps(peak_memory(kind)))
    return code


if __name__ == "__main__":
    exit_now(main())
