"""A hostile node's responses: every field of each is validated."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from payload.core.errors import AnswerError, ConfigError, RankLostError
from payload.core.printable_text import printable
from payload.core.validation.names import RUN_ID
from payload.machines.inventory import Node
from payload.orchestrate.findings.nodes import NodeFacts
from payload.orchestrate.findings.trial import MARK, Outcome, Result
from payload.orchestrate.runs.mirror import file_request, merge
from payload.orchestrate.runs.remote_run import RemoteRun, planned_run_dir
from payload.orchestrate.ssh.remote_calls import (
    FOLDER,
    Begun,
    Finished,
    Left,
    MeshAnswer,
    NodeState,
    Part,
    Signalled,
    parse_answer,
)
from payload.orchestrate.ssh.remote_run_folders import NodeRuns
from payload.orchestrate.ssh.run_keys import _Created as KeyMade
from payload.orchestrate.ssh.run_keys import _Names as Names
from payload.orchestrate.ssh.start_claim import _Claimed as Claimed
from payload.run_record.approved_settings import MOST_WAIT_S
from payload.run_record.run_files import RankProgress, RunPaths, write_json
from tests.orchestrate.hostile import LOOK, PUBLIC, STRINGS, VALUES, files_below
from tests.orchestrate.run_copies import exit_text, write_ranks
from tests.orchestrate.sshd import make_cluster
from tests.support.run_folders import write_state

FACTS = {
    "time_unix": 1.0,
    "took_s": 0.5,
    "hostname": "node-0",
    "hostname_addresses": ["10.0.0.2"],
    "architecture": "x86_64",
    "python": "3.11.2",
    "bootstrap": {"step": "done", "ok": True, "reason": None},
    "bootstrap_log": ["done"],
    "cpu_flags": ["amx_bf16"],
    "physical_cores": 4,
    "numa_domains": 1,
    "memory_bytes": 2**34,
    "disk_path": "/home/trainer",
    "disk_free_bytes": 2**34,
    "interface": "eth0",
    "source_address": "10.0.0.2",
    "mtu": 1460,
    "resolver_answers": True,
    "shared": {"folder": "/srv/shared", "mounted": True, "took_s": 0.01, "error": None},
}
HONEST: list[tuple[type[Any], dict[str, Any]]] = [
    (NodeState, LOOK),
    (
        NodeRuns,
        {
            "running": "one",
            "runs": [{"run_id": "one", "checkpoint": "step_00000010", "state": "a" * 64}],
        },
    ),
    (Claimed, {"claim": True, "running": "one", "held": "{}"}),
    (Names, {"names": ["one.0123abcd"]}),
    (Finished, {"wrong": ["payload/__init__.py"]}),
    (KeyMade, {"folder": "/home/trainer/.ssh/tileforge/one", "public": PUBLIC}),
    (Begun, {"pid": 7, "running": None, "status": None, "said": "words"}),
    (
        Part,
        {
            "alive": True,
            "begun": True,
            "whole": {"state.json": "{}"},
            "more": {"metrics.jsonl": {"offset": 0, "content": "aGk="}},
            "left": 0,
        },
    ),
    (Signalled, {"alive": True}),
    (Left, {"pids": [7]}),
    (
        MeshAnswer,
        {
            "bind_error": "no",
            "port_taken": False,
            "pairs": {"node-1": {"failed": {"20001": "refused"}, "largest_packet": 1460}},
        },
    ),
    (NodeFacts, FACTS),
    (
        Outcome,
        {
            "unreached": {"node-1": "refused"},
            "status": 0,
            "late": False,
            "stdout": MARK + '{"rank": 0}',
            "stderr": "",
        },
    ),
]
PATHS = {(NodeState, "home"), (KeyMade, "folder")}
RUNS = {(NodeState, "running"), (NodeRuns, "running"), (Claimed, "running"), (Begun, "running")}


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value of a response; only the first item of a list."""
    yield way
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*way, key))
    elif isinstance(value, list):
        yield from places(value[0], (*way, 0))


