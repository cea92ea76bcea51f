"""The processes of `benchmarks.step` and `.memory`: the step of this project, and the steps of its
peers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import REPO
from benchmarks.step_model import model_spec
from payload.launch.environment import Malloc, malloc_environment
from payload.machines.process_variables import PLAIN_MALLOC
from payload.models.gpt2.spec import PRESETS, Gpt2Spec


@dataclass(frozen=True, slots=True)
class Contender:
    """A process that takes steps and reports their times."""

    name: str
    command: list[str]
    environment: dict[str, str]

    def run(self) -> dict[str, Any]:
        """Run the process and return its report. Raises SystemExit when it fails."""
        done = subprocess.run(
            self.command,
            env=os.environ | self.environment,
            cwd=REPO,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"error: {self.name} ended with status {done.returncode}.")
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Return this project, then the peers that the options name."""
    threads = {"OMP_NUM_THREADS": str(arguments.threads)} if arguments.threads else {}
    malloc: Malloc = getattr(arguments, "malloc", "tuned")
    work = {
        "model": arguments.model,
        "micro_batch_size": arguments.micro_batch_size,
        "accumulation": arguments.accumulation,
        "sequence_length": arguments.sequence_length,
        "dtype": arguments.dtype,
        "steps": arguments.steps,
        "adapter": adapter_settings(arguments),
        "quantize": getattr(arguments, "quantize", "none"),
        "plain_malloc": malloc in PLAIN_MALLOC,
    }
    allocator = malloc_environment(malloc) | threads
    ours = [sys.executable, "-m", "benchmarks.step_ours"]
    peer = str(REPO / "benchmarks" / "peers" / "step_nanogpt.py")
    sizes = _peer_sizes(PRESETS[arguments.model]) if arguments.model in PRESETS else {}
    found = [Contender("tileforge", [*ours, json.dumps(work | {"kernels": "auto"})], allocator)]
    if arguments.eager:
        found.append(Contender("eager", [*ours, json.dumps(work | {"kernels": "off"})], allocator))
    for name in ("transformers", "trl", "peft"):
        if getattr(arguments, name, False):
            spec = model_spec(arguments.model)
            options = {"folder": arguments.model, "vocab_size": spec.vocab_size}
            theirs = [sys.executable, "-m", f"benchmarks.peers.step_{name}"]
            found.append(Contender(name, [*theirs, json.dumps(work | options)], allocator))
    if arguments.nanogpt:
        options = {"folder": str(arguments.nanogpt.resolve()), "ipex": False, "sizes": sizes}
        command = [sys.executable, peer, json.dumps(work | options)]
        found.append(Contender("nanogpt", command, allocator))
    if arguments.intel_module:
        options = {"folder": str(arguments.intel_module.resolve()), "ipex": True, "sizes": sizes}
        command = [str(arguments.ipex_python), peer, json.dumps(work | options)]
        # As the module's own instructions do.
        preload = {"LD_PRELOAD": str(arguments.tcmalloc)} if arguments.tcmalloc else {}
        found.append(Contender("intel", command, preload | threads))
    return found


def adapter_settings(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the settings of the adapter on all linears of the layers, or None."""
    if getattr(arguments, "adapter", None) is None:
        return None
    return {
        "rank": arguments.rank,
        "alpha": 2.0 * arguments.rank,
        "dropout": getattr(arguments, "adapter_dropout", 0.0),
    }


def _peer_sizes(spec: Gpt2Spec) -> dict[str, int]:
    return {
        "n_layer": spec.n_layer,
        "n_head": spec.n_head,
        "n_embd": spec.n_embd,
        "vocab_size": spec.vocab_size,
    }
