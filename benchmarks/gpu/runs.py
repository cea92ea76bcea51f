"""Runs of the trainer below one folder, on the device and on the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.gpu.programs import Program, Programs
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths, Summary, read_json
from tests.support.data_folders import make_data_folder

Rows = list[Mapping[str, Any]]
"""Rows of metrics.jsonl with a loss, one per step."""
Settings = Mapping[str, object]
"""Settings of run.toml by `section.key`."""

ON_CPU: Settings = {"device.kind": "cpu", "engine.kernels": "off"}
"""Settings of the reference runs: stock PyTorch on the CPU."""


class Runs:
    """Trains each run once, on generated data."""

    def __init__(self, folder: Path, programs: Programs, *, rehearsal: bool) -> None:
        self.folder = folder
        self.programs = programs
        self.rehearsal = rehearsal
        """True for a rehearsal on the CPU, with small sizes."""
        self.device = "cpu" if rehearsal else "cuda"
        self.vocab_size = 512 if rehearsal else 50257
        self.facts: Mapping[str, Any] = {}
        """The device's facts, from the first stage."""
        self._rows: dict[str, Rows] = {}
        self._data = make_data_folder(
            folder / "data",
            vocab_size=self.vocab_size,
            num_train_tokens=20_000 if rehearsal else 2_000_000,
        )

    def train(self, settings: Mapping[str, Settings], *, module: str = "payload.train") -> None:
        """Train the named runs at the same time; existing runs are reused.

        Raises ProgramError.
        """
        names = [name for name in settings if name not in self._rows]
        # More threads than cores slow each other down; small sizes gain nothing from a second.
        cores = 1 if self.rehearsal else os.cpu_count() or 1
        threads = max(1, cores // max(1, len(names)))
        started = {name: self._start(name, settings[name], module, threads) for name in names}
        for name, program in started.items():
            self.programs.wait(program)
            rows = read_metrics(self.paths(name).metrics)
            self._rows[name] = [row for row in rows if "loss" in row]

    def rows(self, name: str) -> Rows:
        """Return the rows of a trained run."""
        return self._rows[name]

    def paths(self, name: str) -> RunPaths:
        """Return the paths of a run."""
        return RunPaths(self.folder / name)

    def summary(self, name: str) -> Summary:
        """Return the summary of a trained run."""
        found = read_json(Summary, self.paths(name).summary)
        assert found is not None, f"{name} has no summary"
        return found

    def sequence_length(self) -> int:
        """Return the sequence length of comparisons with the CPU."""
        return 32 if self.rehearsal else 256

    def fp8(self) -> str:
        """Return `precision.fp8` for the device: a CPU has no 8-bit matmuls."""
        return "emulated" if self.rehearsal else "on"

    def llama(self) -> Path:
        """Return the folder of a small Llama with random weights."""
        folder = self.folder / "llama"
        if not (folder / "config.json").exists():
            write_llama(folder, vocab_size=self.vocab_size)
        return folder

    def _start(self, name: str, settings: Settings, module: str, threads: int) -> Program:
        defaults: Settings = {
            "data.dir": self._data,
            "data.sequence_length": self.sequence_length(),
            "batch.global_batch_size": 8,
            "batch.micro_batch_size": 4,
            "device.kind": self.device,
            "precision.dtype": "fp32",
            "train.steps": 6 if self.rehearsal else 20,
            "train.eval_every": 0,
            "train.eval_tokens": 256,
        }
        pairs = {**defaults, **settings}.items()
        options = [each for key, value in pairs for each in ("--set", f"{key}={value}")]
        empty = self.folder / "empty.toml"
        empty.touch()
        where = ("--config", str(empty), "--run-dir", str(self.paths(name).root))
        return self.programs.start(name, module, *where, *options, threads=threads)


def write_llama(folder: Path, *, vocab_size: int) -> None:
    """Write a Llama of 4 layers and width 256 with random weights, in transformers' layout."""
    width, inner, heads, kv_heads = 256, 512, 4, 2
    kv_width = width // heads * kv_heads
    linears = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocab_size, width),
    }
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in linears.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (width,)
    generator = np.random.default_rng(1)
    tensors = {
        name: generator.normal(float(len(shape) == 1), 0.02, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