def changed(value: Any, way: tuple[Any, ...], by: Any) -> Any:
    """Return the response with another value at one path."""
    if not way:
        return by
    copy = value.copy()
    copy[way[0]] = changed(value[way[0]], way[1:], by)
    return copy


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("cls", "honest"), HONEST, ids=lambda each: getattr(each, "__name__", ""))
def test_every_field_of_every_answer_is_held_to_its_form(
    cls: type[Any], honest: dict[str, Any], every: int
) -> None:
    assert parse_answer(cls, json.dumps(honest).encode(), node="node-0")
    for number, way in enumerate(places(honest)):
        for value in VALUES[number % every :: every]:
            text = json.dumps(changed(honest, way, value)).encode()
            try:
                found = parse_answer(cls, text, node="node-0")
            except AnswerError as error:
                words = str(error)
                assert words.startswith("node-0: "), words
                assert words == printable(words) and "\n" not in words and len(words) < 500
                continue
            at = (cls, *way)
            if isinstance(value, str) and at in PATHS:
                assert FOLDER.fullmatch(value) and ".." not in value, value
            if isinstance(value, str) and at in RUNS:
                assert RUN_ID.fullmatch(value), value
            assert asdict(found)  # the file is complete


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"{",
        b"[]",
        b'"x"',
        b"{" * 20_000,
        b'{"running": ' + b"[" * 20_000,
        b'{"running": NaN}',
        b'{"running": ' + b"1" * 4301 + b"}",
        b'{"running": "\\ud800"}',
    ],
    ids=range(10),
)
def test_an_answer_that_is_none_is_refused_in_one_line(text: bytes) -> None:
    with pytest.raises(AnswerError, match=r"^node-0: ") as raised:
        parse_answer(NodeRuns, text, node="node-0")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("is_head", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_field_of_a_node_s_part_writes_anything_but_that_node_s_files(
    tmp_path: Path, is_head: bool
) -> None:
    paths = RunPaths(tmp_path / "runs" / "one")
    write_ranks(paths, "node-0", "node-1")
    (tmp_path / "secret").write_text("mine")
    wanted = file_request(paths, "node-0", is_head=is_head)
    honest: dict[str, Any] = {
        "alive": True,
        "begun": True,
        "whole": {"exits/rank_0000.json": exit_text(0, node="node-0")},
        "more": {"logs/rank_0000.log": {"offset": 0, "content": "aGk="}},
        "left": 0,
    }
    own = {f"runs/one/{name}" for name in (*wanted.whole, *wanted.known)}
    own |= {"runs/one/ranks.json", "secret"}
    answers = [changed(honest, way, value) for way in places(honest) for value in VALUES]
    for name in (*STRINGS, "../../secret", "ranks.json", str(tmp_path / "secret")):
        for text in (*honest["whole"].values(), *STRINGS):
            answers.append(honest | {"whole": {name: text}})
        answers.append(honest | {"more": {name: {"offset": 0, "content": "aGk="}}})
    refused = 0
    for answer in answers:
        try:
            part = parse_answer(Part, json.dumps(answer).encode(), node="node-0")
            problems = merge(paths, part, wanted)
        except AnswerError as error:
            refused += 1
            problems = [str(error)]
        for problem in problems:
            assert problem == printable(problem) and "\n" not in problem and len(problem) < 500
        assert set(files_below(tmp_path)) <= own
    assert refused > 1000 and (tmp_path / "secret").read_text() == "mine"
    assert len(paths.ranks.read_text()) > 100


def test_what_ranks_say_in_a_trial_is_held_to_its_form() -> None:
    speed = {"node": "node-0", "bf16": 2e12, "fp32": 1e12}
    exchange = {"all_reduce_bytes_per_s": 1e9, "latency_s": 0.1, "received_bytes_per_s": [1e9]}
    honest = {"rank": 0, "node": "node-0", "result": {"ranks": [speed], "exchange": exchange}}
    for way in places(honest):
        for value in VALUES:
            said = MARK + json.dumps(changed(honest, way, value))
            said += MARK + "[" * 20_000 + MARK + "1" * 5000 + MARK + '{"result": NaN}' + MARK
            outcome = Outcome(unreached={}, status=0, late=False, stdout=said, stderr="")
            result = outcome.result()
            if isinstance(result, Result):
                assert all(rank.bf16 > 0 and rank.fp32 > 0 for rank in result.ranks)


@pytest.mark.processes
@pytest.mark.parametrize("run_dir", [*STRINGS, "/home/trainer/tileforge/runs/another"])
def test_where_a_run_lies_on_the_nodes_is_held_to_its_form(tmp_path: Path, run_dir: str) -> None:
    from tests.supervise.planned import plan_stand_in

    paths = plan_stand_in(tmp_path / "one", ranks=1)
    text = paths.plan.read_text()
    plan = json.loads(text)
    plan["environment"]["TILEFORGE_RUN_DIR"] = run_dir
    paths.plan.write_text(json.dumps(plan))
    with pytest.raises(ConfigError):
        planned_run_dir(paths)


def test_a_head_that_says_it_saves_for_ever_can_be_left_and_nothing_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the head's grace period was of years, and Ctrl-C waited until it was over."""
    paths = RunPaths(tmp_path / "one")
    write_state(paths, grace_s=1e300)
    paths.config.touch()
    beat = RankProgress(rank=0, node="node-0", pid=7, step=3, phase="checkpoint", time_unix=1.0)
    write_json(paths.rank_progress(0), beat)
    node = Node(name="node-0", address="127.0.0.1", physical_cores=1, memory_gib=1)
    run = RemoteRun(
        paths,
        make_cluster(node),
        run_dir=PurePosixPath("/srv/tileforge/runs/one"),
        key=tmp_path / "key",
        connect=lambda: pytest.fail("no connection is needed"),
    )
    kills: list[bool] = []

    def act(self: RemoteRun, node: Node, answer: type[object], **arguments: object) -> Left:
        kills.append(bool(arguments["kill"]))
        return Left(pids=(7,))

    monkeypatch.setattr(RemoteRun, "_act", act)
    monkeypatch.setattr(RemoteRun, "refresh", lambda self: False)
    presses = iter([False, False, True])
    with pytest.raises(RankLostError, match="may still be saving"):
        run.end_leftovers(interrupted=lambda: next(presses))
    assert kills == [False] * 3
    # Without Ctrl-C, the wait has an end.
    monkeypatch.setattr(time, "monotonic", partial(next, iter([0.0, MOST_WAIT_S + 1.0])))
    period = run._grace_period()
    assert period is not None
    write_json(paths.rank_progress(0), replace(beat, phase="step"))
    assert period.is_over()
