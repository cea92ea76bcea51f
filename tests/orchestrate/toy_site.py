"""A site that is another folder of this machine: all that a new one needs to be."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import Signals

from payload.orchestrate.access.local import LocalAccess
from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.runs.planning import plan_order
from payload.orchestrate.runs.run_index import Order
from payload.orchestrate.runs.site import Home, NamedSite, Seen, SiteRun
from payload.run_record.run_files import RunJob, RunPaths, StopRequest, write_json
from payload.run_record.run_lock import is_supervised


class ToyRun(SiteRun):
    """A run in the folder `elsewhere`, beside the runs here."""

    def __init__(self, paths: RunPaths, env: Mapping[str, str]) -> None:
        self.paths, self.nodes, self.where = paths, 1, "elsewhere"
        self.there = RunPaths(Path(self.where, paths.run_id).resolve())
        self.access = LocalAccess(env)

    def look(self, *, say: Callable[[str], None] = print, interrupted: object = None) -> Seen:
        alive = is_supervised(self.there)
        ignore = shutil.ignore_patterns("*.partial")
        shutil.copytree(self.there.root, self.paths.root, ignore=ignore, dirs_exist_ok=True)
        return Seen(alive=alive)

    def signal(self, number: Signals, request: StopRequest) -> bool:
        return self.access.signal_supervisor(self.there, [number], request=request)

    def bring_home(self, *, at_once: bool = False) -> Home:
        return Home(alive=self.look().alive)


class Toy(NamedSite):
    """Copies what it is given to the folder `elsewhere`, and starts it there."""

    def start(self, order: Order) -> ToyRun:
        run = ToyRun(order.paths, order.env)
        with order.folder() as paths, run.access.reserve_port() as socket:
            write_json(paths.job, RunJob(site=self.name, job_id="1"))
            shutil.copytree(paths.root, run.there.root)
            chosen, port = load_cluster("local", env=order.env), socket.getsockname()[1]
            plan_order(run.there, order, chosen=chosen, access=run.access, port=port)
        supervisor = run.access.start_supervisor(run.there, detached=True, grace_s=order.grace_s)
        while not is_supervised(run.there) and supervisor.poll() is None:
            pass
        return run

    def run_of(self, paths: RunPaths, job: RunJob, env: Mapping[str, str]) -> ToyRun:
        return ToyRun(paths, env)


SITE = Toy()
