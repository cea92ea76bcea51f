"""Useful tokens a second on short conversations: packed, padded, and padded by length.

    python -m benchmarks.packing --model gpt2 --rounds 3

Conversations have 50 to 400 random tokens, evenly spread, and the last half of each is trained. In
every layout, forward and backward passes have about the same number of tokens, with padding:

- packed: whole conversations side by side in blocks of the sequence length, as `prepare` packs them
- bucketed: conversations of similar length together, each padded to the longest of its micro-batch
- padded: each conversation in a row of the sequence length

Padding has no loss, and a padding token attends only to itself, so padding costs only the matmuls
of the layers. Layouts take turns; a table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Benchmark, in_turn, medians, seconds_of
from benchmarks.step_model import model_argument, model_spec
from payload.data.rows.packing import best_fit
from payload.formats.data_folder import IGNORED_TARGET
from payload.kernels.kernels import find_kernels
from payload.train.models.base import CausalLM
from payload.train.models.loading import build

SHORTEST, LONGEST = 50, 400
CONVERSATIONS = 4000

Rows = list[list[int]]
"""Lengths of the conversations in each row of a micro-batch."""


def layouts(lengths: Sequence[int], *, length: int, rows: int) -> dict[str, tuple[Rows, int]]:
    """Return a micro-batch of each layout: its rows, and the number of tokens in a row."""
    blocks = best_fit(lengths, capacity=length)
    packed = [[lengths[number] for number in block] for block in blocks]
    ordered = sorted(lengths)
    # Micro-batches of all lengths weigh alike, so one of the middle length represents them.
    middle = ordered[len(ordered) // 2]
    count = rows * length // middle
    start = len(ordered) // 2 - count // 2
    bucket = ordered[start : start + count]
    draw = np.random.default_rng(2)
    chosen = draw.choice(len(packed), size=rows, replace=False).tolist()
    # Evenly spread, which a few random rows would not be.
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


def train_micro_batch(model: CausalLM, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    """Make a forward and a backward pass."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(*batch)
    torch.autograd.backward(loss)


def main(argv: list[str]) -> None:
    """Measure all layouts."""
    benchmark = Benchmark("packing", __doc__)
    add = benchmark.parser.add_argument
    add("--model", type=model_argument, default="gpt2", help="preset or folder (default: gpt2)")
    add("--sequence-length", type=int, default=1024, metavar="TOKENS")
    add("--micro-batch-size", type=int, default=2, metavar="ROWS")
    add("--rounds", type=int, default=3, metavar="N", help="repetitions (default: 3)")
    add("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    arguments = benchmark.parse(argv)
    if arguments.sequence_length < LONGEST:
        benchmark.parser.error(f"--sequence-length: must be {LONGEST} or more.")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    length, rows = arguments.sequence_length, arguments.micro_batch_size
    model = build(model_spec(arguments.model).with_sequence_length(length))
    model.kernels = find_kernels()
    draw = np.random.default_rng(1)
    lengths = draw.integers(SHORTEST, LONGEST, size=CONVERSATIONS, endpoint=True).tolist()
    chosen = layouts(lengths, length=length, rows=rows)
    calls, sizes = {}, {}
    for name, (some, width) in chosen.items():
        batch = batch_of(some, length=width, vocabulary=model.spec.vocab_size)
        sizes[name] = batch[0].numel()
        calls[name] = partial(seconds_of, partial(train_micro_batch, model, batch))
    # The first round allocates memory and makes the weights' bf16 copies.
    median_s = medians(in_turn(calls, rounds=arguments.rounds, warm_up=1))
    found = {}
    heads = ("useful tokens", "padding", "seconds", "useful tokens/s")
    table = benchmark.table(*heads, title="layout", labels=chosen)
    for name, (some, _) in chosen.items():
        useful = sum(map(sum, some))
        found[name] = {
            "useful_tokens": useful,
            "padding_share": 1 - useful / sizes[name],
            "median_s": median_s[name],
            "useful_tokens_per_s": useful / median_s[name],
        }
        rate, padding = f"{useful / median_s[name]:,.0f}", f"{1 - useful / sizes[name]:.1%}"
        table.row(name, f"{useful:,}", padding, f"{median_s[name]:.2f}", rate)
    speed = {name: each["useful_tokens_per_s"] for name, each in found.items()}
    benchmark.finish(
        {
            "layouts": found,
            "packed_over_padded": speed["packed"] / speed["padded"],
            "packed_over_bucketed": speed["packed"] / speed["bucketed"],
        }
    )


if __name__ == "__main__":
    main(sys.argv[1:])
