"""Messages between ranks: JSON that is checked on arrival, and never code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launching import mpirun, rank_env, run, train_program

pytestmark = pytest.mark.ranks


# The attacking rank sends a pickle, as torch's collectives for objects did. It does so when the
# ranks compare their states, and then waits until the other rank is gone.
_HOSTILE_RANK = """
import os, sys
import torch, torch.distributed as dist
from payload.train.__main__ import main
from payload.train.strategies.sync_check import RankState
from payload.train.ranks.world import World

def wait_for_the_end():
    try:
        dist.barrier()
    finally:
        os._exit(0)

class Evil:
    def __reduce__(self):
        return os.system, ("touch " + os.environ["PROOF"],)

def send_pickle(self, value, kind):
    from torch.distributed import distributed_c10d
    message, size = distributed_c10d._object_to_tensor(Evil(), torch.device("cpu"), None)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(sizes, size)
    message.resize_(max(int(each) for each in sizes))
    dist.all_gather([torch.empty_like(message) for _ in range(2)], message)
    wait_for_the_end()

def send(text):
    def gather(self, value, kind):
        message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([len(message)]))
        padded = torch.zeros(max(int(each) for each in sizes), dtype=torch.uint8)
        padded[: len(message)] = message
        dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)
        wait_for_the_end()
    return gather

def announce(count):
    def gather(self, value, kind):
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([count]))
        wait_for_the_end()
    return gather

if os.environ["PMI_RANK"] == "1":
    honest, attack = World.gather, eval(os.environ["ATTACK"])
    World.gather = lambda self, value, kind: (
        attack if kind is RankState else honest
    )(self, value, kind)
sys.exit(main(sys.argv[1:], os.environ))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "said"),
    [
        ("send_pickle", "the message from rank 1: byte 0 is not UTF-8"),
        ("send(b'[' * 20_000)", "the message from rank 1: nested too deeply"),
        ("send(b'7')", "the message from rank 1: expected an object, got 7"),
        ("send(b'{}')", "the message from rank 1: missing: weights, optimizer, not_finite"),
        ("send(b'9' * 4300)", "an integer of 4300 digits"),
        ("announce(2**40)", "rank 1 sent an invalid message size, 1099511627776 bytes"),
        ("announce(-1)", "rank 1 sent an invalid message size, -1 bytes"),
    ],
)
def test_a_hostile_rank_cannot_run_code_in_another_and_is_named(
    tmp_path: Path, tiny_config: Path, attack: str, said: str
) -> None:
    program, proof = tmp_path / "hostile.py", tmp_path / "proof"
    program.write_text(_HOSTILE_RANK, encoding="utf-8")
    words = train_program(tmp_path / "run", tiny_config, "train.steps=3")[2:]
    result = run(mpirun(2, str(program), *words), env=rank_env(ATTACK=attack, PROOF=str(proof)))
    assert result.returncode != 0
    record = json.loads((tmp_path / "run" / "exits" / "rank_0000.json").read_text())
    assert said in record["error"]
    assert not proof.exists()


def test_values_arrive_as_they_were_sent(tmp_path: Path) -> None:
    program = tmp_path / "talk.py"
    program.write_text(_TALK, encoding="utf-8")
    result = run(mpirun(3, str(program)))
    assert result.returncode == 0, result.stderr


_TALK = """
import os
from payload.config.launch_sections import DistributedSection
from payload.train.__main__ import exit_now
from payload.train.fabric import Speeds
from payload.train.ranks.world import World

world = World.from_env(os.environ)
world.join(DistributedSection())
assert world.broadcast("rank 0's" if world.is_main else None, str) == "rank 0's"
assert world.broadcast(world.is_main, bool) is True
own = Speeds(node="é" * (1 + 1000 * world.rank), bf16=1.5, fp32=float(world.rank))
for rank, each in enumerate(world.gather(own, Speeds)):
    assert each == Speeds(node="é" * (1 + 1000 * rank), bf16=1.5, fp32=float(rank))
assert world.gather(world.rank / 3, float) == [0.0, 1 / 3, 2 / 3]
world.barrier()
exit_now(0)
"""


def test_a_parameter_that_a_pass_did_not_use_has_a_gradient_of_zeros_there(tmp_path: Path) -> None:
    program = tmp_path / "unused.py"
    program.write_text(_UNUSED, encoding="utf-8")
    for ranks in (1, 2):
        result = run(mpirun(ranks, str(program)))
        assert result.returncode == 0, result.stderr


_UNUSED = """
import os
import torch
from torch import nn
from payload.config.launch_sections import DistributedSection
from payload.train.__main__ import exit_now
from payload.train.strategies.gradients import GradientExchange
from payload.train.ranks.world import World

class Experts(nn.Module):
    kernels = None
    def __init__(self):
        super().__init__()
        names = ("both", "first", "early", "never")
        self.by_name = nn.ParameterDict({name: torch.ones(3) for name in names})
    def tied_weight(self):
        return None

world = World.from_env(os.environ)
world.join(DistributedSection())
model = Experts()
exchange = GradientExchange(DistributedSection(), world)
exchange.attach(model)
p = model.by_name
for step in (1, 2):
    (2.0 * p["early"].sum()).backward()
    # From the first pass on it lies where it is sent from: nothing holds gradients twice.
    held = p["early"].grad.untyped_storage().nbytes()
    assert held == (12 if world.world_size == 1 else 4 * 12), held
    exchange.begin(torch.zeros(1, 1, dtype=torch.int64))
    loss = p["both"].sum() * (1 + world.rank)
    if world.is_main:
        loss = loss + p["first"].sum()
    loss.backward()
    exchange.finish()
    count = world.world_size
    expected = {"both": (1 + count) / 2, "first": 1 / count, "early": 2.0, "never": 0.0}
    for name, value in expected.items():
        assert torch.equal(p[name].grad, torch.full((3,), value)), (step, name, p[name].grad)
        p[name].grad = None
exit_now(0)
"""
