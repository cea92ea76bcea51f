"""The size of the measured matmul: tiny only for bf16 that the CPU emulates very slowly."""

from __future__ import annotations

import pytest

from payload.core.dtype import Dtype
from payload.train import gemm_and_network_benchmark as benchmark
from tests.train.alone import ALONE


@pytest.mark.parametrize(
    ("dtype", "has_bf16", "probe_s", "size"),
    [
        ("bf16", False, 0.014, 256),
        ("bf16", False, 0.001, 1024),
        ("bf16", True, 0.014, 1024),
        ("bf16", None, 0.014, 1024),
        ("fp32", False, 0.014, 1024),
    ],
)
def test_only_slow_emulated_bf16_is_measured_with_tiny_matmuls(
    monkeypatch: pytest.MonkeyPatch,
    dtype: Dtype,
    has_bf16: bool | None,
    probe_s: float,
    size: int,
) -> None:
    monkeypatch.setattr(benchmark, "has_bf16", lambda: has_bf16)
    monkeypatch.setattr(benchmark, "_best_product_s", lambda *_, **__: probe_s)
    assert benchmark._small_size(ALONE, dtype) == size
