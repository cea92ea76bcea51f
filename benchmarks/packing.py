"""Useful tokens a second on short conversations: packed, padded, and padded by length.

    python -m benchmarks.packing --model gpt2 --rounds 3

Conversations have 50 to 400 random tokens, evenly spread, and the last half of each is trained.
Every layout makes forward and backward passes of about the same number of tokens, padding included:

- packed: whole conversations side by side in blocks of the sequence length, as `prepare` packs them
- bucketed: conversations of like length together, each padded to the longest of its pass
- padded: each conversation in a row of the sequence length

Padding has no loss, and a padding token attends to itself alone: what remains is the cost of
the layers' matmuls. Layouts take turns; a table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import describe_machine
from benchmarks.step_model import model_argument, model_spec
from benchmarks.tables import Table
from payload.data.rows.packing import best_fit
from payload.formats.data_folder import IGNORED_TARGET
from payload.kernels.kernels import find_kernels
from payload.train.models.base import CausalLM
from payload.train.models.loading import build

SHORTEST, LONGEST = 50, 400
CONVERSATIONS = 4000

Rows = list[list[int]]
"""Lengths of the conversations in each row of a pass."""


def layouts(lengths: Sequence[int], *, length: int, rows: int) -> dict[str, tuple[Rows, int]]:
    """Return one pass of each layout: its rows, and how many tokens a row has."""
    blocks = best_fit(lengths, capacity=length)
    packed = [[lengths[number] for number in block] for block in blocks]
    ordered = sorted(lengths)
    # The passes of all lengths weigh alike: one of the middle length stands for them.
    middle = ordered[len(ordered) // 2]
    count = rows * length // middle
    start = len(ordered) // 2 - count // 2
    bucket = ordered[start : start + count]
    draw = np.random.default_rng(2)
    chosen = draw.choice(len(packed), size=rows, replace=False).tolist()
    # Evenly spread, as few rows drawn at random would not be.
    alone = [ordered[(2 * row + 1) * len(ordered) // (2 * rows)] for row in range(rows)]
    return {
        "packed": ([packed[number] for number in chosen], length),
        "bucketed": ([[each] for each in bucket], max(bucket)),
        "padded": ([[each] for each in alone], length),
    }


def batch_of(rows: Rows, *, length: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and starts, (number of rows, length) each."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocabulary, (len(rows), length), generator=generator)
    targets = torch.full_like(tokens, IGNORED_TARGET)
    starts = torch.arange(length).repeat(len(rows), 1)
    for row, conversations in enumerate(rows):
        start = 0
        for each in conversations:
            end = start + each
            starts[row, start:end] = start
            trained = slice(start + each // 2, end - 1)
            targets[row, trained] = tokens[row, trained.start + 1 : end]
            start = end
    return tokens, targets, starts


def timed(model: CausalLM, batch: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return the seconds of a forward and a backward pass."""
    model.zero_grad()
    began_s = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(*batch)
    torch.autograd.backward(loss)
    return time.perf_counter() - began_s


def measure(model: CausalLM, *, length: int, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return each layout's useful tokens a second, and its share of padding."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(SHORTEST, LONGEST, size=CONVERSATIONS, endpoint=True).tolist()
    passes = layouts(lengths, length=length, rows=rows)
    vocabulary = model.spec.vocab_size
    batches = {
        name: batch_of(some, length=width, vocabulary=vocabulary)
        for name, (some, width) in passes.items()
    }
    times: dict[str, list[float]] = {name: [] for name in batches}
    for turn in range(rounds + 1):
        for name, batch in batches.items():
            took_s = timed(model, batch)
            if turn:  # The first one gets memory, and makes the weights' bf16 copies.
                times[name].append(took_s)
    found = {}
    table = Table("useful tokens", "padding", "seconds", "useful tokens/s", labels=passes)
    for name, (some, _) in passes.items():
        useful, size = sum(map(sum, some)), batches[name][0].numel()
        median_s = statistics.median(times[name])
        found[name] = {
            "useful_tokens": useful,
            "padding_share": 1 - useful / size,
            "median_s": median_s,
            "useful_tokens_per_s": useful / median_s,
        }
        rate = f"{useful / median_s:,.0f}"
        table.row(name, f"{useful:,}", f"{1 - useful / size:.1%}", f"{median_s:.2f}", rate)
    return found


def main(argv: list[str]) -> None:
    """Measure all layouts and print them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packing", description="Packing against padding, on one model."
    )
    add = parser.add_argument
    add("--model", type=model_argument, default="gpt2", help="preset or folder (default: gpt2)")
    add("--sequence-length", type=int, default=1024, metavar="TOKENS")
    add("--micro-batch-size", type=int, default=2, metavar="ROWS")
    add("--rounds", type=int, default=3, metavar="N", help="timed passes of each (default: 3)")
    add("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    spec = model_spec(given.model).with_sequence_length(given.sequence_length)
    model = build(spec)
    model.kernels = find_kernels()
    found = measure(
        model,
        length=given.sequence_length,
        rows=given.micro_batch_size,
        rounds=given.rounds,
    )
    speed = {name: each["useful_tokens_per_s"] for name, each in found.items()}
    result = {
        "benchmark": "packing",
        "machine": describe_machine(),
        **{"model": given.model, "sequence_length": given.sequence_length},
        **{"micro_batch_size": given.micro_batch_size, "threads": given.threads},
        "layouts": found,
        "packed_over_padded": speed["packed"] / speed["padded"],
        "packed_over_bucketed": speed["packed"] / speed["bucketed"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
