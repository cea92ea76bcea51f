"""The local copy of a cluster's run: new data is merged, existing data is not sent again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import AnswerError, ConfigError
from payload.core.files import write_whole
from payload.machines.inventory import Access
from payload.orchestrate.node.control import read, send
from payload.orchestrate.runs.mirror import (
    Mirrored,
    file_request,
    merge,
    read_mirrored,
    record_contact,
    write_mirrored,
)
from payload.orchestrate.sites.ssh_run import is_copy_of
from payload.orchestrate.ssh.remote_calls import Part, Piece, parse_answer
from payload.run_record.checkpoint_manifest_hashes import ManifestHash, ManifestHashes, known_hashes
from payload.run_record.run_files import RunPaths, write_json
from payload.run_record.run_identity import known_identity
from tests.launch.inventories import make_inventory
from tests.orchestrate.damage import WAYS, damage_file
from tests.orchestrate.run_copies import (
    end_of,
    exit_text,
    progress_text,
    state_text,
    summary_text,
    write_ranks,
)
from tests.support.identities import MINE, THEIRS, write_identity

SEEN = Mirrored(alive=False, seen_unix=1.0, ssh_key="/k")


@pytest.fixture
def there(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "there" / "one")
    paths.logs.mkdir(parents=True)
    return paths


@pytest.fixture
def here(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "here" / "one")
    write_ranks(paths, "node-0", "node-1", "node-2")
    return paths


def hashes(checkpoint: str, sha256: str, *, time_unix: float = 1.0) -> ManifestHashes:
    """Return the record of a head that has written one checkpoint."""
    one = ManifestHash(checkpoint=checkpoint, sha256=sha256, time_unix=time_unix)
    return ManifestHashes(hashes=(one,))


def exchange(
    there: RunPaths,
    here: RunPaths,
    *,
    node: str = "node-0",
    alive: bool | None = None,
    most_bytes: int = 2**20,
) -> tuple[Part, list[str]]:
    """Exchange with a node once; return its answer and the messages about damage."""
    wanted = file_request(here, node, is_head=node == "node-0")
    arguments = json.loads(json.dumps(wanted.arguments()))
    raw = read(there.root, arguments["whole"], arguments["known"], most_bytes=most_bytes)
    if alive is not None:
        raw["alive"] = alive
    answer = parse_answer(Part, json.dumps(raw).encode(), node=node)
    return answer, merge(here, answer, wanted)


def refresh(there: RunPaths, here: RunPaths) -> dict[str, int]:
    """One exchange; returns how many bytes of each growing file came (in base64)."""
    answer, _ = exchange(there, here)
    return {name: len(piece.content) for name, piece in answer.more.items()}


def test_only_new_bytes_travel_and_the_copy_is_equal(there: RunPaths, here: RunPaths) -> None:
    there.metrics.write_text('{"step": 1}\n')
    there.rank_log(0).write_text("hello\n")
    there.state.write_text(state_text("one"))
    refresh(there, here)
    with there.metrics.open("a") as file:
        file.write('{"step": 2}\n')
    there.state.write_text(state_text("one", error="lost"))
    came = refresh(there, here)
    assert came == {"metrics.jsonl": 16, "logs/rank_0000.log": 0}
    for path in (there.metrics, there.rank_log(0), there.state):
        copy = here.root / path.relative_to(there.root)
        assert copy.read_bytes() == path.read_bytes()


def test_a_file_that_was_cut_and_grew_again_comes_whole(there: RunPaths, here: RunPaths) -> None:
    # A resumed run removes the steps after its checkpoint and trains them again.
    there.metrics.write_text("".join(f'{{"step": {step}, "loss": 1}}\n' for step in range(9)))
    refresh(there, here)
    there.metrics.write_text("".join(f'{{"step": {step}, "loss": 2}}\n' for step in range(12)))
    refresh(there, here)
    assert here.metrics.read_text() == there.metrics.read_text()


def test_a_copy_accepts_no_files_of_another_run_with_its_id(
    there: RunPaths, here: RunPaths
) -> None:
    """The attack: the head's folder was removed, and another user started another run in it."""
    write_identity(here, MINE)
    for paths, loss in ((there, 2), (here, 1)):
        paths.metrics.write_text(f'{{"step": 1, "loss": {loss}}}\n')
    there.state.write_text(state_text("one"))
    write_identity(there, THEIRS)
    with pytest.raises(AnswerError, match=f"{THEIRS.identity}.*{MINE.identity}.*two runs"):
        exchange(there, here)
    assert here.metrics.read_text() == '{"step": 1, "loss": 1}\n' and not here.state.exists()
    write_identity(there, replace(MINE, is_older=True))
    exchange(there, here)
    assert here.metrics.read_bytes() == there.metrics.read_bytes()
    assert known_identity(here) == MINE
    # The copy of an older version's run gets the identity that a resume gave to the run.
    here.identity.unlink()
    exchange(there, here)
    assert known_identity(here).identity == MINE.identity


