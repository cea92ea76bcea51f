"""Compare losses, resume, speed and recipes on one GPU with the CPU, in under ten minutes.

    python -m benchmarks.gpu --page benchmarks/results/DATE_gpu_NAME.md
    python -m benchmarks.gpu --rehearse

Every line is one or two runs of the trainer in processes of their own, on data that is made here;
nothing is downloaded, and the lock file is not needed: torch 2.11 or newer for CUDA, numpy,
accelerate, transformers, safetensors and psutil are. `--rehearse` makes the same runs on the CPU
with small sizes, to try the program; its figures say nothing. Without a CUDA device it ends with
one line and exit code 10. A table goes to stderr, one JSON object to stdout, a page to `--page`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import REPO
from benchmarks.machine import describe_machine
from benchmarks.tables import Table
from payload.metrics_log import read_metrics
from payload.results import RunPaths
from tests.support.data_folders import make_data_folder

_FEW_LAYERS = {"model.n_layer": 4, "model.n_head": 4, "model.n_embd": 256}
_LEAST_MFU = 0.40
_LIMIT_S = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the page."""

    name: str
    wanted: str
    found: str
    passed: bool | None
    """None where it could not be tried here."""
    took_s: float = 0.0


class TrainerError(RuntimeError):
    """A run of the trainer that did not end well; its last line of output is in the message."""


class Runs:
    """Makes runs of the trainer below one folder."""

    def __init__(self, folder: Path, *, device: str, small: bool) -> None:
        self.folder = folder
        self.device = device
        self.small = small
        vocab = 512 if small else 50257
        tokens = 20_000 if small else 2_000_000
        self.data = make_data_folder(folder / "data", vocab_size=vocab, num_train_tokens=tokens)

    def run(self, name: str, **settings: Any) -> list[dict[str, Any]]:
        """Train and return the rows with a loss; sections and keys are joined by `__`."""
        paths = RunPaths(self.folder / name)
        defaults = {
            "data.dir": self.data,
            "data.sequence_length": 32 if self.small else 256,
            "batch.global_batch_size": 8,
            "batch.micro_batch_size": 4,
            "device.kind": self.device,
            "precision.dtype": "fp32",
            "schedule.warmup_steps": 0,
            "train.steps": 6 if self.small else 20,
            "train.eval_every": 0,
            "train.eval_tokens": 256,
        }
        chosen = defaults | {key.replace("__", "."): value for key, value in settings.items()}
        words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        empty = self.folder / "empty.toml"
        empty.touch()
        started = [sys.executable, "-m", "payload.train", "--config", str(empty)]
        result = subprocess.run(
            [*started, "--run-dir", str(paths.root), *words],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no output"])[-1]
            raise TrainerError(f"run {name} ended with {result.returncode}: {last}")
        return [dict(row) for row in read_metrics(paths.metrics) if "loss" in row]


def losses_of_the_cpu(runs: Runs) -> Line:
    """Compare fp32 losses with those of the CPU without the kernels."""
    ours = runs.run("device", **_words(_FEW_LAYERS))
    cpu = runs.run("cpu", device__kind="cpu", engine__kernels="off", **_words(_FEW_LAYERS))
    apart = max(_apart(a["loss"], b["loss"]) for a, b in zip(ours, cpu, strict=True))
    return Line(
        name="fp32 losses against the CPU's",
        wanted="within 1e-4",
        found=f"{apart:.1e}",
        passed=apart <= 1e-4,
    )


def resume(runs: Runs, *, deterministic: bool) -> Line:
    """Compare a run with its own second half, resumed from its middle checkpoint."""
    name = "deterministic" if deterministic else "resumed"
    settings = _words(_FEW_LAYERS) | {
        "engine__deterministic": str(deterministic).lower(),
        "train__steps": 6,
        "train__checkpoint_every": 3,
    }
    whole = runs.run(name, **settings)
    half = RunPaths(runs.folder / f"{name}-half")
    shutil.copytree(runs.folder / name, half.root)
    shutil.rmtree(half.checkpoint(6))
    again = runs.run(half.root.name, **settings)
    apart = max(_apart(a["loss"], b["loss"]) for a, b in zip(whole, again, strict=True))
    files = ("model.safetensors", "optimizer.safetensors")
    one = RunPaths(runs.folder / name).checkpoint(6)
    same = all((one / f).read_bytes() == (half.checkpoint(6) / f).read_bytes() for f in files)
    return Line(
        name=f"resume, engine.deterministic = {str(deterministic).lower()}",
        wanted="bitwise" if deterministic else "within 1e-5",
        found="bitwise" if same and apart == 0 else f"{apart:.1e}",
        passed=(same and apart == 0) if deterministic else apart <= 1e-5,
    )


def mfu(runs: Runs) -> Line:
    """Train GPT-2 124M in bf16 at several micro-batches; report the best share of the peak."""
    found = {}
    for size in (2,) if runs.small else (8, 16, 32):
        rows = runs.run(
            f"mfu-{size}",
            precision__dtype="bf16",
            data__sequence_length=32 if runs.small else 1024,
            batch__micro_batch_size=size,
            batch__global_batch_size=size * 2,
            train__steps=4 if runs.small else 12,
            train__checkpoint_every=0,
            **(_words(_FEW_LAYERS) if runs.small else {}),
        )
        found[size] = statistics.median(row["mfu"] or 0.0 for row in rows[1:])
    best = max(found, key=lambda size: found[size])
    each = ", ".join(f"{size}: {share:.1%}" for size, share in found.items())
    return Line(
        name="MFU of GPT-2 124M, bf16",
        wanted=f"{_LEAST_MFU:.0%} of the measured peak",
        found=f"{found[best]:.1%} (micro-batch {each})",
        passed=found[best] >= _LEAST_MFU,
    )


def lora(runs: Runs, *, quantize: bool) -> Line:
    """Train an adapter beside a small Llama, whole or of 4 bits; its loss has to fall."""
    name = "LoRA on nf4" if quantize else "LoRA"
    missing = [each for each in ("transformers", "bitsandbytes")[: 1 + quantize] if _lacks(each)]
    if missing:
        return Line(name=name, wanted="loss falls", found=f"no {missing[0]} here", passed=None)
    rows = runs.run(
        "nf4" if quantize else "lora",
        model__init=_llama(runs.folder, vocab=512 if runs.small else 50257),
        model__quantize="nf4" if quantize else "none",
        adapter__kind="lora",
        optimizer__lr=1e-2,
        optimizer__min_lr=1e-3,
        precision__dtype="bf16",
    )
    first, last = rows[0]["loss"], rows[-1]["loss"]
    return Line(
        name=name, wanted="loss falls", found=f"{first:.3f} -> {last:.3f}", passed=last < first
    )


def fp8(runs: Runs) -> Line:
    """Compare the loss of a small Llama whose linears multiply in 8-bit floats with bf16's."""
    wanted = "loss within 1 % of bf16"
    missing = [each for each in ("transformers", "torchao") if _lacks(each)]
    if missing:
        return Line(name="fp8", wanted=wanted, found=f"no {missing[0]} here", passed=None)
    settings = {
        "model__init": _llama(runs.folder, vocab=512 if runs.small else 50257),
        "precision__dtype": "bf16",
        "optimizer__lr": 1e-3,
    }
    plain = runs.run("fp8-off", **settings)[-1]["loss"]
    rounded = runs.run("fp8", precision__fp8="emulated" if runs.small else "on", **settings)
    apart = _apart(rounded[-1]["loss"], plain)
    return Line(name="fp8", wanted=wanted, found=f"{apart:.2%}", passed=apart <= 0.01)


def _llama(folder: Path, *, vocab: int) -> Path:
    """Return the folder of a small Llama with random weights."""
    found = folder / "llama"
    if not found.exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        sizes: dict[str, Any] = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
        }
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=vocab, max_position_embeddings=1024, **sizes, **heads)
        LlamaForCausalLM(config).save_pretrained(found)
    return found


