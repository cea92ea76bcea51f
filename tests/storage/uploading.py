"""Uploads of a run's folder, from its first file to the last."""

from __future__ import annotations

import os

from payload.run_record.run_files import RunPaths, last_record
from payload.run_record.store_state import StoreState
from payload.storage.objects import ObjectStore
from payload.storage.uploader import Uploader


def upload_all(
    paths: RunPaths, store: ObjectStore, *, is_new: bool = False
) -> tuple[StoreState, list[str]]:
    """Run an uploader until everything is stored; return its last state and its messages."""
    receiver, sender = os.pipe()
    os.close(sender)
    messages: list[str] = []
    with os.fdopen(receiver) as commands:
        Uploader(
            paths,
            store,
            keep=2,
            final_wait_s=3.0,
            is_new=is_new,
            say=messages.append,
            first_pause_s=0.05,
        ).run(commands)
    state = last_record(StoreState, paths.store_state)
    assert state is not None
    return state, messages
