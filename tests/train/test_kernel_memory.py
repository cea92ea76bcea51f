"""Kernels that run out of memory raise an error of ours and never abort."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import Tensor

from payload.kernels.library import Library
from payload.train.__main__ import ExitRecorder
from tests.support.launching import rank_env, run
from tests.train.alone import train_alone


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.bf16
def test_a_kernel_without_memory_raises_and_works_again_with_more(built: Path) -> None:
    # No thread has spare memory: every larger allocation is a new mapping, which hits the limit.
    env = rank_env(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_ARENA_MAX="1")
    result = run([sys.executable, "-c", _STARVE, str(built)], env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"no memory for the kernel {name}"
        for name in (
            *("attention_forward_bf16", "attention_backward_bf16"),
            *("weight_gradient", "weight_gradient"),
            *("sum_squares", "adamw"),
        )
    ]


# The kernels' own memory is the largest: outputs are allocated before the limit is set, and the
# list of an update's tasks is larger than any tensor.
_STARVE = """
import resource, sys
from pathlib import Path
import torch
from payload.kernels.library import Library, TensorUpdate

library = Library(Path(sys.argv[1]))
torch.set_num_threads(3)

def bf16(*size):
    return torch.ones(size, dtype=torch.bfloat16)

def attention(length):
    qkv, out, log_sums = bf16(3, length, 3, 1, 2), bf16(3, length, 1, 2), torch.ones(3, 1, length)
    grad, sizes = torch.empty_like(qkv), (3, length, 1, 1, 2, 0.0)
    inputs = (qkv, None, None)
    return (
        lambda: library.call("attention_forward_bf16", *inputs, out, log_sums, *sizes),
        lambda: library.call("attention_backward_bf16", *inputs, out, log_sums, out, grad, *sizes),
    )

def gradient(tokens, rows):
    grad, x, total = bf16(tokens, rows), bf16(tokens, 64), torch.ones(rows, 64)
    def make():
        library.weight_gradient(grad, x, total, add=False)
        return total
    return make

def norm(count):
    counts, total = torch.tensor([count]), torch.zeros((), dtype=torch.float64)
    none = torch.zeros(1).long()
    return lambda: library.call("sum_squares", none, none, counts, 1, total)

def update(count):
    updates = [TensorUpdate(count=count)]
    return lambda: library.adamw(updates, grad_scale=1.0, betas=(0.9, 0.99), eps=1e-8)

def starve(call, spare):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, -1))
    try:
        call()
    except MemoryError as error:
        said = error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    print(said)

small = [*attention(40), gradient(40, 30)]
for call in small:
    call()  # threads, with what they have of their own, come before the limit
before = small[-1]().clone()
for call in attention(2**20):
    starve(call, 2**20)
starve(gradient(2**16, 64), 2**20)    # memory that all threads share: 8 MB
starve(gradient(1024, 2560), 300_000)  # 128 kB of it, then half a megabyte for each thread
starve(norm(2**40), 2**20)
starve(update(2**40), 2**20)
for call in small:
    call()
assert torch.equal(small[-1](), before)
"""


@pytest.mark.bf16
def test_a_kernel_without_memory_ends_training_in_the_words_for_it(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Library.call

    def call_with_little(self: Library, name: str, *arguments: Tensor | float | None) -> None:
        if name == "attention_backward_bf16":
            raise MemoryError(f"no memory for the kernel {name}")
        call(self, name, *arguments)

    monkeypatch.setattr(Library, "call", call_with_little)
    with pytest.raises(MemoryError) as ended:
        train_alone(tmp_path, tiny_config, "precision.dtype=bf16")
    known = ExitRecorder()._as_tileforge_error(ended.value)
    assert known.exit_code == 40
    assert str(known) == (
        "out of memory (MemoryError: no memory for the kernel attention_backward_bf16). "
        "Lower batch.micro_batch_size."
    )
