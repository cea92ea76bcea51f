"""The profile's table: operators on the CPU, kernels on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch._C._autograd import DeviceType

from payload.train.profile import kernels, operators


def average(key: str, *, on_gpu: bool, us: float, is_annotation: bool = False) -> Any:
    """Return an entry of torch's `key_averages`."""
    return SimpleNamespace(
        key=key,
        count=2,
        device_type=DeviceType.CUDA if on_gpu else DeviceType.CPU,
        is_user_annotation=is_annotation,
        self_cpu_time_total=0.0 if on_gpu else us,
        cpu_time_total=0.0 if on_gpu else 2 * us,
        self_device_time_total=us,
    )


def test_on_a_gpu_the_rows_are_kernels_and_neither_operators_nor_annotations() -> None:
    averages = [
        average("aten::mm", on_gpu=False, us=9e6),
        average("short", on_gpu=True, us=1e6),
        average("long", on_gpu=True, us=3e6),
        average("Optimizer.step", on_gpu=True, us=8e6, is_annotation=True),
    ]
    found = kernels(averages)
    assert [(each.name, each.calls, each.self_s) for each in found] == [
        ("long", 2, 3.0),
        ("short", 2, 1.0),
    ]


def test_on_the_cpu_the_rows_are_operators_by_their_own_time() -> None:
    averages = [average("a", on_gpu=False, us=1e6), average("b" * 300, on_gpu=False, us=2e6)]
    found = operators(averages)
    assert [(each.name, each.self_s, each.total_s) for each in found] == [
        ("b" * 200, 2.0, 4.0),
        ("a", 1.0, 2.0),
    ]
