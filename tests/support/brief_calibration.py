"""A minimal calibration: the full one takes a second, longer than most tests' runs."""

from __future__ import annotations

from payload.train import gemm_and_network_benchmark as calibration


def calibrate_briefly() -> None:
    """Make this process measure one matmul, and exchanges of the smallest size."""
    calibration._GEMM_BUDGET_S = 0.0
    calibration._EXCHANGE_SIZES = calibration._EXCHANGE_SIZES[:1]
