"""Each kernel by itself, in turn with the torch operations that it replaces.

    python -m benchmarks.kernels --model gpt2 --micro-batch-size 4 --threads 1

Each kernel is called with one layer's sizes, `--rounds` times after one warm-up call, and torch's
operations after it. Backward passes are measured by themselves. Torch's operations are the
operations of the reference model under autocast, in fp32 where autocast keeps fp32. A table goes to
stderr, one JSON object to stdout; a ratio is torch's median time over the median time of the
kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import Benchmark, in_turn, medians, seconds_of, use_run_allocator
from payload.config.training_sections import AdapterSection
from payload.kernels.accumulate import WeightGradients
from payload.kernels.bf16_copies import Bf16Copies
from payload.kernels.head import SLICE
from payload.kernels.library import Library, load_library
from payload.kernels.linears import LayerContext, join, make_adjacent
from payload.models.gpt2.spec import PRESETS, Gpt2Spec
from payload.models.spec import logits_tokens
from payload.train.models.kernel_support import projection
from payload.train.models.lora import LoraLinear


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel, and the torch operations with the same result."""

    name: str
    kernel: Callable[[], object]
    torch: Callable[[], object]
    restore: Callable[[], object] = lambda: None
    """Restores the input that the kernel overwrote; the time for this does not count."""

    def timed_calls(self) -> dict[str, Callable[[], float]]:
        """Return calls that run the kernel and torch's operations and return their seconds."""

        def kernel_s() -> float:
            self.restore()
            return seconds_of(self.kernel)

        return {"kernel": kernel_s, "torch": lambda: seconds_of(self.torch)}


def main(argv: Sequence[str]) -> int:
    """Measure all kernels; return the exit status."""
    benchmark = Benchmark("kernels", __doc__)
    add = benchmark.parser.add_argument
    add("--model", choices=sorted(PRESETS), default="gpt2")
    add("--micro-batch-size", type=int, default=4, metavar="SEQUENCES")
    add("--sequence-length", type=int, default=1024, metavar="TOKENS")
    add("--threads", type=int, metavar="COUNT", help="default: torch's own choice")
    add("--rounds", type=int, default=9)
    arguments = benchmark.parse(argv)
    use_run_allocator()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    spec = replace(PRESETS[arguments.model], sequence_length=arguments.sequence_length)
    milliseconds, ratios = {}, {}
    table = benchmark.table("kernel ms", "torch ms", "ratio", labels=["weight gradient 2304 x 768"])
    for case in _cases(load_library(), spec, arguments.micro_batch_size):
        found = in_turn(case.timed_calls(), rounds=arguments.rounds, warm_up=1)
        median = medians(found)
        ratios[case.name] = round(median["torch"] / median["kernel"], 2)
        milliseconds[case.name] = {
            name: [round(each * 1e3, 2) for each in seconds] for name, seconds in found.items()
        }
        times = (f"{median[name] * 1e3:.2f}" for name in found)
        table.row(case.name, *times, f"{ratios[case.name]:.2f}")
    threads = torch.get_num_threads()
    benchmark.finish({"threads": threads, "ms": milliseconds, "ratio_vs_torch": ratios})
    return 0


def _random_bf16(*size: int) -> Tensor:
    return torch.randn(*size).to(torch.bfloat16)


def _cases(library: Library, spec: Gpt2Spec, batch: int) -> Iterator[Case]:
    yield from _pointwise(library, spec, batch)
    if library.has_products:
        yield from _attention(library, spec, batch)
        width, tokens = spec.n_embd, batch * spec.sequence_length
        for rows, columns in ((3, 1), (1, 1), (4, 1), (1, 4)):
            yield _weight_gradient(library, tokens, rows * width, columns * width)
        for count, outputs in ((1, width), (3, width), (1, 4 * width)):
            yield _adapted(library, tokens, count=count, inputs=width, outputs=outputs)


def _attention(library: Library, spec: Gpt2Spec, batch: int) -> Iterator[Case]:
    sizes = (batch, spec.sequence_length, 3, spec.n_head, spec.n_embd // spec.n_head)
    qkv, grad = _random_bf16(*sizes), _random_bf16(*sizes[:2], *sizes[3:])
    out, log_sums = library.attention_forward(qkv)
    leaf = qkv.clone().requires_grad_()

    def forward() -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in leaf.unbind(2))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2)

    output = forward()
    yield Case("attention, forward", lambda: library.attention_forward(qkv), forward)
    yield Case(
        "attention, backward",
        lambda: library.attention_backward(qkv, out, log_sums, grad),
        lambda: torch.autograd.grad(output, leaf, grad, retain_graph=True),
    )


def _weight_gradient(library: Library, tokens: int, rows: int, width: int) -> Case:
    grad, x, total = (
        _random_bf16(tokens, rows),
        _random_bf16(tokens, width),
        torch.empty(rows, width),
    )
    return Case(
        f"weight gradient {rows} x {width}",
        lambda: library.weight_gradient(grad, x, total, add=False),
        lambda: torch.mm(grad.t(), x).float(),
    )


def _adapted(library: Library, tokens: int, *, count: int, inputs: int, outputs: int) -> Case:
    """Return a case of frozen linears of one input with LoRA of rank 16, forward and backward."""
    context = LayerContext(library, Bf16Copies(), WeightGradients(library))
    settings = AdapterSection(kind="lora", rank=16)
    layers = [LoraLinear(nn.Linear(inputs, outputs, bias=False), settings) for _ in range(count)]
    for layer in layers:
        layer.weight.requires_grad_(False)
    make_adjacent([layer.weight for layer in layers])
    joined = join([projection(layer) for layer in layers], context)
    x, grad = _random_bf16(tokens, inputs), _random_bf16(tokens, count * outputs)
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
            outputs = [layer(leaf) for layer in layers]
        torch.autograd.grad(outputs, [leaf, *trained], grads)

    return Case(f"{count} with LoRA, {outputs} x {inputs}", kernel, reference)


def _pointwise(library: Library, spec: Gpt2Spec, batch: int) -> Iterator[Case]:
    tokens = batch * spec.sequence_length
    x, grad = _random_bf16(tokens, 4 * spec.n_embd), _random_bf16(tokens, 4 * spec.n_embd)
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
    stream, added = torch.randn(tokens, spec.n_embd), _random_bf16(tokens, spec.n_embd)
    weight, bias = torch.ones(spec.n_embd), torch.zeros(spec.n_embd)
    yield Case(
        "sum and norm, forward",
        lambda: library.add_norm_forward(stream, added, weight, bias, eps=1e-5),
        lambda: functional.layer_norm(stream + added, weight.shape, weight, bias).bfloat16(),
    )
    rows = min(tokens, logits_tokens(spec.vocab_size))
    slices = -(-spec.vocab_size // SLICE)
    logits = _random_bf16(slices, rows, SLICE)
    overwritten = torch.empty_like(logits)
    targets = torch.randint(spec.vocab_size, (rows,))
    leaf = _random_bf16(rows, spec.vocab_size).requires_grad_()

    def loss_and_gradient() -> Tensor:
        loss = functional.cross_entropy(leaf.float(), targets)
        return torch.autograd.grad(loss, leaf)[0]

    yield Case(
        "loss and its gradient",
        lambda: library.cross_entropy(
            list(overwritten), targets, vocabulary=spec.vocab_size, grad_scale=1 / rows
        ),
        loss_and_gradient,
        restore=lambda: overwritten.copy_(logits),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
