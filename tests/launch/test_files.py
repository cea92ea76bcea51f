"""Hosts file, Accelerate config and command lines, compared verbatim."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from payload.config.launch_sections import LaunchSection
from payload.config.run_config import RunConfig, parse_run_config
from payload.config.training_sections import PrecisionSection
from payload.core.errors import ConfigError
from payload.core.validation.records import build
from payload.estimates.network import Link
from payload.estimates.run_estimate import estimate_run
from payload.launch.agent_launcher import AgentJob
from payload.launch.environment import Rendezvous, common_environment
from payload.launch.launcher import Job, Reach
from payload.launch.launcher_files import render_accelerate, render_hosts
from payload.launch.launchers.registry import find
from payload.launch.launchers.srun import each_node_command
from payload.launch.plan_record import LaunchPlan, rank_arguments, rank_program
from payload.launch.ranks import place_ranks
from payload.models.spec import ModelSpec
from payload.optimizers.adamw import UPDATE_S_PER_WEIGHT
from payload.report.source import Plan as ReportedPlan
from tests.launch.inventories import make_inventory
from tests.support.golden_files import assert_golden

RUN = Path("/runs/a run")
FIXTURE = Path(__file__).parents[1] / "fixtures/9e71e47/project/runs/full/plan.json"
INVENTORY = make_inventory(num_nodes=2, physical_cores=4, numa_domains=2)
PLACEMENT = place_ranks(INVENTORY.nodes, LaunchSection())
RENDEZVOUS = Rendezvous(address="10.0.0.2", port=29400, interfaces={})
ENVIRONMENT = common_environment(
    run_id="a",
    run_dir=str(RUN),
    rendezvous=RENDEZVOUS,
    malloc="tuned",
    tcmalloc=None,
    oversubscribed=False,
    python_path=None,
)
JOB = Job(
    executable="/venv/bin/mpirun",
    python="/venv/bin/python",
    rank_arguments=rank_arguments(RUN),
    environment=ENVIRONMENT,
    world_size=4,
    ranks_per_node=2,
    nodes=2,
    hosts=RUN / "hosts",
    folder=RUN,
    rendezvous=RENDEZVOUS,
    reach=Reach(interface="ens4", ssh=("-F", "/keys/a/ssh_config")),
)
MPIRUN = find("mpirun").argv(JOB)


def test_hosts_file_lists_the_head_first() -> None:
    assert_golden("hosts.2x2", render_hosts(INVENTORY.nodes))


@pytest.mark.parametrize("node_rank", [0, 1])
def test_accelerate_config_of_each_node(node_rank: int) -> None:
    text = render_accelerate(
        INVENTORY.nodes,
        PLACEMENT,
        node_rank=node_rank,
        hosts=RUN / "hosts",
        master_port=29400,
        precision=PrecisionSection(),
    )
    assert_golden(f"accelerate.2x2.node_{node_rank}.yaml", text)
    read = yaml.safe_load(text)
    assert (read["machine_rank"], read["num_machines"], read["num_processes"]) == (node_rank, 2, 4)
    assert ("mpirun_config" in read) == (node_rank == 0)


@pytest.mark.parametrize("name", ["it's", 'a "b"', "x: y # z", "$HOME", "\u00fc", "\U0001f600"])
def test_accelerate_config_quotes_hostile_paths(name: str) -> None:
    text = render_accelerate(
        INVENTORY.nodes,
        PLACEMENT,
        node_rank=0,
        hosts=Path("/runs") / name / "hosts",
        master_port=1,
        precision=PrecisionSection(dtype="fp32"),
    )
    read = yaml.safe_load(text)
    assert read["mpirun_config"]["mpirun_hostfile"] == f"/runs/{name}/hosts"
    assert read["mixed_precision"] == "no"


def test_mpirun_is_called_in_the_seeds_spelling() -> None:
    assert_golden("mpirun.2x2.argv", shlex.join(MPIRUN) + "\n")


def test_torchrun_gets_the_same_program() -> None:
    job = replace(
        JOB,
        executable="/venv/bin/python",
        world_size=2,
        nodes=1,
        rendezvous=replace(RENDEZVOUS, address="127.0.0.1"),
        reach=Reach(interface="lo"),
    )
    argv = find("torchrun").argv(job)
    assert_golden("torchrun.1x2.argv", shlex.join(argv) + "\n")


def test_torchrun_over_nodes_reaches_every_agent() -> None:
    job = replace(
        JOB, executable="/venv/bin/python", rank_arguments=(*JOB.rank_arguments, "{scratch}")
    )
    python, *start, text = find("torchrun").argv(job)
    assert [python, *start] == ["/venv/bin/python", "-m", "payload.supervise.agents"]
    agents = AgentJob.from_json(text)
    assert agents.ssh == JOB.reach.ssh and agents.environment.items() >= ENVIRONMENT.items()
    lines = [
        shlex.join(agents.on_node(rank, f"10.0.0.{2 + rank}", scratch="/tmp/a b"))
        for rank in range(2)
    ]
    # The ranks' own arguments are unchanged.
    assert all(line.endswith(" '{scratch}'") for line in lines)
    assert_golden("torchrun.2x2.argv", "\n".join(lines) + "\n")


def test_torchrun_in_a_slurm_job_is_one_task_on_every_node() -> None:
    reach = Reach(interface="ens4", each_node_command=each_node_command("/usr/bin/srun", 2))
    *start, text = find("torchrun").argv(replace(JOB, executable="/venv/bin/python", reach=reach))
    assert_golden("torchrun.slurm.2x2.argv", shlex.join(start) + "\n")
    agents = AgentJob.from_json(text)
    assert agents.ssh == ()
    over_ssh = find("torchrun").argv(replace(JOB, executable="/venv/bin/python"))[-1]
    # The ranks handle Slurm's SIGTERM; the agent would kill them 30 s later.
    assert agents.command == (
        *AgentJob.from_json(over_ssh).command,
        "--signals-to-handle",
        "SIGQUIT",
    )
    assert (agents.words, agents.environment) == (
        AgentJob.from_json(over_ssh).words,
        AgentJob.from_json(over_ssh).environment,
    )


def test_plan_reads_back_as_it_was_written() -> None:
    config = parse_run_config("", where="test")
    plan = LaunchPlan(
        run_id="a",
        launcher="mpirun",
        argv=MPIRUN,
        launcher_environment={"I_MPI_PIN": "off"},
        environment=ENVIRONMENT,
        interfaces={"node-0": "ens4", "node-1": "ens4"},
        program=rank_program(python="/venv/bin/python", run_dir=RUN),
        work_dir="/work",
        master_port=29400,
        world_size=4,
        ranks_per_node=2,
        nodes=2,
        arithmetic=estimate_run(
            config, spec=shape_of(config), world_size=4, link=Link(bytes_per_s=2e9)
        ),
        notes=("one",),
    )
    assert LaunchPlan.from_json(plan.to_json(), where="plan.json") == plan


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1}'])
def test_a_damaged_plan_is_reported(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^plan\.json: .*Start the run again\.$"):
        LaunchPlan.from_json(text, where="plan.json")


@pytest.mark.parametrize("reader", [LaunchPlan, ReportedPlan])
def test_a_plan_with_control_characters_in_its_folder_is_refused(reader: type) -> None:
    raw = json.loads(FIXTURE.read_text())
    build(reader, raw, where="plan.json")
    for name in ("/a\x1b]' ; touch PWNED; '\x07b", "/a\nb", "/a\x9bm"):
        with pytest.raises(ConfigError, match="path without control characters"):
            build(reader, raw | {"work_dir": name}, where="plan.json")


def test_a_plan_of_another_release_is_refused() -> None:
    with pytest.raises(ConfigError, match="schema_version is 2"):
        LaunchPlan.from_json('{"schema_version": 2}', where="plan.json")


def shape_of(config: RunConfig) -> ModelSpec:
    """The config's own sizes with GPT-2's vocabulary."""
    return config.model.spec(sequence_length=config.data.sequence_length, vocab_size=None)


def test_arithmetic_of_gpt2_on_three_nodes() -> None:
    config = parse_run_config(
        "[batch]\nglobal_batch_size = 96\nmicro_batch_size = 4\n[train]\nsteps = 10", where="test"
    )
    numbers = estimate_run(config, spec=shape_of(config), world_size=3, link=Link(bytes_per_s=2e9))
    assert numbers.params == 124_439_808
    assert numbers.tokens_per_step == 96 * 1024
    assert numbers.grad_accum_steps == 8
    assert numbers.grad_bytes == 4 * numbers.params
    # A ring of 3 sends 4/3 of the gradients: 664 MB at 16 Gbit/s.
    assert numbers.sync_s == pytest.approx(0.332, abs=1e-3)
    assert (
        estimate_run(config, spec=shape_of(config), world_size=1, link=Link(bytes_per_s=2e9)).sync_s
        == 0.0
    )
    assert (numbers.compute_s, numbers.step_s) == (None, None)


def test_a_step_is_predicted_where_the_peak_was_measured() -> None:
    config = parse_run_config("[batch]\nglobal_batch_size = 96", where="test")
    numbers = estimate_run(
        config,
        spec=shape_of(config),
        world_size=3,
        link=Link(bytes_per_s=2e9),
        peak_flops_per_s=12e12,
    )
    assert numbers.compute_s is not None and numbers.step_s is not None
    # A ring of 3 sends 4/3 of the last bucket, 22 MB, and of the rows of tokens that 12 sequences
    # have, 8 MB, after the backward pass. Then each rank updates the whole model.
    update_s = UPDATE_S_PER_WEIGHT * numbers.params
    assert numbers.step_s - numbers.compute_s - update_s == pytest.approx(0.020, abs=1e-3)


def test_a_batch_that_does_not_divide_names_those_that_do() -> None:
    config = parse_run_config("", where="test")
    with pytest.raises(ConfigError, match=r"global_batch_size = 32 .* Use 24 or 36"):
        estimate_run(config, spec=shape_of(config), world_size=3, link=Link(bytes_per_s=1e9))
