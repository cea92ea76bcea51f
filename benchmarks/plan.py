"""Time of `orchestrate plan` for a model of every native family, from its config.json alone.

    python -m benchmarks.plan [--rounds N]

Each round runs the command in a separate process, on a folder that has the config.json of a
published model and no weights. The slowest round counts. A table goes to stderr, one JSON object to
stdout; the exit status is 1 if a plan took 2 s or more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, in_turn, seconds_of

GOAL_S = 2.0
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _decoder(
    kind: str, sizes: tuple[int, int, int, int, int], vocab_size: int, **more: Any
) -> dict[str, Any]:
    """Return a config.json; `sizes` are width, MLP width, layers, heads and key-value heads."""
    width, inner, layers, heads, keys = sizes
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        **more,
    }


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "n_positions": 1024,
        "vocab_size": 50_257,
    },
    "Llama-2-7B": _decoder(
        "llama",
        (4096, 11_008, 32, 32, 32),
        32_000,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    ),
    "Llama-3.2-1B": _decoder(
        "llama",
        (2048, 8192, 16, 32, 8),
        128_256,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA3_ROPE,
    ),
    "SmolLM2-135M": _decoder(
        "llama", (576, 1536, 30, 9, 3), 49_152, max_position_embeddings=8192, rope_theta=100_000.0
    ),
    "SmolLM3-3B": _decoder(
        "smollm3", (2048, 11_008, 36, 16, 4), 128_256, max_position_embeddings=65_536
    ),
    "Qwen2.5-0.5B": _decoder(
        "qwen2", (896, 4864, 24, 14, 2), 151_936, max_position_embeddings=32_768
    ),
    "Qwen3-0.6B": _decoder(
        "qwen3", (1024, 3072, 28, 16, 8), 151_936, head_dim=128, max_position_embeddings=40_960
    ),
    "Mistral-7B": _decoder(
        "mistral",
        (4096, 14_336, 32, 32, 8),
        32_000,
        max_position_embeddings=32_768,
        sliding_window=4096,
        tie_word_embeddings=False,
    ),
    "Gemma-3-270M": _decoder(
        "gemma3_text",
        (640, 2048, 18, 4, 1),
        262_144,
        head_dim=256,
        max_position_embeddings=32_768,
        sliding_window=512,
    ),
}
"""The published config.json of each model, without the keys that a plan ignores."""


def main(argv: Sequence[str]) -> int:
    """Measure each model; return 1 if one took too long."""
    benchmark = Benchmark("plan", __doc__)
    benchmark.parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="processes of each (default: 3)"
    )
    arguments = benchmark.parse(argv)
    heads = ("parameters", "GFLOPs/token", "memory GiB", "plan s")
    table = benchmark.table(*heads, title="model", labels=CONFIGS)
    rows = []
    with tempfile.TemporaryDirectory() as root:
        # The first plan on a machine measures the machine, once.
        _measure(Path(root), "gpt2", CONFIGS["gpt2"], rounds=1)
        for name, config in CONFIGS.items():
            row = _measure(Path(root), name, config, rounds=arguments.rounds)
            rows.append(row)
            table.row(
                name,
                f"{row['params'] / 1e6:,.1f} M",
                f"{row['flops_per_token'] / 1e9:.2f}",
                f"{row['memory_bytes'] / 2**30:.1f}",
                f"{row['slowest_s']:.2f}",
            )
    benchmark.finish({"rows": rows}, packages=())
    return int(any(row["slowest_s"] >= GOAL_S for row in rows))


def make_folder(root: Path, name: str, config: Mapping[str, Any]) -> Path:
    """Write the config.json of a model into a new folder."""
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def plan_arguments(folder: Path, *, runs: Path) -> list[str]:
    """Return the arguments of `orchestrate`: one rank, micro-batch 1 x 1024 in bf16."""
    settings = [f"model.init={folder}", "data.sequence_length=1024", "precision.dtype=bf16"]
    settings += ["batch.global_batch_size=1", "batch.micro_batch_size=1", "launch.ranks_per_node=1"]
    sets = [each for setting in settings for each in ("--set", setting)]
    return ["plan", "--inventory", "local", "--runs-dir", str(runs), "--json", *sets]


def _measure(root: Path, name: str, config: Mapping[str, Any], *, rounds: int) -> dict[str, Any]:
    folder = make_folder(root, name, config)
    command = [
        sys.executable,
        "-m",
        "payload.orchestrate",
        *plan_arguments(folder, runs=root / "runs"),
    ]
    out = b""

    def plan() -> None:
        nonlocal out
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr.decode())
        out = done.stdout

    took_s = in_turn({"plan": lambda: seconds_of(plan)}, rounds=rounds)["plan"]
    arithmetic = json.loads(out)["plan"]["arithmetic"]
    return {
        "model": name,
        "params": arithmetic["params"],
        "flops_per_token": arithmetic["flops_per_step"] / arithmetic["tokens_per_step"],
        "memory_bytes": arithmetic["memory_bytes_per_rank"],
        "slowest_s": round(max(took_s), 3),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
