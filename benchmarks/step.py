"""The training step: this project's, and its peers', in turn and with the same allocator settings.

    python -m benchmarks.step --model gpt2 --micro-batch-size 4 --steps 6 --eager --nanogpt CHECKOUT
    python -m benchmarks.step --model FOLDER --micro-batch-size 4 --steps 6 --transformers --trl
    python -m benchmarks.step --model FOLDER --adapter lora --rank 16 --steps 6 --peft
    python -m benchmarks.step --model FOLDER --adapter lora --quantize nf4 --dtype fp32 --peft

A step is every pass, clipping and the optimizer's update, on random tokens. Each contender is a
process of its own; the first step of each warms up and is not counted, the median of the others is
what is reported. `--rounds` repeats the whole turn. On a machine that others use as well,
`--threads 1` and the processors' time of a step (`cpu_ratio_vs_...`, `cpu_mfu`) say more than the
clock: a thread that waits its turn does not count. A table goes to stderr, one JSON object to
stdout: its `tokens_per_s`, `mfu` and `peak_rss_bytes` are this project's, and
`contender_peak_rss_bytes` has everyone's. Peers are run as they are, from the folders given, with
autocast to bf16. FOLDER has a config.json in the Hugging Face layout, and random weights unless it
has some; --transformers is transformers' own model of it, --trl the same in TRL's SFTTrainer. With
--adapter, this project trains LoRA on all linears of the layers, with alpha = 2 x rank, and --peft
is PEFT's on transformers' model. With --quantize nf4 the linears below are of 4 bits, those of PEFT
by bitsandbytes with double quantisation; the folder needs weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import adapter_settings, contenders
from benchmarks.machine import describe_machine
from benchmarks.step_model import has_weights, model_argument, model_spec, trained_spec
from benchmarks.tables import Table
from payload.estimates.compute_time import mfu
from payload.models.gpt2.spec import PRESETS


def main(argv: Sequence[str]) -> int:
    """Measure all in turn, print."""
    arguments = _parser().parse_args(argv)
    if (arguments.intel_module is None) != (arguments.ipex_python is None):
        print("error: --intel-module and --ipex-python belong together.", file=sys.stderr)
        return 2
    is_preset = arguments.model in PRESETS
    of_folders = arguments.transformers or arguments.trl or arguments.peft
    if of_folders if is_preset else arguments.nanogpt or arguments.intel_module:
        print(
            "error: --nanogpt and --intel-module are for presets, --transformers, --trl and --peft "
            "for a folder.",
            file=sys.stderr,
        )
        return 2
    if arguments.quantize == "nf4":
        if not (arguments.adapter and has_weights(arguments.model)):
            print("error: --quantize needs --adapter and a folder with weights.", file=sys.stderr)
            return 2
        reason = model_spec(arguments.model).why_not_quantized()
        if reason is not None:
            print(f"error: --quantize: the model cannot be quantised: {reason}.", file=sys.stderr)
            return 2
    others = arguments.transformers or arguments.trl or arguments.nanogpt or arguments.intel_module
    if others if arguments.adapter else arguments.peft:
        print(
            "error: --peft and --adapter belong together, without other peers.",
            file=sys.stderr,
        )
        return 2
    if arguments.tcmalloc and not arguments.tcmalloc.is_file():
        # The loader would only warn, and the module would run without.
        print(f"error: --tcmalloc {arguments.tcmalloc}: no such file.", file=sys.stderr)
        return 2
    rivals = contenders(arguments)
    found: dict[str, list[dict[str, Any]]] = {each.name: [] for each in rivals}
    for _ in range(arguments.rounds):
        for each in rivals:
            found[each.name].append(each.run())
            last = found[each.name][-1]
            print(f"{each.name}: {_seconds(last)} s, {_gigabytes(last)}", file=sys.stderr)
    result = _summarise(found, arguments)
    _print_table(result)
    print(json.dumps(result))
    return 0


def _seconds(report: dict[str, Any]) -> str:
    return " ".join(f"{step:.2f}" for step in report["step_s"])


def _gigabytes(report: dict[str, Any]) -> str:
    return f"{report['peak_rss_bytes'] / 1e9:.2f} GB"


def _summarise(
    found: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace
) -> dict[str, object]:
    tokens = arguments.micro_batch_size * arguments.accumulation * arguments.sequence_length
    steps, cpu = _after_warm_up(found, "step_s"), _after_warm_up(found, "cpu_s")
    cpu_median = {name: statistics.median(seconds) for name, seconds in cpu.items()}
    median = {name: statistics.median(seconds) for name, seconds in steps.items()}
    ours = found["tileforge"]
    peak = max(report["peak_flops_per_s"] for report in ours)
    adapter = adapter_settings(arguments)
    shape = trained_spec(vars(arguments) | {"adapter": adapter})
    cpu_peak = max(report["peak_flops_per_cpu_s"] for report in ours)
    share, cpu_share = (
        mfu(
            tokens_per_s=tokens / step_s,
            flops_per_token=shape.flops_per_token(),
            peak_flops_per_s=of_peak,
        )
        for step_s, of_peak in ((median["tileforge"], peak), (cpu_median["tileforge"], cpu_peak))
    )
    rss = {name: max(r["peak_rss_bytes"] for r in reports) for name, reports in found.items()}
    peers = [name for name in found if name != "tileforge"]
    estimate = ours[0]["estimated_bytes"]
    return {
        "benchmark": "step",
        "model": arguments.model,
        "micro_batch_size": arguments.micro_batch_size,
        "accumulation": arguments.accumulation,
        "sequence_length": arguments.sequence_length,
        "adapter": adapter,
        "quantize": arguments.quantize,
        "dtype": arguments.dtype,
        "malloc": arguments.malloc,
        "steps": len(steps["tileforge"]),
        "tokens_per_s": round(tokens / median["tileforge"], 1),
        # Above 1 something disturbed the calibration: no figure, as in the trainer.
        "mfu": round(share, 4) if share <= 1 else None,
        "peak_flops_per_s": round(peak),
        "dequantized_per_s": ours[0].get("dequantized_per_s"),
        "cpu_mfu": round(cpu_share, 4),
        "peak_flops_per_cpu_s": round(cpu_peak),
        **{f"ratio_vs_{name}": round(median[name] / median["tileforge"], 3) for name in peers},
        **{
            f"cpu_ratio_vs_{name}": round(cpu_median[name] / cpu_median["tileforge"], 3)
            for name in peers
        },
        **{
            f"best_ratio_vs_{name}": round(min(steps[name]) / min(steps["tileforge"]), 3)
            for name in peers
        },
        "step_s": {name: [round(each, 3) for each in seconds] for name, seconds in steps.items()},
        "cpu_s": {name: [round(each, 3) for each in seconds] for name, seconds in cpu.items()},
        "peak_rss_bytes": rss["tileforge"],
        "contender_peak_rss_bytes": rss,
        **{f"memory_vs_{name}": round(rss["tileforge"] / rss[name], 3) for name in peers},
        "estimated_bytes": estimate,
        "estimate_error": round(estimate / rss["tileforge"] - 1, 3),
        "last_loss": {name: reports[0]["last_loss"] for name, reports in found.items()},
        "versions": {name: reports[0]["versions"] for name, reports in found.items()},
        "machine": describe_machine(),
    }


def _after_warm_up(found: dict[str, list[dict[str, Any]]], key: str) -> dict[str, list[float]]:
    return {
        name: [step for report in reports for step in report[key][1:]]
        for name, reports in found.items()
    }


def _print_table(result: dict[str, Any]) -> None:
    tokens = result["micro_batch_size"] * result["accumulation"] * result["sequence_length"]
    table = Table("s a step", "best", "CPU s", "tokens/s", "peak GB", labels=result["step_s"])
    for name, seconds in result["step_s"].items():
        middle = statistics.median(seconds)
        rss = result["contender_peak_rss_bytes"][name] / 1e9
        times = (middle, min(seconds), statistics.median(result["cpu_s"][name]))
        table.row(name, *(f"{each:.2f}" for each in times), f"{tokens / middle:.0f}", f"{rss:.2f}")
    reached = "unknown" if result["mfu"] is None else f"{result['mfu']:.1%}"
    table.note(
        f"MFU {reached} of {result['peak_flops_per_s'] / 1e12:.2f} TFLOP/s, by processor time "
        f"{result['cpu_mfu']:.1%} of {result['peak_flops_per_cpu_s'] / 1e12:.2f} a core; memory "
        f"estimate off by {result['estimate_error']:+.1%}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument(
        "--model",
        type=model_argument,
        default="gpt2",
        metavar="NAME|FOLDER",
        help=f"{', '.join(sorted(PRESETS))}, or a Hugging Face folder; default: gpt2",
    )
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="SEQUENCES")
    parser.add_argument("--accumulation", type=int, default=1, metavar="PASSES")
    parser.add_argument("--sequence-length", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--steps", type=int, default=6, help="of each process; the first warms up")
    parser.add_argument("--rounds", type=int, default=1, help="turns of all contenders")
    parser.add_argument("--threads", type=int, metavar="COUNT", help="default: torch's own choice")
    parser.add_argument(
        "--malloc",
        choices=["tuned", "lean", "default"],
        default="tuned",
        help="as launch.malloc of a run",
    )
    parser.add_argument("--eager", action="store_true", help="this project with kernels off, too")
    parser.add_argument(
        "--transformers", action="store_true", help="transformers' own model of the folder, too"
    )
    parser.add_argument("--trl", action="store_true", help="TRL's SFTTrainer on it, too")
    parser.add_argument("--adapter", choices=["lora"], help="train this beside the frozen model")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter; default: 16")
    parser.add_argument("--adapter-dropout", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--quantize", choices=["none", "nf4"], default="none", help="the base")
    parser.add_argument("--peft", action="store_true", help="PEFT on transformers' model, too")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT")
    parser.add_argument("--intel-module", type=Path, metavar="DIR", help="with its model.py")
    parser.add_argument("--ipex-python", type=Path, metavar="FILE", help="see make setup-ipex")
    parser.add_argument(
        "--tcmalloc", type=Path, metavar="FILE", help="libtcmalloc.so for Intel's module"
    )
    parser.add_argument(
        "--json", action="store_true", help="changes nothing: JSON is always printed"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
