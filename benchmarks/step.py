"""The training step of this project and its peers, in turn, with the same allocator settings.

    python -m benchmarks.step --model gpt2 --micro-batch-size 4 --steps 6 --eager --nanogpt CHECKOUT
    python -m benchmarks.step --model FOLDER --micro-batch-size 4 --steps 6 --transformers --trl
    python -m benchmarks.step --model FOLDER --adapter lora --rank 16 --steps 6 --peft
    python -m benchmarks.step --model FOLDER --adapter lora --quantize nf4 --dtype fp32 --peft
    python -m benchmarks.step --auto

A step is every micro-batch, clipping and the optimizer's update, on random tokens. Each contender
is a separate process; its first step warms up, and the result is the median of the others.
`--rounds` repeats all contenders. On a busy machine, use `--threads 1` and compare the CPU time of
a step (`cpu_ratio_vs_...`, `cpu_mfu`), which excludes the time that threads wait for a core.

A table goes to stderr, one JSON object to stdout: its `tokens_per_s`, `mfu` and `peak_rss_bytes`
are of this project, and `contender_peak_rss_bytes` has the peaks of every contender. Peers run
unmodified, from the folders given, with autocast to bf16. FOLDER has a config.json in the Hugging
Face layout; if it has no weights, they are random. --transformers is transformers' own model of
FOLDER, --trl the same model in TRL's SFTTrainer. With --adapter, this project trains LoRA on all
linears of the layers, with alpha = 2 x rank, and --peft trains the LoRA of PEFT on transformers'
model. With --quantize nf4 the linears of the base are in 4 bits (for PEFT, by bitsandbytes with
double quantisation); the folder needs weights. --auto compares with transformers in the dtype that
fits this CPU, on SmolLM2-135M's shape unless --model names a folder; the last line on stderr is the
result.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.contenders import Contender, adapter_settings, contenders
from benchmarks.harness import Benchmark, in_turn, medians
from benchmarks.step_auto import apply_auto, line
from benchmarks.step_model import has_weights, model_argument, model_spec, trained_spec
from payload.estimates.compute_time import mfu
from payload.models.gpt2.spec import PRESETS

Report = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Measure all contenders in turn; return the exit status."""
    benchmark = Benchmark("step", __doc__)
    _add_options(benchmark.parser)
    arguments = benchmark.parse(argv)
    with TemporaryDirectory() as folder:
        shape = arguments.model or "SmolLM2-135M's shape"
        if arguments.auto:
            apply_auto(arguments, Path(folder))
        arguments.model = arguments.model or "gpt2"
        return _measure(benchmark, arguments, shape=Path(shape).name)


def _measure(benchmark: Benchmark, arguments: argparse.Namespace, *, shape: str) -> int:
    problem = _problem(arguments)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    found = in_turn(
        {each.name: _reporting(each) for each in contenders(arguments)}, rounds=arguments.rounds
    )
    result = _summarise(found, arguments)
    _add_table(benchmark, result)
    benchmark.finish(result)
    if arguments.auto:
        print(line(result, arguments, shape=shape), file=sys.stderr)
    return 0


def _problem(arguments: argparse.Namespace) -> str | None:
    """Return why these options do not go together, or None."""
    if (arguments.intel_module is None) != (arguments.ipex_python is None):
        return "--intel-module and --ipex-python work only together."
    for_folders = arguments.transformers or arguments.trl or arguments.peft
    for_presets = arguments.nanogpt or arguments.intel_module
    if for_folders if arguments.model in PRESETS else for_presets:
        return (
            "--nanogpt and --intel-module are for presets; --transformers, --trl and --peft for a "
            "folder."
        )
    if arguments.quantize == "nf4":
        if not (arguments.adapter and has_weights(arguments.model)):
            return "--quantize needs --adapter and a folder with weights."
        reason = model_spec(arguments.model).why_not_quantized()
        if reason is not None:
            return f"--quantize: the model cannot be quantised: {reason}."
    others = arguments.transformers or arguments.trl or for_presets
    if others if arguments.adapter else arguments.peft:
        return "--peft and --adapter work only together, and not with other peers."
    if arguments.tcmalloc and not arguments.tcmalloc.is_file():
        # The loader would only warn, and the module would run without it.
        return f"--tcmalloc {arguments.tcmalloc}: not a file."
    return None


def _reporting(contender: Contender) -> Callable[[], Report]:
    """Return a call that runs the contender and prints its times."""

    def run() -> Report:
        report = contender.run()
        seconds = " ".join(f"{step:.2f}" for step in report["step_s"])
        gigabytes = f"{report['peak_rss_bytes'] / 1e9:.2f} GB"
        print(f"{contender.name}: {seconds} s, {gigabytes}", file=sys.stderr)
        return report

    return run


