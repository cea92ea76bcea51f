"""A site that is another folder of this machine: all that a new one needs to be."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import Signals

from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.machine_profiles.local_profile import LocalAccess, port_of
from payload.orchestrate.runs.planning import PlanTarget, resolve
from payload.orchestrate.runs.run_request import RunRequest
from payload.orchestrate.runs.site import CollectResult, NamedSite, RunPoll, SiteRun
from payload.run_record.run_files import RunJob, RunPaths, StopRequest, write_json
from payload.run_record.run_lock import is_supervised


class ToyRun(SiteRun):
    """A run in the folder `elsewhere`, beside the runs here."""

    def __init__(self, paths: RunPaths, env: Mapping[str, str]) -> None:
        self.paths, self.nodes, self.where, self.access = paths, 1, "elsewhere", LocalAccess(env)
        self.there = RunPaths(Path(self.where, paths.run_id).resolve())

    def look(self, *, say: Callable[[str], None] = print, interrupted: object = None) -> RunPoll:
        alive = is_supervised(self.there)
        ignore = shutil.ignore_patterns("*.partial")
        shutil.copytree(self.there.root, self.paths.root, ignore=ignore, dirs_exist_ok=True)
        return RunPoll(alive=alive)

    def signal(self, number: Signals, request: StopRequest) -> bool:
        return self.access.signal_supervisor(self.there, [number], request=request)

    def collect_results(self, *, at_once: bool = False) -> CollectResult:
        return CollectResult(alive=self.look().alive)


class Toy(NamedSite):
    """Copies what it is given to the folder `elsewhere`, and starts it there."""

    def start(self, request: RunRequest) -> ToyRun:
        run = ToyRun(request.paths, request.env)
        with request.folder() as paths, run.access.reserve_port() as held:
            write_json(paths.job, RunJob(site=self.name, job_id="1"))
            shutil.copytree(paths.root, run.there.root)
            here, port = load_cluster("local", env=request.env), port_of(held)
            on = PlanTarget(chosen=here, profile=run.access, paths=run.there, port=port)
            resolve(request.to_plan(), on).write(run.there)
            child = run.access.start_supervisor(run.there, detached=True, grace_s=request.grace_s)
            while not is_supervised(run.there) and child.poll() is None:
                pass
        return run

    def run_of(self, paths: RunPaths, job: RunJob, env: Mapping[str, str]) -> ToyRun:
        return ToyRun(paths, env)


SITE = Toy()
