"""Models of transformers, for comparison."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="package", autouse=True)
def quiet_transformers() -> None:
    """Keep transformers' progress bars out of the tests' output."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