def test_an_answer_reports_the_bytes_that_did_not_fit(there: RunPaths, here: RunPaths) -> None:
    there.metrics.write_text('{"step": 1}\n' * 10)
    there.rank_log(0).write_text("hello\n" * 10)
    left: list[int] = []
    while not left or left[-1]:
        answer, _ = exchange(there, here, most_bytes=70)
        left.append(answer.left)
    assert left == [110, 40, 0]
    assert here.metrics.read_bytes() == there.metrics.read_bytes()
    assert here.rank_log(0).read_bytes() == there.rank_log(0).read_bytes()


@pytest.mark.parametrize(
    ("node", "alive", "kept"),
    [
        ("node-1", False, {0, 2}),
        ("node-1", True, {0, 2}),
        ("node-0", False, {1, 2}),
        ("node-0", True, set()),
    ],
)
def test_the_exit_record_of_a_restarted_rank_is_removed(
    there: RunPaths, here: RunPaths, node: str, alive: bool, kept: set[int]
) -> None:
    # A worker knows how its own ranks are, a living supervisor how all are.
    for rank in range(3):
        write_json(here.rank_exit(rank), end_of(rank, node=f"node-{rank}"))
    write_whole(there.rank_progress(0), progress_text(0, node=node))
    exchange(there, here, node=node, alive=alive)
    assert {rank for rank in range(3) if here.rank_exit(rank).exists()} == kept


def test_a_replaced_node_removes_no_exit_records(there: RunPaths, here: RunPaths) -> None:
    write_json(here.rank_exit(0), end_of(0, node="node-0"))
    exchange(there, here)
    assert here.rank_exit(0).exists()


LONG = "x" * 20_000
HOSTILE: dict[str, list[object]] = {
    "collected": [
        *("../../x", "/etc", "step_1", "step_00000010/..", "latest", "step_00000010\n", "\x1b[2J"),
        *(LONG, 7, True, [], {}),
    ],
    "ssh_key": ["", "a\0b", "a\nb", "\x1b]52;c;eA==\x07", LONG, None, 7],
    "seen_unix": [-1, 1e300, 10**18, "1", LONG, None, True],
    "alive": ["yes", 1, None, LONG, [LONG]],
    "schema_version": [2, True, LONG, None, {LONG: LONG}],
}


@pytest.mark.parametrize("text", [None, "{", "[]", "\0"])
def test_a_copy_without_a_valid_mirror_json_is_still_a_copy_and_attach_writes_a_new_one(
    here: RunPaths, text: str | None
) -> None:
    inventory = replace(make_inventory(), ssh_user="trainer", access=Access(kind="direct"))
    here.inventory.write_text(inventory.to_json())
    here.plan.write_text("{}")
    if text is not None:
        (here.root / "mirror.json").write_text(text)
    assert is_copy_of(here, inventory)
    assert not is_copy_of(here, replace(inventory, cluster="another"))
    record_contact(here, alive=False, ssh_key=Path("key"))
    mirrored = read_mirrored(here)
    assert mirrored is not None and mirrored.collected is None


