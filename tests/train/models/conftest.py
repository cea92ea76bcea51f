"""Models of transformers, for comparison."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def quiet_transformers() -> None:
    """Keep transformers' progress bars out of the tests' output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: for models of this size others only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
