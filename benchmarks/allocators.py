"""Step and peak memory with this project's allocator of tensors and with torch's.

    python -m benchmarks.allocators --model FOLDER [--cases NAME...] [--settings NAME...]

FOLDER has a model in the Hugging Face layout with its weights. Each case is a training step of this
project, in one process per setting, all in turn. `tuned` and `lean` are the values of
`launch.malloc`, which include the project's allocator. `torch` is `tuned` with torch's allocator,
and `default` sets nothing. The step is the median of the steps after the first, the peak is the
high-water mark of the resident set. A table goes to stderr, one JSON object to stdout. The exit
status is 1 if two settings give different losses.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.contenders import Contender
from benchmarks.harness import Benchmark
from benchmarks.step_model import model_argument
from payload.launch.environment import Malloc, malloc_environment
from payload.machines.process_variables import PLAIN_MALLOC

_LORA = {"adapter": {"rank": 16, "alpha": 32.0, "dropout": 0.0}}
_PLAIN = {"kernels": "off"}
CASES: Mapping[str, Mapping[str, Any]] = {
    "full bf16": {"dtype": "bf16"},
    "full bf16, 4 sequences": {"dtype": "bf16", "micro_batch_size": 4},
    "full bf16, no kernels": {"dtype": "bf16", **_PLAIN},
    "full fp32": {"dtype": "fp32"},
    "full fp32, no kernels": {"dtype": "fp32", **_PLAIN},
    "LoRA bf16": {"dtype": "bf16", **_LORA},
    "LoRA fp32": {"dtype": "fp32", **_LORA},
    "LoRA fp32, no kernels": {"dtype": "fp32", **_PLAIN, **_LORA},
    "LoRA nf4 bf16": {"dtype": "bf16", "quantize": "nf4", **_LORA},
    "LoRA nf4 fp32": {"dtype": "fp32", "quantize": "nf4", **_LORA},
}
SETTINGS: Mapping[str, Malloc] = {
    "torch": "tuned",
    "tuned": "tuned",
    "lean": "lean",
    "default": "default",
}
"""The value of `launch.malloc` whose variables each setting has."""


def main(argv: Sequence[str]) -> int:
    """Measure all cases with all settings; return 1 if their losses differ."""
    benchmark = Benchmark("allocators", __doc__)
    add = benchmark.parser.add_argument
    add("--model", type=model_argument, required=True, metavar="FOLDER")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    add("--settings", nargs="+", choices=SETTINGS, default=["torch", "tuned"], metavar="NAME")
    add("--sequence-length", type=int, default=1024, metavar="TOKENS")
    add("--steps", type=int, default=5, metavar="COUNT")
    arguments = benchmark.parse(argv)
    heads = ("setting", "step s", "CPU s", "peak GB", "estimate off by")
    table = benchmark.table(*heads, title="case", labels=arguments.cases)
    found = []
    for case in arguments.cases:
        work = {
            "model": arguments.model,
            "micro_batch_size": 1,
            "accumulation": 1,
            "sequence_length": arguments.sequence_length,
            "steps": arguments.steps,
            "kernels": "auto",
            **CASES[case],
        }
        for setting in arguments.settings:
            report = _contender(setting, work).run()
            step_s, cpu_s = (statistics.median(report[key][1:]) for key in ("step_s", "cpu_s"))
            peak, error = report["peak_rss_bytes"], report["estimated_bytes"]
            cells = (
                f"{step_s:.2f}",
                f"{cpu_s:.2f}",
                f"{peak / 1e9:.2f}",
                f"{error / peak - 1:+.0%}",
            )
            table.row(case, setting, *cells)
            found.append({"case": case, "setting": setting, **report})
    losses = {case: {each["last_loss"] for each in found if each["case"] == case} for case in CASES}
    differing = [case for case, values in losses.items() if len(values) > 1]
    benchmark.note(
        f"losses differ: {', '.join(differing)}" if differing else "all losses are equal"
    )
    benchmark.finish({"rows": found, "differing": differing})
    return 1 if differing else 0


def _contender(setting: str, work: Mapping[str, Any]) -> Contender:
    environment = malloc_environment(SETTINGS[setting])
    options = json.dumps({**work, "plain_malloc": setting in PLAIN_MALLOC})
    return Contender(setting, [sys.executable, "-m", "benchmarks.step_ours", options], environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
