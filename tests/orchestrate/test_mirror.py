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
from payload.results import RankExit, RunPaths, write_json


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
    merge(here, answer, node="node-0")
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


def test_an_answer_says_how_much_it_has_no_room_for(there: RunPaths, here: RunPaths) -> None:
    there.metrics.write_text('{"step": 1}\n' * 10)
    there.rank_log(0).write_text("hello\n" * 10)
    left: list[int] = []
    while not left or left[-1]:
        answer = read(there.root, known_ends(here), most_bytes=70)
        merge(here, answer, node="node-0")
        left.append(answer["left"])
    assert left == [110, 40, 0]
    assert here.metrics.read_bytes() == there.metrics.read_bytes()
    assert here.rank_log(0).read_bytes() == there.rank_log(0).read_bytes()


def end_of(rank: int, *, node: str) -> RankExit:
    return RankExit(rank=rank, node=node, exit_code=137, signal=9, time_unix=1.0)


@pytest.mark.parametrize(
    ("node", "alive", "kept"),
    [("node-1", False, {0, 2}), ("node-0", False, {1, 2}), ("node-0", True, set())],
)
def test_the_end_of_a_rank_that_was_started_again_is_taken_back(
    there: RunPaths, here: RunPaths, node: str, alive: bool, kept: set[int]
) -> None:
    # A worker knows how its own ranks are, a living supervisor how all are.
    for rank in range(3):
        write_json(here.rank_exit(rank), end_of(rank, node=f"node-{rank}"))
    there.state.write_text("{}")
    answer = read(there.root, known_ends(here))
    merge(here, answer | {"alive": alive}, node=node)
    assert {rank for rank in range(3) if here.rank_exit(rank).exists()} == kept


def test_a_node_that_was_made_anew_takes_nothing_back(there: RunPaths, here: RunPaths) -> None:
    write_json(here.rank_exit(0), end_of(0, node="node-0"))
    merge(here, read(there.root, known_ends(here)), node="node-0")
    assert here.rank_exit(0).exists()


def test_a_name_outside_of_the_run_folder_is_refused(here: RunPaths) -> None:
    with pytest.raises(ConfigError, match="outside"):
        merge(here, {"alive": True, "whole": {"../evil": "x"}, "more": {}}, node="node-0")
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
