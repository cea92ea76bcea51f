"""The allocator of torch's CPU tensors: alignment, errors, reuse of memory, and its absence."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest

from payload.kernels.cpu_allocator import use_plain_malloc
from payload.machines.process_variables import tuned_malloc
from tests.support.launching import losses, rank_env, run, train_program

_PROGRAM = """
import json, sys, torch
from payload.kernels.cpu_allocator import use_plain_malloc
before = torch.arange(1000.0)
use_plain_malloc()
sizes = [0, 1, 63, 64, 65, 4096, 10**6]
tensors = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
found = {
    "aligned": all(each.data_ptr() % 64 == 0 for each in tensors),
    "kept": all(bool((each == 7).all()) for each in tensors),
    "sum": before.sum().item(),
}
del before
grown = torch.zeros(10)
grown.resize_(10**5).fill_(2)
found["grown"] = grown.sum().item()
moved = torch.ones(100).share_memory_()
found["shared"] = moved.sum().item()
try:
    torch.empty(2**61, dtype=torch.uint8)
except RuntimeError as error:
    found["error"] = str(error).splitlines()[0]
first, after = torch.empty(10**6), torch.empty(10**6)
address = first.data_ptr()
del first
second = torch.empty(10**6)
found["reused"] = second.data_ptr() == address
print(json.dumps(found))
"""


@pytest.mark.processes
def test_tensors_are_aligned_and_their_memory_is_reused() -> None:
    result = run([sys.executable, "-c", _PROGRAM], env=os.environ | tuned_malloc())
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "aligned": True,
        "kept": True,
        "sum": 499_500.0,
        "grown": 200_000.0,
        "shared": 100.0,
        "error": f"cannot allocate memory for a tensor of {2**61} bytes",
        "reused": True,
    }


def test_without_a_compiler_the_reason_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO):
        use_plain_malloc()
    (line,) = caplog.messages
    assert line.startswith("memory    torch's own allocator (this machine has no C++ compiler")


@pytest.mark.ranks
def test_losses_are_those_of_torch_s_own_allocator(tmp_path: Path, tiny_config: Path) -> None:
    for malloc in ("tuned", "default"):
        settings = (f"launch.malloc={malloc}", "train.steps=3")
        program = train_program(tmp_path / malloc, tiny_config, *settings)
        result = run([sys.executable, *program], env=rank_env())
        assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "tuned") == losses(tmp_path / "default")
