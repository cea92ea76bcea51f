"""From a request and the machines to a plan; the trial of preflight starts like a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from payload.config.run_config import RunConfig, parse_run_config
from payload.core.errors import ConfigError
from payload.machines.inventory import Access
from payload.orchestrate.inventories.chosen import ResolvedInventory
from payload.orchestrate.machine_profiles.offline_plan import dry_run_access
from payload.orchestrate.preflight.cluster_trial import trial_arguments
from payload.orchestrate.runs.launcher_choice import choose_launcher
from payload.orchestrate.runs.planning import PlanTarget, resolve, resolve_placement
from payload.orchestrate.runs.resolved_plan import NodeCopies, ResolvedPlan
from payload.orchestrate.runs.run_request import PlanRequest
from payload.run_record.run_files import RunPaths
from tests.launch.inventories import make_inventory

INVENTORY = replace(make_inventory(num_nodes=2), access=Access(kind="direct"), source="file")
CHOSEN = ResolvedInventory(inventory=INVENTORY, why="test", domains={})
PATHS = RunPaths(Path("/srv/tileforge/runs/one"))


def configured(*overrides: str) -> RunConfig:
    return parse_run_config("", overrides=overrides, where="test")


def planned(config: RunConfig, copies: NodeCopies | None = None) -> ResolvedPlan:
    profile = dry_run_access(INVENTORY, None, run_id="one")
    target = PlanTarget(
        chosen=CHOSEN,
        profile=profile,
        paths=PATHS,
        work_dir=Path("/srv"),
        port=29400,
        copies=copies,
    )
    return resolve(PlanRequest(config=config, vocab_size=None), target)


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_the_trial_starts_by_the_command_of_a_run_with_another_program(launcher: str) -> None:
    config = configured(f"launch.launcher={launcher}")
    run, profile = planned(config), dry_run_access(INVENTORY, None, run_id="one")
    trial = trial_arguments(
        choose_launcher(launcher, profile),
        profile,
        INVENTORY.nodes,
        run.placement,
        paths=PATHS,
        port=29400,
        on_gpus=False,
    )
    argv = run.plan.argv
    place = next(i for i, word in enumerate(argv) if "payload.supervise.rank" in word)
    assert place > 1 and trial["argv"][:place] == argv[:place]
    assert "payload.train.fabric" in trial["argv"][place]
    assert trial["environment"] == {**run.plan.launcher_environment, **run.plan.environment}
    assert (trial["ssh"], trial["hosts"]) == (run.plan.ssh, run.hosts())


def test_a_plan_s_files_name_the_nodes_copies_there_and_the_operator_s_paths_here() -> None:
    copies = NodeCopies(data_dir="/srv/tileforge/data/1f", init="/srv/tileforge/weights/2e")
    plan = planned(configured("data.dir=mine", "distributed.strategy=zero3"), copies)
    here, there = plan.files(), plan.files_on_nodes()
    assert {name for name in here if here[name] != there[name]} == {"run.toml"}
    named = parse_run_config(there["run.toml"], where="test")
    assert (named.data.dir, named.model.init) == (copies.data_dir, copies.init)
    assert replace(named, data=plan.config.data, model=plan.config.model) == plan.config
    assert plan.config.data.dir == plan.plan.data_dir == "mine"
    assert planned(configured()).files_on_nodes() == planned(configured()).files()


def test_placement_launcher_and_time_limit_are_decided_before_any_node_is_reached() -> None:
    placed = resolve_placement(configured("limits.max_hours=2"), CHOSEN)
    assert placed.time_limit is not None and placed.time_limit.seconds == 7200
    assert placed.placement == planned(configured()).placement
    assert placed.launcher.name == planned(configured()).plan.launcher == "mpirun"
    with pytest.raises(ConfigError, match="has no hourly_usd"):
        resolve_placement(configured("limits.max_usd=2"), CHOSEN)
