"""Fixtures for comparisons with transformers' models."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="package", autouse=True)
def quiet_transformers() -> None:
    """Keep transformers' progress bars out of the tests' output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def bases_are_own(own_bases: None) -> None:
    """Accept bases without a run: these tests make adapters without runs."""


@pytest.fixture(scope="module", autouse=True)
def as_the_ranks_compute(one_thread: None) -> None:
    """Use one thread in this process, too."""
