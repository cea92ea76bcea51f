"""Estimates within a container's limits: real control groups of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from payload.machines.machine import discover, total_memory_bytes
from tests.support.cgroup import ControlGroup
from tests.support.launching import REPO

pytestmark = pytest.mark.processes

_DISCOVER = """
import json
from payload.machines.machine import discover, free_memory_bytes
machine = discover()
print(json.dumps([machine.num_cores(), machine.memory_bytes, free_memory_bytes()]))
"""
_RANK = """
from payload.train.ranks.world import World
print(World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="").free_bytes())
"""
_GIB = 2**30


def json_of(inside: Sequence[str], *program: str) -> Any:
    """Return the JSON that a Python program prints in a control group."""
    start = [*inside, sys.executable, *program]
    done = subprocess.run(start, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_quota_and_a_memory_limit_bound_what_the_machine_has(control_group: ControlGroup) -> None:
    limit = 2 * _GIB
    assert limit < total_memory_bytes()
    with control_group(cpus=1.5, memory_bytes=limit) as inside:
        cores, memory, free = json_of(inside, "-c", _DISCOVER)
    assert (cores, memory) == (1, limit)
    # The process itself uses some of it.
    assert 0 < free < limit


def test_a_cpuset_leaves_its_cpus(control_group: ControlGroup) -> None:
    (cpu, *_) = discover().domains[0].cores
    with control_group(cpu_list=str(cpu)) as inside:
        assert json_of(inside, "-c", _DISCOVER)[0] == 1


def test_a_rank_counts_its_own_memory_and_what_the_limit_leaves(
    control_group: ControlGroup,
) -> None:
    with control_group(memory_bytes=2 * _GIB) as inside:
        assert _GIB < json_of(inside, "-c", _RANK) < 2.5 * _GIB


def test_a_plan_places_ranks_and_chooses_the_micro_batch_within_the_limits(
    control_group: ControlGroup,
) -> None:
    settings = ("batch.micro_batch_size=auto", "batch.global_batch_size=64", "model.preset=gpt2")
    words = (word for setting in settings for word in ("--set", setting))
    plan = ("-m", "payload.orchestrate", "plan", "--inventory", "local", "--json", *words)
    limit = 3 * _GIB  # a micro-batch of one sequence; other tests use memory, too
    with control_group(cpus=1.0, memory_bytes=limit) as inside:
        limited = json_of(inside, *plan)
    size = limited["config"]["batch"]["micro_batch_size"]
    (rank,) = limited["ranks"]
    assert limited["free_memory_bytes"] <= limit and len(rank["cores"]) == rank["threads"] == 1
    # Without the limit, the estimate of the same machine allows the whole batch of a rank.
    assert size * 4 <= json_of((), *plan)["config"]["batch"]["micro_batch_size"]
