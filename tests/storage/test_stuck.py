"""A store that does not answer, as a folder of a file server that is gone, holds up nobody."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.errors import PreflightError
from payload.storage import folder
from payload.storage.here import try_store_here
from payload.storage.objects import StoreError, open_store
from payload.store_address import StoreAddress, parse_store_address
from tests.support.launching import REPO


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[StoreAddress]:
    """A store whose lock another process keeps."""
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield parse_store_address(str(tmp_path))


def test_an_attempt_that_gets_no_answer_ends(stuck: StoreAddress) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    with pytest.raises(PreflightError, match=r"did not answer within 3 s.*storage\.results"):
        try_store_here(stuck, env=env, timeout_s=3.0)


def test_a_store_s_lock_is_not_waited_for_without_end(
    stuck: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_LOCK_S", 0.1)
    with pytest.raises(StoreError, match="keeps its lock"):
        open_store(stuck).put("a", io.BytesIO(b"x"), size=1)
