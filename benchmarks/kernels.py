"""The kernels one by one, in turn with the operations of torch's that they stand for.

    python -m benchmarks.kernels --model gpt2 --micro-batch-size 4 --threads 1

Each is called with one layer's sizes, both ways in turn, `--rounds` times after one that warms up.
Backward passes are measured by themselves. Torch's operations are those of the reference under
autocast: what it computes in fp32 is so here. A table goes to stderr, one JSON object to stdout;
ratios are of the medians, torch's time over the kernel's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.machine import describe_machine
from benchmarks.tables import Table
from payload.config.training_sections import AdapterSection
from payload.kernels.accumulate import WeightGradients
from payload.kernels.bf16_copies import Bf16Copies
from payload.kernels.head import SLICE
from payload.kernels.library import Library, load_library
from payload.kernels.linears import LayerContext, join, make_adjacent
from payload.launch.environment import malloc_environment
from payload.models.gpt2.spec import PRESETS, Gpt2Spec
from payload.models.spec import logits_tokens
from payload.train.models.kernel_support import projection
from payload.train.models.lora import LoraLinear


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel, and torch's way to the same."""

    name: str
    kernel: Callable[[], object]
    torch: Callable[[], object]
    restore: Callable[[], object] = lambda: None
    """Undo what the kernel overwrote in its input; its time does not count."""


