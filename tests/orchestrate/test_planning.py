"""From a request and the machines to a plan; the trial of preflight starts like a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import cast

import pytest

import payload
from payload.config.run_config import RunConfig, parse_run_config
from payload.core.errors import ConfigError
from payload.launch.launcher import Job, Launcher
from payload.launch.plan_record import LaunchPlan
from payload.machines.inventory import Access, ClusterInventory
from payload.orchestrate.inventories.chosen import ResolvedInventory
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.machine_profiles.offline_plan import dry_run_access
from payload.orchestrate.preflight.cluster_trial import trial_arguments
from payload.orchestrate.runs.launcher_choice import choose_launcher
from payload.orchestrate.runs.planning import PlanTarget, resolve, resolve_placement
from payload.orchestrate.runs.resolved_plan import NodeCopies, ResolvedPlacement, ResolvedPlan
from payload.orchestrate.runs.run_request import PlanRequest, RunRequest
from payload.orchestrate.sites.local import Local
from payload.orchestrate.terminal.console import text_console
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


def test_a_plan_s_files_have_the_copies_paths_on_the_nodes_and_the_operator_s_paths_locally() -> (
    None
):
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


PLAN_TYPES = (
    RunRequest,
    PlanRequest,
    ClusterInventory,
    ResolvedInventory,
    PlanTarget,
    ResolvedPlacement,
    ResolvedPlan,
    LaunchPlan,
    Job,
)


def files_entered(action: Callable[[], object]) -> list[str]:
    """Return the files of payload/ that the plan enters during `action`, in order.

    The plan enters a file when one of its functions is called with an argument of `PLAN_TYPES`
    while no other function of the file is running. Consecutive entries of one file count as one.
    """
    root, entered = str(Path(payload.__file__).parent), list[str]()

    def trace(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(root):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(isinstance(frame.f_locals.get(name), PLAN_TYPES) for name in names):
            caller = frame.f_back
            while caller is not None and caller.f_code.co_filename != code.co_filename:
                caller = caller.f_back
            if caller is None:
                entered.append(code.co_filename[len(root) + 1 :])

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        action()
    finally:
        sys.setprofile(before)
    return [path for path, _ in groupby(entered)]


class StubAccess(LocalAccess):
    """This machine with a launcher, whose supervisor is never started."""

    def executable(self, launcher: Launcher) -> str:
        return f"/usr/bin/{launcher.program}"

    def start_supervisor(
        self, paths: RunPaths, *, detached: bool, grace_s: float
    ) -> subprocess.Popen[bytes]:
        return cast("subprocess.Popen[bytes]", None)


def test_the_path_of_a_plan_visits_no_file_twice(tmp_path: Path) -> None:
    """From the request to the launcher's argv, for `plan` and for `run` on this machine."""
    local = replace(make_inventory(num_nodes=1), access=Access(kind="local"), source="file")
    chosen = ResolvedInventory(inventory=local, why="test", domains={})
    site, paths, config = Local(chosen, StubAccess({})), RunPaths(tmp_path / "run"), configured()
    of_plan = files_entered(lambda: site.plan(paths, config, vocab_size=50257))
    with ExitStack() as held:
        request = RunRequest(
            paths=paths,
            config=config,
            vocab_size=50257,
            resumes=False,
            detach=True,
            grace_s=1.0,
            env={},
            talk=text_console(stderr=True),
            held=held,
        )
        of_run = files_entered(lambda: site.start(request))
    to_argv = of_run[: of_run.index("launch/launchers/mpirun.py") + 1]
    expected = [
        "orchestrate/runs/planning.py",
        "orchestrate/inventories/chosen.py",
        "orchestrate/runs/compute_settings.py",
        "launch/launchers/mpirun.py",
    ]
    assert of_plan == expected
    assert to_argv == ["orchestrate/sites/local.py", "orchestrate/runs/run_request.py", *expected]
    assert len(to_argv) == len(set(to_argv))
    assert not set(expected) & set(of_run[len(to_argv) :])  # afterwards the site only writes it