def _summarise(found: dict[str, list[Report]], arguments: argparse.Namespace) -> Report:
    tokens = arguments.micro_batch_size * arguments.accumulation * arguments.sequence_length
    steps, cpu = _after_warm_up(found, "step_s"), _after_warm_up(found, "cpu_s")
    median, cpu_median = medians(steps), medians(cpu)
    ours = found["tileforge"]
    peak = max(report["peak_flops_per_s"] for report in ours)
    adapter = adapter_settings(arguments)
    spec = trained_spec(vars(arguments) | {"adapter": adapter})
    cpu_peak = max(report["peak_flops_per_cpu_s"] for report in ours)
    share, cpu_share = (
        mfu(
            tokens_per_s=tokens / step_s,
            flops_per_token=spec.flops_per_token(),
            peak_flops_per_s=of_peak,
        )
        for step_s, of_peak in ((median["tileforge"], peak), (cpu_median["tileforge"], cpu_peak))
    )
    rss = {name: max(r["peak_rss_bytes"] for r in reports) for name, reports in found.items()}
    peers = [name for name in found if name != "tileforge"]
    estimate = ours[0]["estimated_bytes"]
    return {
        "adapter": adapter,
        "steps": len(steps["tileforge"]),
        "tokens_per_s": round(tokens / median["tileforge"], 1),
        # Above 1, other work disturbed the calibration: no MFU, as in the trainer.
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
    }


def _after_warm_up(found: dict[str, list[Report]], key: str) -> dict[str, list[float]]:
    return {
        name: [step for report in reports for step in report[key][1:]]
        for name, reports in found.items()
    }


def _add_table(benchmark: Benchmark, result: Report) -> None:
    heads = ("s a step", "best", "CPU s", "ratio", "peak GB", "memory")
    table = benchmark.table(*heads, title="contender", labels=result["step_s"])
    for name, seconds in result["step_s"].items():
        rss = result["contender_peak_rss_bytes"][name] / 1e9
        times = (statistics.median(seconds), min(seconds), statistics.median(result["cpu_s"][name]))
        ratio, memory = (result.get(f"{kind}_vs_{name}", 1.0) for kind in ("ratio", "memory"))
        cells = (*(f"{each:.2f}" for each in times), f"{ratio:.2f}", f"{rss:.2f}", f"{memory:.2f}")
        table.row(name, *cells)
    reached = "unknown" if result["mfu"] is None else f"{result['mfu']:.1%}"
    benchmark.note(
        f"{result['tokens_per_s']:.0f} tokens/s; MFU {reached} of "
        f"{result['peak_flops_per_s'] / 1e12:.2f} TFLOP/s, by CPU time {result['cpu_mfu']:.1%} of "
        f"{result['peak_flops_per_cpu_s'] / 1e12:.2f} a core; memory estimate off by "
        f"{result['estimate_error']:+.1%}"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=model_argument,
        metavar="NAME|FOLDER",
        help=f"{', '.join(sorted(PRESETS))}, or a Hugging Face folder; default: gpt2",
    )
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="SEQUENCES")
    parser.add_argument("--accumulation", type=int, default=1, metavar="COUNT")
    parser.add_argument("--sequence-length", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument(
        "--steps", type=int, default=6, help="steps of each process; the first warms up"
    )
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of all contenders")
    parser.add_argument("--threads", type=int, metavar="COUNT", help="default: torch's own choice")
    parser.add_argument(
        "--malloc",
        choices=["tuned", "lean", "default"],
        default="tuned",
        help="allocator settings, as launch.malloc of a run",
    )
    parser.add_argument(
        "--auto", action="store_true", help="settings for this machine, and one line to send"
    )
    parser.add_argument(
        "--eager", action="store_true", help="also measure this project without kernels"
    )
    parser.add_argument(
        "--transformers",
        action="store_true",
        help="also measure transformers' own model of the folder",
    )
    parser.add_argument("--trl", action="store_true", help="also measure TRL's SFTTrainer")
    parser.add_argument("--adapter", choices=["lora"], help="train an adapter")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapter (default: 16)")
    parser.add_argument(
        "--adapter-dropout", type=float, default=0.0, metavar="SHARE", help="(default: 0)"
    )
    parser.add_argument(
        "--quantize", choices=["none", "nf4"], default="none", help="dtype of the base"
    )
    parser.add_argument(
        "--peft", action="store_true", help="also measure PEFT on transformers' model"
    )
    parser.add_argument(
        "--nanogpt", type=Path, metavar="DIR", help="also measure nanoGPT in this checkout"
    )
    parser.add_argument(
        "--intel-module",
        type=Path,
        metavar="DIR",
        help="also measure the model.py of Intel's module",
    )
    parser.add_argument(
        "--ipex-python",
        type=Path,
        metavar="FILE",
        help="Python that runs the module (make setup-ipex)",
    )
    parser.add_argument(
        "--tcmalloc", type=Path, metavar="FILE", help="libtcmalloc.so for Intel's module"
    )
    parser.add_argument("--json", action="store_true", help="no effect: JSON is always printed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