@pytest.mark.parametrize(
    ("field", "value"), [(field, each) for field, values in HOSTILE.items() for each in values]
)
def test_a_hostile_value_in_mirror_json_is_one_short_line(
    here: RunPaths, field: str, value: object
) -> None:
    write_mirrored(here, SEEN)
    path = here.root / "mirror.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ConfigError) as raised:
        read_mirrored(here)
    said = str(raised.value)
    assert said.startswith(f"{path}: ") and " attach " in said
    assert said.isprintable() and len(said.replace(str(path), "")) < 300


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[]", b"7", b"{}", b"[" * 20_000, b'{"alive":' * 20_000, b"\xff{}", b"NaN"),
        *(b'{"seen_unix": 1e999}', b'{"seen_unix": Infinity}', b'{"x": ' + b"1" * 4300 + b"}"),
        b'{"x": "' + LONG.encode(),
    ],
)
def test_a_mirror_json_that_is_no_record_is_one_short_line(here: RunPaths, text: bytes) -> None:
    path = here.root / "mirror.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as raised:
        read_mirrored(here)
    said = str(raised.value)
    assert said.isprintable() and len(said.replace(str(path), "")) < 300


@pytest.mark.parametrize("collected", [None, "", "step_00000010"])
def test_a_valid_mirror_json_reads_back(here: RunPaths, collected: str | None) -> None:
    write_mirrored(here, replace(SEEN, collected=collected))
    assert read_mirrored(here) == replace(SEEN, collected=collected)


FOREIGN = [
    "/etc/passwd",
    "../evil",
    "logs/../../evil",
    "",
    ".",
    "logs",
    "run.toml",
    "plan.json",
    "mirror.json",
    "inventory.json",
    ".copy.lock",
    "checkpoints/step_00000010/manifest.json",
    "logs/rank_0003.log",
    "logs/rank_0000.log\n",
    "logs/\0",
    "logs/\x1b[2J.log",
    "x" * 4096,
]
HEADS_OWN = ["state.json", "summary.json", "manifest_hashes.json", "progress/rank_0001.json"]
OTHERS = ["exits/rank_0000.json", "exits/rank_0002.json"]


def content_of(root: Path) -> dict[str, bytes]:
    """Every file below `root`."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_hashes_of_several_heads_are_added_and_the_latest_of_a_step_counts(
    there: RunPaths, here: RunPaths
) -> None:
    told = [
        hashes("step_00000001", "1" * 64, time_unix=1.0),
        hashes("step_00000002", "2" * 64, time_unix=2.0),
        hashes("step_00000001", "3" * 64, time_unix=3.0),
        hashes("step_00000002", "4" * 64, time_unix=1.0),  # an older head's, seen again
    ]
    for record in told:
        write_whole(there.manifest_hashes, record.to_json())
        exchange(there, here)
    expected = {"step_00000001": "3" * 64, "step_00000002": "2" * 64}
    assert known_hashes(here).by_name() == expected


def test_metrics_that_come_over_ssh_have_a_limit(
    there: RunPaths, here: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a head sent rows until the operator's disk was full."""
    monkeypatch.setattr("payload.orchestrate.runs.mirror.MOST_BYTES", 100)
    for size in (60, 160, 300):
        there.metrics.write_bytes(b"x" * size)
        exchange(there, here)
        assert here.metrics.stat().st_size == min(size, 100)


