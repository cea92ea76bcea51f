"""Bytes of activations that a tensor rank keeps for the backward pass: split, or whole on each.

    python -m benchmarks.activations
    python -m benchmarks.activations --model gpt2-medium --tensor 2 4 8

One rank's forward pass in fp32 over 128 tokens is made here, without the kernels and without the
sums over ranks, which change no size. What autograd keeps is counted once for each piece of memory,
parameters left out, and for one layer: as the difference between models of two layers and of one.
What does not shrink with the ranks is whole on each of them; sequence parallelism would divide it,
too. A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.tables import Table
from payload.models.gpt2.spec import PRESETS


def main(argv: Sequence[str]) -> int:
    """Count and print."""
    arguments = _parser().parse_args(argv)
    table = Table("whole MB", "split MB", "sequence parallelism would save", title="tensor ranks")
    rows = []
    alone = _of_a_layer(arguments.model, ranks=1)
    for ranks in arguments.tensor:
        kept = _of_a_layer(arguments.model, ranks=ranks)
        # kept = whole + split, and alone = whole + ranks * split.
        split = (alone - kept) / (ranks - 1)
        whole = kept - split
        saved = whole * (1 - 1 / ranks) / kept
        table.row(str(ranks), f"{whole / 1e6:.2f}", f"{split / 1e6:.2f}", f"{saved:.0%}")
        rows.append({"ranks": ranks, "whole_bytes": whole, "split_bytes": split, "saved": saved})
    print(json.dumps({"benchmark": "activations", "model": arguments.model, "rows": rows}))
    return 0


def _of_a_layer(model: str, *, ranks: int) -> int:
    return _kept(model, ranks=ranks, layers=2) - _kept(model, ranks=ranks, layers=1)


def _kept(name: str, *, ranks: int, layers: int) -> int:
    """Return the bytes that one of so many tensor ranks keeps of a pass."""
    import torch
    from torch import Tensor, nn

    from payload.train.families.gpt2.model import build
    from payload.train.models.split import SplitModule, TensorRanks

    class OneOf(TensorRanks):
        """One of several tensor ranks, which adds nothing up."""

        def sum(self, values: Tensor, op: Any = None) -> Tensor:
            return values

    spec = replace(PRESETS[name], n_layer=layers, sequence_length=128)
    model = build(spec)
    one_of = OneOf(group=None, index=0, size=ranks)  # type: ignore[arg-type]  # it sends nothing
    splits = model.splits().parts if ranks > 1 else {}
    for path, module in model.named_modules():
        for key, whole in list(module.named_parameters(recurse=False)):
            split = splits.get(f"{path}.{key}")
            if split is not None:
                part = split.part(whole.detach(), index=0, size=ranks)
                module.register_parameter(key, nn.Parameter(part))
        if isinstance(module, SplitModule) and ranks > 1:
            module.ranks = one_of
    tokens = torch.zeros(1, 128, dtype=torch.int64)
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            alive.append(tensor)  # Else its memory would be another tensor's, and not be counted.
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(tokens, tokens)
    return sum(kept.values())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.activations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted(PRESETS), default="gpt2")
    parser.add_argument("--tensor", type=int, nargs="+", default=[2, 4], metavar="RANKS")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
