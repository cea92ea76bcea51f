"""Two operators in one project: two folders, two states, and one name for their clusters."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.engine.engine import Done, Engine
from tests.orchestrate.cloud.standin import PROJECT, CloudStandIn
from tests.support.sampled import sampled

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
UP = ("up", "--yes", "--keep-on-failure", "--without-collect")
DOWN = ("down", "--yes", "--without-collect", "--project", PROJECT)
SWEEP = ("sweep", "--cluster", "dev", "--delete", "--yes", "--project", PROJECT)
Pair = tuple[Engine, Engine]
_STEPS = 4


@pytest.fixture
def operators(tmp_path: Path, cloud: CloudStandIn) -> Iterator[Pair]:
    """Return two operators, each with a folder, a state, and a stack `dev` of one node."""
    with (
        Engine(tmp_path / "ada", cloud, env=os.environ, is_fake=True, door="ada") as ada,
        Engine(tmp_path / "bob", cloud, env=os.environ, is_fake=True, door="bob") as bob,
    ):
        for each in (ada, bob):
            each.stack("init", "dev")
            each.configure(nodeCount=1)
        yield ada, bob


def changes_of_others(cloud: CloudStandIn) -> list[str]:
    """Return each change of a resource by another operator than its creator."""
    owners: dict[str, str] = {}
    found = []
    for sent in cloud.sent:
        if sent.method == "GET" or sent.status >= 300:
            continue
        made = made_by(sent.path, sent.body) if sent.method == "POST" else []
        if made:
            owners |= dict.fromkeys(made, sent.door)
            continue
        path = re.sub(r"/(set[A-Z]\w+|start|stop|wait)$", "", sent.path)
        owner = owners.get(path, sent.door)
        if owner != sent.door:
            found.append(f"{sent.door}: {sent.method} {sent.path} of {owner}")
        if sent.method == "DELETE":
            owners.pop(path, None)
            owners.pop(path.replace("/instances/", "/disks/"), None)
    return found


def made_by(path: str, body: dict[str, object]) -> list[str]:
    """Return the paths of resources created by a POST to a collection; empty for other POSTs."""
    if path.endswith("/serviceAccounts"):
        return [f"{path}/{body['accountId']}@{PROJECT}.iam.gserviceaccount.com"]
    if not re.search(r"/(global|zones/[^/]+|regions/[^/]+)/\w+$", path) or "name" not in body:
        return []
    own = f"{path}/{body['name']}"
    return [own, own.replace("/instances/", "/disks/")]


def check(done: Done) -> None:
    """Assert that a command succeeds, or fails with a one-line error."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr, done.stderr
    assert len(errors) == (done.returncode != 0), done.stderr


def test_a_name_that_is_taken_is_refused_before_anything_is_made(
    operators: Pair, cloud: CloudStandIn
) -> None:
    ada, bob = operators
    assert ada.orchestrate(*UP).returncode == 0
    machines, begun = ada.machines(), len(cloud.sent)
    refused = bob.orchestrate(*UP)
    check(refused)
    assert refused.returncode == 10 and "dev-network" in refused.stderr
    assert [each for each in cloud.sent[begun:] if each.method != "GET"] == []
    for words in (DOWN, SWEEP):
        check(bob.orchestrate(*words))
    assert changes_of_others(cloud) == []
    assert ada.machines() == machines
    assert ada.orchestrate(*DOWN).returncode == 0
    assert ada.left() == {}


def take_steps(operators: Pair, cloud: CloudStandIn, dice: random.Random) -> None:
    """Run commands of both operators at the same time, and kill some of them halfway."""
    started = []
    for each in operators:
        words = dice.choice((UP, UP, UP, DOWN, SWEEP))
        process = each.start("orchestrate", *words)
        requests = dice.choice((10**9, dice.randrange(1, 90)))
        started.append((each, process, len(cloud.requests) + requests))
        each.wait_for_requests(len(cloud.requests) + dice.randrange(60), process)
    for each, process, requests in sorted(started, key=lambda one: one[2]):
        each.wait_for_requests(requests, process)
        each.kill(process)


@pytest.mark.parametrize("seed", sampled(range(20), sample=(0,)))
def test_nobody_touches_what_the_other_has_made(
    operators: Pair, cloud: CloudStandIn, seed: int
) -> None:
    dice = random.Random(seed)
    cloud.operation_s = 0.02
    for _ in range(dice.randrange(1, _STEPS)):
        take_steps(operators, cloud, dice)
    both: Sequence[Engine] = dice.sample(operators, 2)
    for words in (UP, SWEEP, DOWN):
        for each in both:
            check(each.orchestrate(*words))
            assert changes_of_others(cloud) == []
    assert both[0].left() == {}