def main(argv: Sequence[str]) -> int:
    """Measure all, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted(PRESETS), default="gpt2")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="SEQUENCES")
    parser.add_argument("--sequence-length", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--threads", type=int, metavar="COUNT", help="default: torch's own choice")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)
    tuned = malloc_environment("tuned")
    if any(os.environ.get(name) != value for name, value in tuned.items()):
        # The allocator reads them when a process begins.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.kernels", *argv],
            {**os.environ, **tuned},
        )
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    shape = replace(PRESETS[arguments.model], sequence_length=arguments.sequence_length)
    library = load_library()
    times: dict[str, dict[str, list[float]]] = {}
    table = Table("kernel ms", "torch ms", "ratio", labels=["weight gradient 2304 x 768"])
    for case in _cases(library, shape, arguments.micro_batch_size):
        times[case.name] = _in_turn(case, rounds=arguments.rounds)
        ways = times[case.name]
        kernel, reference = (statistics.median(ways[way]) * 1e3 for way in ("kernel", "torch"))
        ratio = f"{reference / kernel:.2f}"
        table.row(case.name, f"{kernel:.2f}", f"{reference:.2f}", ratio)
    result = {
        "benchmark": "kernels",
        "model": arguments.model,
        "micro_batch_size": arguments.micro_batch_size,
        "sequence_length": arguments.sequence_length,
        "threads": torch.get_num_threads(),
        "ms": {
            name: {way: [round(each * 1e3, 2) for each in seconds] for way, seconds in ways.items()}
            for name, ways in times.items()
        },
        "ratio_vs_torch": {
            name: round(statistics.median(ways["torch"]) / statistics.median(ways["kernel"]), 2)
            for name, ways in times.items()
        },
        "versions": {"torch": torch.__version__},
        "machine": describe_machine(),
    }
    print(json.dumps(result))
    return 0


def _in_turn(case: Case, *, rounds: int) -> dict[str, list[float]]:
    ways = {"kernel": case.kernel, "torch": case.torch}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        case.restore()
        for way, call in ways.items():
            began_s = time.perf_counter()
            call()
            if number:
                found[way].append(time.perf_counter() - began_s)
    return found


def _bf16(*size: int) -> Tensor:
    return torch.randn(*size).to(torch.bfloat16)


def _cases(library: Library, shape: Gpt2Spec, batch: int) -> Iterator[Case]:
    yield from _passes(library, shape, batch)
    if library.has_products:
        yield from _attention(library, shape, batch)
        width, tokens = shape.n_embd, batch * shape.sequence_length
        for rows, columns in ((3, 1), (1, 1), (4, 1), (1, 4)):
            yield _weight_gradient(library, tokens, rows * width, columns * width)
        for count, outputs in ((1, width), (3, width), (1, 4 * width)):
            yield _adapted(library, tokens, count=count, inputs=width, outputs=outputs)


def _attention(library: Library, shape: Gpt2Spec, batch: int) -> Iterator[Case]:
    sizes = (batch, shape.sequence_length, 3, shape.n_head, shape.n_embd // shape.n_head)
    qkv, grad = _bf16(*sizes), _bf16(*sizes[:2], *sizes[3:])
    out, log_sums = library.attention_forward(qkv)
    leaf = qkv.clone().requires_grad_()

    def forward() -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in leaf.unbind(2))
        made = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return made.transpose(1, 2)

    made = forward()
    yield Case("attention, forward", lambda: library.attention_forward(qkv), forward)
    yield Case(
        "attention, backward",
        lambda: library.attention_backward(qkv, out, log_sums, grad),
        lambda: torch.autograd.grad(made, leaf, grad, retain_graph=True),
    )


def _weight_gradient(library: Library, tokens: int, rows: int, width: int) -> Case:
    grad, x, total = _bf16(tokens, rows), _bf16(tokens, width), torch.empty(rows, width)
    return Case(
        f"weight gradient {rows} x {width}",
        lambda: library.weight_gradient(grad, x, total, add=False),
        lambda: torch.mm(grad.t(), x).float(),
    )


def _adapted(library: Library, tokens: int, *, count: int, inputs: int, outputs: int) -> Case:
    """Frozen linears of one input with LoRA of rank 16, forward and backward."""
    context = LayerContext(library, Bf16Copies(), WeightGradients(library))
    settings = AdapterSection(kind="lora", rank=16)
    layers = [LoraLinear(nn.Linear(inputs, outputs, bias=False), settings) for _ in range(count)]
    for layer in layers:
        layer.weight.requires_grad_(False)
    make_adjacent([layer.weight for layer in layers])
    joined = join([projection(layer) for layer in layers], context)
    x, grad = _bf16(tokens, inputs), _bf16(tokens, count * outputs)
    leaf, grads = x.clone().requires_grad_(), [each.contiguous() for each in grad.chunk(count, 1)]
    trained = [each for layer in layers for each in (layer.lora_A, layer.lora_B)]

    def kernel() -> None:
        _, kept = joined.forward(x)
        _, grad_low = joined.input_gradient(grad, kept)
        joined.backward(grad, x, kept, grad_low)
        for each in trained:
            each.grad = None

    def reference() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = [layer(leaf) for layer in layers]
        torch.autograd.grad(made, [leaf, *trained], grads)

    return Case(f"{count} with LoRA, {outputs} x {inputs}", kernel, reference)


def _passes(library: Library, shape: Gpt2Spec, batch: int) -> Iterator[Case]:
    tokens = batch * shape.sequence_length
    x, grad = _bf16(tokens, 4 * shape.n_embd), _bf16(tokens, 4 * shape.n_embd)
    yield Case(
        "GELU, forward",
        lambda: library.gelu_forward(x),
        lambda: functional.gelu(x, approximate="tanh"),
    )
    changed = torch.empty_like(grad)
    yield Case(
        "GELU, backward",
        lambda: library.gelu_backward(x, changed),
        lambda: torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),
        restore=lambda: changed.copy_(grad),
    )
    stream, added = torch.randn(tokens, shape.n_embd), _bf16(tokens, shape.n_embd)
    weight, bias = torch.ones(shape.n_embd), torch.zeros(shape.n_embd)
    yield Case(
        "sum and norm, forward",
        lambda: library.add_norm_forward(stream, added, weight, bias, eps=1e-5),
        lambda: functional.layer_norm(stream + added, weight.shape, weight, bias).bfloat16(),
    )
    rows = min(tokens, logits_tokens(shape.vocab_size))
    slices = -(-shape.vocab_size // SLICE)
    logits = _bf16(slices, rows, SLICE)
    overwritten = torch.empty_like(logits)
    targets = torch.randint(shape.vocab_size, (rows,))
    leaf = _bf16(rows, shape.vocab_size).requires_grad_()

    def loss_and_gradient() -> Tensor:
        loss = functional.cross_entropy(leaf.float(), targets)
        return torch.autograd.grad(loss, leaf)[0]

    yield Case(
        "loss and its gradient",
        lambda: library.cross_entropy(
            list(overwritten), targets, vocabulary=shape.vocab_size, grad_scale=1 / rows
        ),
        loss_and_gradient,
        restore=lambda: overwritten.copy_(logits),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
