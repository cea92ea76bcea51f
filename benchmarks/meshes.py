"""Short names of strategies and meshes for benchmarks: `replicate`, `pipeline2+shard`."""

from __future__ import annotations

import argparse
import re

_NAMES = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel", "shard": "shard_size"}
_WORD = re.compile(r"(replicate|zero3|(?:shard)(\d*)|(tensor|pipeline)(\d+))")


def mesh_settings(name: str) -> dict[str, object]:
    """Return the [distributed] settings that a name stands for.

    Its words are joined by `+`: `replicate`, `shard`, `shardN` (groups of N), `zero3`, `tensorN`,
    `pipelineN`. Raises argparse.ArgumentTypeError.
    """
    found: dict[str, object] = {"distributed.strategy": "replicate"}
    for word in name.split("+"):
        if not _WORD.fullmatch(word):
            raise argparse.ArgumentTypeError(
                f"{name!r}: {word!r} is not replicate, shard, shardN, zero3, tensorN or pipelineN"
            )
        kind = word.rstrip("0123456789") if word != "zero3" else word
        size = word.removeprefix(kind)
        if kind in ("replicate", "shard", "zero3"):
            found["distributed.strategy"] = kind
        if size:
            found[f"distributed.{_NAMES[kind]}"] = int(size)
    return found
