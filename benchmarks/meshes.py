"""Short names of strategies and meshes for benchmarks: `replicate`, `pipeline2+shard`."""

from __future__ import annotations

import argparse
import re

_NAMES = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel", "shard": "shard_size"}
_PART = re.compile(r"(replicate|zero3|(?:shard)(\d*)|(tensor|pipeline)(\d+))")


def mesh_settings(name: str) -> dict[str, object]:
    """Return the [distributed] settings of a mesh's short name.

    Its parts are joined by `+`: `replicate`, `shard`, `shardN` (groups of N), `zero3`, `tensorN`,
    `pipelineN`. Raises argparse.ArgumentTypeError.
    """
    found: dict[str, object] = {"distributed.strategy": "replicate"}
    for part in name.split("+"):
        if not _PART.fullmatch(part):
            raise argparse.ArgumentTypeError(
                f"{name!r}: {part!r} is not replicate, shard, shardN, zero3, tensorN or pipelineN"
            )
        kind = part.rstrip("0123456789") if part != "zero3" else part
        size = part.removeprefix(kind)
        if kind in ("replicate", "shard", "zero3"):
            found["distributed.strategy"] = kind
        if size:
            found[f"distributed.{_NAMES[kind]}"] = int(size)
    return found
