"""Formats numbers, times and settings as readable text."""

from __future__ import annotations

import json
from datetime import UTC, datetime


def count(value: float) -> str:
    """Format a number like `1,234`."""
    return f"{value:,.0f}"


def loss(value: float) -> str:
    """Format a loss with four decimals."""
    return f"{value:.4f}"


def percent(value: float) -> str:
    """Format a fraction like `41.2 %`."""
    return f"{value:.1%}".replace("%", " %")


def usd(value: float) -> str:
    """Format dollars with two decimals; below one cent, with two significant digits."""
    if value and abs(value) < 0.01:
        return f"${value:.2g}"
    return f"${value:,.2f}"


def seconds(value: float) -> str:
    """Format a short time with three significant digits."""
    return f"{value * 1e3:.3g} ms" if 0 < value < 0.9995 else f"{value:.3g} s"


def gib(value: float) -> str:
    """Format bytes in GiB with two decimals."""
    return f"{value / 2**30:.2f} GiB"


def megabytes(value: float) -> str:
    """Format bytes in MB with one decimal."""
    return f"{value / 1e6:,.1f} MB"


def memory_gib(value: float) -> str:
    """Format GiB with four significant digits."""
    return f"{value:.4g} GiB"


def tflops(value: float) -> str:
    """Format FLOP/s in TFLOP/s with three significant digits."""
    return f"{value / 1e12:.3g} TFLOP/s"


def plain(value: object) -> str:
    """Format a setting as in TOML, but strings without quotes and None as `none`."""
    if isinstance(value, tuple | list):
        return json.dumps(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def moment(value: float) -> str:
    """Format a Unix time as date and time in UTC."""
    try:
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "?"
