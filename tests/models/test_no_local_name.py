"""A model's name that nothing has: the message lists where it was looked for, in order."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from payload.core.errors import CheckpointError, TileforgeError, UsageError
from payload.data.tokenizers import load_tokenizer
from payload.report.source import find_run
from payload.weights.source import find_source, pinned_name_of


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Addresses that the code tried to reach; every attempt fails. The current folder is empty."""
    tried: list[object] = []

    def refuse(*address: object, **_: object) -> None:
        tried.append(address)
        raise OSError("no network in this test")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tried


@pytest.mark.parametrize("name", ["latest", "runs/latest", "runs/latest/checkpoints/best"])
def test_without_any_run_latest_is_refused_without_the_network(
    name: str, requests: list[object]
) -> None:
    for find in (lambda: find_source(name, setting="--model"), lambda: load_tokenizer(name)):
        with pytest.raises(TileforgeError):
            find()
    assert not requests


@pytest.mark.parametrize("name", ["latest", "runs/latest"])
def test_without_any_run_the_command_that_starts_one_is_named(
    name: str, requests: list[object]
) -> None:
    with pytest.raises(CheckpointError, match=r"no runs in runs yet\. Start one with: "):
        find_source(name, setting="--model")
    with pytest.raises(UsageError, match=r"no runs in runs yet\. Start one with: "):
        find_run(name)
    assert not requests


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("mine", "not a local folder, not a run in runs, and "),
        ("owner/mine", "not a local folder, and "),
    ],
)
def test_a_name_that_can_be_a_folder_a_run_or_on_the_hub_lists_them_in_order(
    name: str, places: str, requests: list[object]
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(places) + ".*Hugging Face hub"):
        pinned_name_of(name, setting="--model")
    assert requests
    with pytest.raises(TileforgeError, match=re.escape(places) + ".*Hugging Face hub"):
        load_tokenizer(name)
