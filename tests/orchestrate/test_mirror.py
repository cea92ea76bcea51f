"""The local copy of a cluster's run: what comes is merged, what is here is not sent again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from payload.errors import ConfigError
from payload.orchestrate.mirror import (
    Mirrored,
    known_ends,
    merge,
    read_mirrored,
    write_mirrored,
)
from payload.orchestrate.remote.control import read, send
from payload.results import RunPaths


@pytest.fixture
def there(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "there")
    paths.logs.mkdir(parents=True)
    return paths


@pytest.fixture
def here(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "here")
    paths.root.mkdir()
    return paths


def refresh(there: RunPaths, here: RunPaths) -> dict[str, int]:
    """One exchange; returns how many bytes of each growing file came (in base64)."""
    answer = json.loads(json.dumps(read(there.root, known_ends(here))))
    merge(here, answer)
    return {name: len(content) for name, (_, content) in answer["more"].items()}


def test_only_new_bytes_travel_and_the_copy_is_equal(there: RunPaths, here: RunPaths) -> None:
    there.metrics.write_text('{"step": 1}\n')
    there.rank_log(0).write_text("hello\n")
    there.state.write_text("{}")
    refresh(there, here)
    with there.metrics.open("a") as file:
        file.write('{"step": 2}\n')
    there.state.write_text('{"status": "running"}')
    came = refresh(there, here)
    assert came == {"metrics.jsonl": 16, "logs/rank_0000.log": 0}
    for path in (there.metrics, there.rank_log(0), there.state):
        copy = here.root / path.relative_to(there.root)
        assert copy.read_bytes() == path.read_bytes()


def test_a_file_that_was_cut_and_grew_again_comes_anew(there: RunPaths, here: RunPaths) -> None:
    # A resumed run removes the steps after its checkpoint and trains them again.
    there.metrics.write_text("".join(f'{{"step": {step}, "loss": 1}}\n' for step in range(9)))
    refresh(there, here)
    there.metrics.write_text("".join(f'{{"step": {step}, "loss": 2}}\n' for step in range(12)))
    refresh(there, here)
    assert here.metrics.read_text() == there.metrics.read_text()


def test_a_name_outside_of_the_run_folder_is_refused(here: RunPaths) -> None:
    with pytest.raises(ConfigError, match="outside"):
        merge(here, {"whole": {"../evil": "x"}, "more": {}})
    assert not (here.root.parent / "evil").exists()


def test_a_run_of_this_machine_has_no_mirror(here: RunPaths) -> None:
    assert read_mirrored(here) is None
    mirrored = Mirrored(alive=True, seen_unix=1.0, ssh_key="key")
    write_mirrored(here, mirrored)
    assert read_mirrored(here) == mirrored


def test_a_run_that_nobody_holds_gets_no_signal(there: RunPaths) -> None:
    there.state.write_text('{"supervisor_pid": 1}')
    there.lock.touch()
    assert send(there.root, [15]) == {"alive": False}
