"""Losses of this trainer against those of nanoGPT's own loop.

    python -m benchmarks.nanogpt_parity --nanogpt CHECKOUT --data FOLDER

Same seed weights, same data, same order, fp32. nanoGPT's train.py runs unmodified in this process;
what it draws from `torch.randint` is replaced by this project's data order, and its model's losses
are noted as they pass. Prints one JSON object on stdout; exits 1 when losses differ by over 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.tables import Table
from payload.config.run_config import RunConfig, parse_run_config
from payload.data.reading.blocks import BlockOrder, TokenData
from payload.models.gpt2.spec import PRESETS, Gpt2Spec
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths
from payload.train.families.gpt2.model import GPT
from payload.train.models.hf_weights import save_hf

TOLERANCE = 1e-4
STEPS = 20
MICRO_BATCH_SIZE = 4
GLOBAL_BATCH_SIZE = 8
SEQUENCE_LENGTH = 128

# nanoGPT draws a batch before its loop and one for each half of the evaluation at iteration 0.
_EVALUATION_DRAWS = (1, 2)


def main(argv: Sequence[str]) -> int:
    """Run both, compare, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nanogpt_parity", description=__doc__
    )
    parser.add_argument("--nanogpt", type=Path, required=True, metavar="DIR", help="a checkout")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a prepared folder")
    arguments = parser.parse_args(argv)
    data = TokenData.open(arguments.data.resolve(), sequence_length=SEQUENCE_LENGTH)
    with tempfile.TemporaryDirectory() as scratch:
        seed_weights = _make_seed_weights(Path(scratch), vocab_size=data.meta.vocab_size)
        config = _make_config(data, seed_weights)
        ours = _our_losses(config, Path(scratch) / "run")
        theirs = _nanogpt_losses(arguments.nanogpt.resolve(), config, data, Path(scratch))
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    table = Table("tileforge", "nanoGPT", title="step")
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        table.row(str(step), f"{a:.7f}", f"{b:.7f}")
    print(
        json.dumps(
            {
                "steps": STEPS,
                "largest_difference": largest,
                "tolerance": TOLERANCE,
                "agree": largest <= TOLERANCE,
                "torch": torch.__version__,
            }
        )
    )
    return 0 if largest <= TOLERANCE else 1


def _make_seed_weights(folder: Path, *, vocab_size: int) -> Path:
    """A random tiny model with nanoGPT's exact GELU, in the Hugging Face layout."""
    torch.manual_seed(1337)
    sizes = {**asdict(PRESETS["tiny"]), "sequence_length": SEQUENCE_LENGTH}
    model = GPT(Gpt2Spec(**{**sizes, "vocab_size": vocab_size, "activation": "gelu"}))
    (folder / "seed").mkdir()
    save_hf(model, folder / "seed")
    torch.save(
        {
            "model": nanogpt_state(model),
            "model_args": {
                "n_layer": model.spec.n_layer,
                "n_head": model.spec.n_head,
                "n_embd": model.spec.n_embd,
                "block_size": SEQUENCE_LENGTH,
                "bias": True,
                "vocab_size": vocab_size,
            },
            "optimizer": _fresh_optimizer_state(model),
            "iter_num": 0,
            "best_val_loss": 1e9,
        },
        folder / "ckpt.pt",
    )
    return folder / "seed"


def nanogpt_state(model: GPT) -> dict[str, torch.Tensor]:
    """The model's weights under nanoGPT's names."""
    state = {f"transformer.{name}": value for name, value in model.state_dict().items()}
    return {**state, "lm_head.weight": model.wte.weight.detach()}


def _fresh_optimizer_state(model: GPT) -> dict[str, Any]:
    """Return the state of torch's AdamW before its first step, with nanoGPT's two groups."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]]
    return torch.optim.AdamW(
        [
            {"params": groups[0], "weight_decay": 0.1},
            {"params": groups[1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    ).state_dict()


def _make_config(data: TokenData, seed_weights: Path) -> RunConfig:
    overrides = {
        "data.dir": data.train.path.parent,
        "data.sequence_length": SEQUENCE_LENGTH,
        "model.init": seed_weights,
        "batch.global_batch_size": GLOBAL_BATCH_SIZE,
        "batch.micro_batch_size": MICRO_BATCH_SIZE,
        "optimizer.lr": 1e-3,
        "optimizer.min_lr": 1e-4,
        "schedule.warmup_steps": 3,
        "train.steps": STEPS,
        "train.eval_tokens": 128,
        "precision.dtype": "fp32",
    }
    words = [f"{key}={value}" for key, value in overrides.items()]
    return parse_run_config("", overrides=words, where="benchmark")


def _our_losses(config: RunConfig, run_dir: Path) -> list[float]:
    run_dir.mkdir()
    RunPaths(run_dir).config.write_text(config.to_toml(), encoding="utf-8")
    words = ["--config", str(RunPaths(run_dir).config), "--run-dir", str(run_dir)]
    subprocess.run([sys.executable, "-m", "payload.train", *words], check=True)
    return [row["loss"] for row in read_metrics(RunPaths(run_dir).metrics) if "loss" in row]


def _nanogpt_losses(
    checkout: Path, config: RunConfig, data: TokenData, out_dir: Path
) -> list[float]:
    """Run nanoGPT's train.py; return the mean loss of each step's passes."""
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    import model as nanogpt_model  # type: ignore[import-not-found]  # in its checkout

    noted: list[float] = []
    forward = nanogpt_model.GPT.forward

    def noting_forward(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        logits, loss = forward(self, tokens, targets)
        if self.training:
            noted.append(float(loss))
        return logits, loss

    nanogpt_model.GPT.forward = noting_forward
    torch.randint = _positions(config, data)
    sys.argv = ["train.py", *_nanogpt_arguments(config, data, out_dir)]
    stdout, sys.stdout = sys.stdout, sys.stderr
    runpy.run_path("train.py", run_name="__main__")
    sys.stdout = stdout
    accumulation = config.batch.grad_accum_steps(1)
    passes = np.array(noted).reshape(-1, accumulation)
    return [float(value) for value in passes.mean(axis=1)[:STEPS]]


def _positions(config: RunConfig, data: TokenData) -> Any:
    """Stands for torch.randint: the start positions of this project's data order."""
    order = BlockOrder(num_blocks=data.train.num_full_blocks(), seed=config.run.seed)
    draws = iter(range(10**9))
    next_sample = iter(range(0, 10**9, MICRO_BATCH_SIZE))

    def positions(_high: int, size: tuple[int, ...]) -> torch.Tensor:
        if next(draws) in _EVALUATION_DRAWS:
            return torch.zeros(size, dtype=torch.int64)
        first = next(next_sample)
        samples = np.arange(first, first + size[0], dtype=np.int64)
        return torch.from_numpy(order.blocks(samples) * SEQUENCE_LENGTH)

    return positions


def _nanogpt_arguments(config: RunConfig, data: TokenData, out_dir: Path) -> list[str]:
    settings = {
        "dataset": data.train.path.parent,
        "out_dir": out_dir,
        "init_from": "resume",
        "device": "cpu",
        "compile": False,
        "eval_iters": 1,
        "eval_interval": 10**6,
        "batch_size": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": config.batch.grad_accum_steps(1),
        "block_size": SEQUENCE_LENGTH,
        "learning_rate": config.optimizer.lr,
        "min_lr": config.optimizer.min_lr,
        "warmup_iters": config.schedule.warmup_steps,
        "lr_decay_iters": STEPS,
        "max_iters": STEPS - 1,
    }
    return [f"--{key}={value}" for key, value in settings.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