def _lacks(module: str) -> bool:
    return importlib.util.find_spec(module) is None


def _words(settings: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(".", "__"): value for key, value in settings.items()}


def _apart(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


LINES: dict[str, Callable[[Runs], Line]] = {
    "fp32 losses": losses_of_the_cpu,
    "deterministic resume": lambda runs: resume(runs, deterministic=True),
    "resume": lambda runs: resume(runs, deterministic=False),
    "MFU": mfu,
    "LoRA": lambda runs: lora(runs, quantize=False),
    "LoRA on nf4": lambda runs: lora(runs, quantize=True),
    "fp8": fp8,
}
"""Each tried by itself: one that fails does not end the others."""


def main(argv: Sequence[str]) -> int:
    """Make all runs; return 0 when no line failed, 10 without a CUDA device."""
    arguments = _parser().parse_args(argv)
    import torch

    if not arguments.rehearse and not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} sees no CUDA device. Run this on a machine with an "
            "NVIDIA GPU and torch's CUDA build, or try the program with --rehearse.",
            file=sys.stderr,
        )
        return 10
    gpu = "the CPU (a rehearsal)" if arguments.rehearse else torch.cuda.get_device_name()
    table = Table("wanted", "found", "passed", "s", labels=["resume, engine.deterministic = false"])
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        device = "cpu" if arguments.rehearse else "cuda"
        runs = Runs(Path(folder), device=device, small=arguments.rehearse)
        for name, make in LINES.items():
            before_s = time.perf_counter()
            line = replace(_tried(name, make, runs), took_s=time.perf_counter() - before_s)
            lines.append(line)
            table.row(line.name, *_cells(line))
    found: dict[str, Any] = {"benchmark": "gpu", "device": gpu, "torch": torch.__version__}
    found |= {"machine": describe_machine(), "lines": [asdict(line) for line in lines]}
    print(json.dumps(found))
    if arguments.page is not None:
        arguments.page.write_text(_page(found, lines), encoding="utf-8")
    return int(any(line.passed is False for line in lines) and not arguments.rehearse)


def _tried(name: str, make: Callable[[Runs], Line], runs: Runs) -> Line:
    try:
        return make(runs)
    except (TrainerError, subprocess.TimeoutExpired, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        return Line(name=name, wanted="the run ends", found=reason[:300], passed=False)


def _cells(line: Line) -> tuple[str, str, str, str]:
    passed = {True: "yes", False: "no", None: "not tried"}[line.passed]
    return line.wanted, line.found, passed, f"{line.took_s:.0f}"


def _page(found: dict[str, Any], lines: Sequence[Line]) -> str:
    rows = [f"| {line.name} | {' | '.join(_cells(line))} |" for line in lines]
    head = f"# A GPU's lines\n\n{found['device']}, torch {found['torch']}; {found['machine']}.\n"
    table = ["| Line | Wanted | Found | Passed | Seconds |", "|---|---|---|---|---|", *rows]
    return head + "\n`python -m benchmarks.gpu`\n\n" + "\n".join(table) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the result as Markdown")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
