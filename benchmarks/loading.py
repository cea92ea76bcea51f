"""Memory of loading a model that no rank can hold: each rank of a sharded run reads its shard.

    python -m benchmarks.loading --params 1e9 --ranks 4 --limit-gib 1.7
    python -m benchmarks.loading --params 5e8 --quantize nf4

Writes a Llama-shaped folder with random bf16 weights, then loads it in fp32 on the ranks of this
machine as a run on the mesh does: `shard`, or the mesh of `--mesh`, such as `pipeline2+shard`. With
`--limit-gib` each rank is in a cgroup with this memory limit (root only). A rank that reads the
whole model is killed there; this case is measured, too. With `--state` the ranks restore AdamW's
state, as on a resume: zeros, twice the bytes of the weights.

With `--quantize nf4` one process loads the model in 4 bits: a Llama with this project's layers, and
a StableLM with the layers of transformers. The peak is what loading adds to a process that has
already loaded a small model of the same kind. A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import REPO, Benchmark
from benchmarks.meshes import mesh_settings
from payload.formats.checkpoint_listing import OPTIMIZER_FILE

_CGROUP = Path("/sys/fs/cgroup/memory")
_WIDTH = 1024
_VOCAB = 32_000
_WAIT_S = 500
_KINDS = {"llama": "LlamaForCausalLM", "stablelm": "StableLmForCausalLM"}
_IN_4_BITS = {"llama": "llama, our own layers", "stablelm": "stablelm, transformers' layers"}


def write_model(folder: Path, *, params: float, kind: str = "llama") -> int:
    """Write the folder with one tensor in memory at a time; return the number of weights."""
    import torch

    from payload.models.registry import spec_of
    from payload.train.models.loading import build
    from payload.train.tensors.tensor_file import write_tensors

    layer = 4 * _WIDTH**2 + 3 * 4 * _WIDTH**2
    layers = max(1, round((params - _VOCAB * _WIDTH) / layer))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    sizes = {"hidden_size": _WIDTH, "intermediate_size": 4 * _WIDTH, "num_hidden_layers": layers}
    config = {"model_type": kind, "architectures": [_KINDS[kind]], **heads, **sizes}
    config |= {"vocab_size": _VOCAB, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5}
    config |= {"rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = build(spec_of(config, where="the benchmark"), random=False)
    tensors = {
        name: torch.empty(each.shape, dtype=torch.bfloat16, device="meta")
        for name, each in model.hf_tensors().items()
    }
    generator = torch.Generator().manual_seed(0)

    def filled(each: torch.Tensor) -> torch.Tensor:
        return (torch.randn(each.shape, generator=generator) * 0.02).bfloat16()

    write_tensors(folder / "model.safetensors", tensors, metadata={"format": "pt"}, whole=filled)
    return sum(each.numel() for each in tensors.values())


def write_state(folder: Path) -> int:
    """Write AdamW's state of the model in `folder` as a sparse file of zeros; return its size."""
    from payload.models.registry import read_spec
    from payload.train.models.loading import build

    entries: dict[str, Any] = {}
    end = 0
    for name, each in build(read_spec(folder), random=False).named_parameters():
        for key, shape in (("exp_avg", each.shape), ("exp_avg_sq", each.shape), ("step", ())):
            begin, end = end, end + 4 * math.prod(shape)
            offsets = {"shape": list(shape), "data_offsets": [begin, end]}
            entries[f"{key}.{name}"] = {"dtype": "F32", **offsets}
    header = json.dumps(entries).encode()
    with (folder / OPTIMIZER_FILE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return end


def load_as_a_rank(folder: Path, *, whole: bool, mesh: str) -> dict[str, Any]:
    """Load this rank's shard, or everything on rank 0; return its peak and a sum of the weights.

    If the folder has an optimizer's state, a second peak is measured after restoring it.
    """
    import torch

    from payload.config.run_config import parse_run_config
    from payload.models.registry import read_spec
    from payload.train.models.loading import build, load
    from payload.train.optimizer_state import restore_optimizer
    from payload.train.ranks.world import World
    from payload.train.strategies.registry import choose_strategy

    overrides = [f"{key}={value}" for key, value in mesh_settings(mesh).items()]
    config = parse_run_config("", overrides=overrides, where="the benchmark")
    settings = config.distributed
    world = World.from_env(os.environ)
    world.join(settings)
    # Choosing a strategy imports its libraries, whose memory is not the model's.
    strategy = choose_strategy(settings, world)
    before = _peak_bytes()
    if whole and world.is_main:
        model = load(folder)
    else:
        model = build(read_spec(folder), random=False)
        model.deferred_weights = None if whole else folder
    strategy.wrap(model)
    found: dict[str, Any] = {"rank": world.rank, "before_bytes": before}
    found["peak_bytes"] = _peak_bytes()
    optimizers = strategy.optimizers(model, config, dtype="fp32")
    if (folder / OPTIMIZER_FILE).exists():
        restore_optimizer(optimizers, folder if world.is_main else None, strategy=strategy)
        held = sum(each.nbytes for each in optimizers.state_tensors().values())
        found |= {"state_bytes": held, "state_peak_bytes": _peak_bytes()}
    parts = optimizers.trained().values()
    total = torch.stack([each.detach().double().sum() for each in parts]).sum()
    found["sum"] = float(world.sum(total))
    world.barrier()
    world.leave()
    return found


def load_on_ranks(
    folder: Path, *, ranks: int, whole: bool, mesh: str = "shard", limit_bytes: int | None = None
) -> list[dict[str, Any]] | None:
    """Load on `ranks` ranks; return None if one exceeded its memory and was killed."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    options = [
        "benchmarks.loading",
        "--rank",
        str(folder),
        "--mesh",
        mesh,
        *(["--whole"] if whole else []),
    ]
    if limit_bytes is not None:
        options += ["--limit-bytes", str(limit_bytes)]
    result = subprocess.run(
        [sys.executable, "-m", *launcher, *options],
        cwd=REPO,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
        check=False,
    )
    if result.returncode:
        if limit_bytes is not None and "SIGKILL" in result.stderr:
            return None
        raise SystemExit(f"error: loading failed: {result.stderr[-1500:]}")
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda each: int(each["rank"]))


def load_in_4_bits(small: Path, large: Path) -> dict[str, int]:
    """Load `large` after `small`; return the added peak and the sizes of the weights."""
    from payload.train.models.loading import load
    from payload.train.models.quantized import QuantizedLinear

    load(small, quantize="nf4")  # Imports what both models need.
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before = _resident_bytes("VmHWM")
    model = load(large, quantize="nf4")
    peak = _resident_bytes("VmHWM")
    linears = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    packed = sum(own.nbytes for each in linears for own in each.parameters())
    return {
        "peak_bytes": peak - before,
        "final_bytes": sum(each.nbytes for each in model.parameters()),
        "linears_bytes": packed,
        "linears_bf16_bytes": sum(2 * each.in_features * each.out_features for each in linears),
    }


def _measure_4_bits(benchmark: Benchmark, params: float) -> None:
    """Load each kind in 4 bits in a separate process."""
    heads = ("bf16 GB", "4 bits GB", "peak GB", "peak/final", "linears/bf16")
    table = benchmark.table(*heads, labels=_IN_4_BITS.values())
    cases = []
    for kind, label in _IN_4_BITS.items():
        with tempfile.TemporaryDirectory() as folder:
            small, large = Path(folder) / "small", Path(folder) / "large"
            small.mkdir()
            large.mkdir()
            write_model(small, params=_VOCAB * _WIDTH, kind=kind)
            size = 2 * write_model(large, params=params, kind=kind)
            options = ["benchmarks.loading", "--small", str(small), "--rank", str(large)]
            done = subprocess.run(
                [sys.executable, "-m", *options], cwd=REPO, stdout=subprocess.PIPE, check=True
            )
        found = json.loads(done.stdout.splitlines()[-1])
        cases.append({"case": kind, "bf16_bytes": size, **found})
        table.row(
            label,
            *(f"{each / 1e9:.3f}" for each in (size, found["final_bytes"], found["peak_bytes"])),
            f"{found['peak_bytes'] / found['final_bytes']:.2f}",
            f"{found['linears_bytes'] / found['linears_bf16_bytes']:.3f}",
        )
    benchmark.finish({"cases": cases})


def main(argv: Sequence[str]) -> int:
    """Measure, or run as one of the ranks."""
    benchmark = Benchmark("loading", __doc__)
    _add_options(benchmark.parser)
    arguments = benchmark.parse(argv)
    if arguments.small is not None:
        print(json.dumps(load_in_4_bits(arguments.small, arguments.rank)))
    elif arguments.rank is not None:
        if arguments.limit_bytes is not None:
            _enter_cgroup(arguments.limit_bytes)
        found = load_as_a_rank(arguments.rank, whole=arguments.whole, mesh=arguments.mesh)
        os.write(1, f"{json.dumps(found)}\n".encode())
    elif arguments.quantize == "nf4":
        _measure_4_bits(benchmark, arguments.params)
    else:
        _measure_ranks(benchmark, arguments)
    return 0


def _measure_ranks(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    limit = None if arguments.limit_gib is None else int(arguments.limit_gib * 2**30)
    ways = {"each rank its shard": False, "rank 0 everything": True}
    table = benchmark.table("loaded GB", "peak GB", "limit GB", "killed", labels=ways)
    with tempfile.TemporaryDirectory() as folder:
        size = 4 * write_model(Path(folder), params=arguments.params)
        if arguments.state:
            size += write_state(Path(folder))
        cases = []
        for name, whole in ways.items():
            ranks = load_on_ranks(
                Path(folder),
                ranks=arguments.ranks,
                whole=whole,
                mesh=arguments.mesh,
                limit_bytes=limit,
            )
            measured = "state_peak_bytes" if arguments.state else "peak_bytes"
            peak = None if ranks is None else max(each[measured] for each in ranks)
            cases.append({"case": name, "peak_bytes": peak, "killed": ranks is None})
            table.row(
                name,
                f"{size / 1e9:.2f}",
                "" if peak is None else f"{peak / 1e9:.2f}",
                "none" if limit is None else f"{limit / 1e9:.2f}",
                "yes" if ranks is None else "no",
            )
    benchmark.finish({"loaded_bytes": size, "cases": cases})


def _enter_cgroup(limit_bytes: int) -> None:
    """Put this process into a new memory cgroup with the limit."""
    folder = _CGROUP / f"tileforge-loading-{os.getpid()}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=float, default=1e9, metavar="WEIGHTS")
    parser.add_argument("--ranks", type=int, default=4, metavar="RANKS")
    parser.add_argument("--mesh", default="shard", help="mesh, such as shard or pipeline2+tensor2")
    parser.add_argument("--limit-gib", type=float, metavar="GIB", help="memory of each rank")
    parser.add_argument("--state", action="store_true", help="also restore the optimizer's state")
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--small", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit-bytes", type=int, help=argparse.SUPPRESS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