def test_logs_that_come_over_ssh_leave_half_of_the_disk(
    there: RunPaths, here: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a worker's rank printed until the operator's disk was full."""
    free = 1000
    monkeypatch.setattr(
        "payload.storage.records.free_bytes", lambda _: free - here.rank_log(0).stat().st_size
    )
    write_whole(here.rank_log(0), "")
    there.metrics.write_text('{"step": 1}\n')
    there.rank_log(0).write_bytes(b"x" * 400)
    assert exchange(there, here)[1] == []
    there.rank_log(0).write_bytes(b"x" * 900)
    there.metrics.write_text('{"step": 1}\n' * 100)
    _, problems = exchange(there, here)
    assert here.rank_log(0).stat().st_size == 500 and "half of the free disk" in problems[0]
    assert here.metrics.read_bytes() == there.metrics.read_bytes()
    # Data that was not accepted is not sent again and again.
    answer, problems = exchange(there, here)
    assert list(answer.more) == ["metrics.jsonl"] and "half of the free disk" in problems[0]
    free = 100_000
    assert exchange(there, here)[1] == []
    assert here.rank_log(0).read_bytes() == there.rank_log(0).read_bytes()
    monkeypatch.setattr("payload.storage.records._MOST_LOG_BYTES", 900)
    assert "4 GiB" in exchange(there, here)[1][0]


@pytest.mark.parametrize("name", [*FOREIGN, *HEADS_OWN, *OTHERS])
def test_a_worker_can_only_report_its_own_ranks_exits(here: RunPaths, name: str) -> None:
    before = content_of(here.root.parent.parent)
    wanted = file_request(here, "node-1", is_head=False)
    answer = Part(alive=True, begun=True, whole={name: state_text("one")}, more={}, left=0)
    with pytest.raises(AnswerError, match=r"^node-1: response: the file .* was not requested"):
        merge(here, answer, wanted)
    assert content_of(here.root.parent.parent) == before


@pytest.mark.parametrize("name", [*FOREIGN, "metrics.jsonl", "logs/rank_0000.log"])
def test_a_worker_sends_its_own_ranks_logs_and_nothing_else(here: RunPaths, name: str) -> None:
    before = content_of(here.root.parent.parent)
    wanted = file_request(here, "node-1", is_head=False)
    piece = Piece(offset=0, content="aGk=")
    answer = Part(alive=True, begun=True, whole={}, more={name: piece}, left=0)
    with pytest.raises(AnswerError, match=r"^node-1: response: the file .* was not requested"):
        merge(here, answer, wanted)
    assert content_of(here.root.parent.parent) == before


@pytest.mark.parametrize("name", FOREIGN)
def test_a_head_sends_the_run_s_known_files_and_nothing_else(here: RunPaths, name: str) -> None:
    before = content_of(here.root.parent.parent)
    wanted = file_request(here, "node-0", is_head=True)
    for answer in (
        Part(alive=True, begun=True, whole={name: "{}"}, more={}, left=0),
        Part(alive=True, begun=True, whole={}, more={name: Piece(offset=0, content="")}, left=0),
    ):
        with pytest.raises(AnswerError, match=r"^node-0: "):
            merge(here, answer, wanted)
    assert content_of(here.root.parent.parent) == before


@pytest.mark.parametrize(
    ("offset", "content"), [(1, "aGk="), (2**62, "aGk="), (0, "not base64!"), (0, "\u00e4")]
)
def test_a_piece_fits_the_copy_or_is_refused(here: RunPaths, offset: int, content: str) -> None:
    wanted = file_request(here, "node-0", is_head=True)
    piece = Piece(offset=offset, content=content)
    with pytest.raises(AnswerError, match=r"^node-0: response: metrics\.jsonl "):
        merge(
            here,
            Part(alive=True, begun=True, whole={}, more={"metrics.jsonl": piece}, left=0),
            wanted,
        )
    assert not here.metrics.exists()


def test_damage_on_the_node_is_reported_and_the_copy_stays(here: RunPaths) -> None:
    good = {
        "state.json": state_text("one"),
        "summary.json": summary_text("one"),
        "progress/rank_0001.json": progress_text(1, node="node-1"),
        "exits/rank_0002.json": exit_text(2, node="node-2"),
        "manifest_hashes.json": hashes("step_00000001", "0" * 64).to_json(),
    }
    wanted = file_request(here, "node-0", is_head=True)
    assert merge(here, Part(alive=True, begun=True, whole=good, more={}, left=0), wanted) == []
    before = content_of(here.root)
    swapped = {
        "state.json": state_text("another"),
        "summary.json": summary_text("another"),
        "progress/rank_0001.json": progress_text(2, node="node-1"),
        "exits/rank_0002.json": exit_text(1, node="node-2"),
        "manifest_hashes.json": hashes("../step_00000001", "0" * 64).to_json(),
    }
    bad = [{name: text for name in good} for text in ("", "{", "[]", "{}", "[" * 20_000, "\0")]
    for whole in (swapped, *bad):
        answer = Part(alive=True, begun=True, whole=whole, more={}, left=0)
        problems = merge(here, answer, wanted)
        assert len(problems) == len(good) and all("\n" not in problem for problem in problems)
        assert content_of(here.root) == before


def test_a_worker_s_exit_record_names_only_that_worker(here: RunPaths) -> None:
    wanted = file_request(here, "node-1", is_head=False)
    whole = {"exits/rank_0001.json": exit_text(1, node="node-0")}
    answer = Part(alive=False, begun=True, whole=whole, more={}, left=0)
    assert merge(here, answer, wanted) != []
    assert not here.rank_exit(1).exists()


LINKED = ["metrics.jsonl", "logs", "logs/rank_0001.log", "progress", "exits", ""]


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("dangling", [False, True])
def test_a_symlink_in_the_copy_is_neither_read_nor_written_through(
    there: RunPaths, here: RunPaths, tmp_path: Path, name: str, dangling: bool
) -> None:
    there.metrics.write_text("1\n")
    there.rank_log(1).write_text("log\n")
    there.state.write_text(state_text("one"))
    write_whole(there.rank_progress(0), progress_text(0, node="node-0"))
    write_whole(there.rank_exit(0), exit_text(0, node="node-0"))
    outside = tmp_path / "outside"
    link = here.root / name if name else here.root
    if not name:
        here.root.rename(outside)
    elif not dangling and "." in name:
        outside.write_text("a secret")
    elif not dangling:
        outside.mkdir()
    before = content_of(outside) if outside.is_dir() else outside.exists()
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(ConfigError, match=r"is a symlink, .* Move the symlink away\.$"):
        exchange(there, here)
    assert (content_of(outside) if outside.is_dir() else outside.exists()) == before
    if outside.is_file():
        assert outside.read_text() == "a secret"


def test_a_small_file_replaces_a_symlink_and_not_its_target(
    there: RunPaths, here: RunPaths, tmp_path: Path
) -> None:
    there.state.write_text(state_text("one"))
    outside = tmp_path / "outside"
    outside.write_text("mine")
    partial = here.root / f".state.json.{os.getpid()}.partial"
    partial.symlink_to(outside)
    with pytest.raises(ConfigError):
        exchange(there, here)
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("kind", ["symlink", "pipe", "folder"])
def test_only_regular_files_of_the_node_are_sent(
    there: RunPaths, here: RunPaths, tmp_path: Path, kind: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(state_text("one"))
    for path in (there.metrics, there.rank_log(1), there.state):
        if kind == "symlink":
            path.symlink_to(secret)
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
    answer, damaged = exchange(there, here)
    assert (dict(answer.whole), dict(answer.more), damaged) == ({}, {}, [])


def test_a_run_of_this_machine_has_no_mirror(here: RunPaths) -> None:
    assert read_mirrored(here) is None
    mirrored = Mirrored(alive=True, seen_unix=1.0, ssh_key="key")
    write_mirrored(here, mirrored)
    assert read_mirrored(here) == mirrored


@pytest.mark.parametrize(
    ("name", "way"),
    # A link in the lock's place is refused by name.
    [*(("mirror.json", way) for way in WAYS), (".mirror.lock", "a folder in its place")],
)
def test_a_damaged_mirror_file_does_not_prevent_its_update(
    here: RunPaths, tmp_path: Path, name: str, way: str
) -> None:
    (tmp_path / "source").write_text("{}")
    path, outside = here.root / name, tmp_path / "outside"
    damage_file(path, way=way, source=tmp_path / "source", outside=outside)
    record_contact(here, alive=True, ssh_key=Path("/k"))
    mirrored = read_mirrored(here)
    assert mirrored is not None and (mirrored.alive, mirrored.ssh_key) == (True, "/k")
    assert outside.read_text() == "not the run's"


def test_a_run_without_a_supervisor_gets_no_signal(there: RunPaths) -> None:
    there.state.write_text('{"supervisor_pid": 1}')
    there.lock.touch()
    assert send(there.root, [15]) == {"alive": False}
