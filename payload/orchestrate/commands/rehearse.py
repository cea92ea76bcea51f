"""`rehearse`: the smallest cluster through everything once, in a stack of its own, and its page."""

from __future__ import annotations

import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from rich.console import Console

import payload
from payload import __version__
from payload.config.run_config import load_run_config
from payload.core.errors import INTERRUPTED, BudgetError, ConfigError, ExitCode, TileforgeError
from payload.core.files import write_whole
from payload.core.printable_text import printable
from payload.core.python_processes import code_environment, module_words
from payload.core.regular_files import read_bytes
from payload.core.suggested_commands import command
from payload.core.validation.json_text import parse_json
from payload.launch.ranks import place_ranks
from payload.orchestrate.cloud.filestore import filestore_name
from payload.orchestrate.cloud.google import REQUEST_LOG, Endpoints, Google
from payload.orchestrate.cloud.listing import remove
from payload.orchestrate.cloud.pulumi import Pulumi
from payload.orchestrate.cloud.resources import Resource
from payload.orchestrate.cloud.stack_outputs import StackOutputs, cluster_folder, read_outputs
from payload.orchestrate.commands.sweep import project_of
from payload.orchestrate.runs.start_checks import check_data
from payload.orchestrate.terminal.console import confirm, text_console
from payload.pricing.cloud_prices import read_catalog
from payload.pricing.cluster_cost import cluster_cost
from payload.stack.cloud_need import Need, need_of
from payload.stack.cluster_files import cluster_path
from payload.stack.cluster_identity import new_cluster_identity, settle_cluster_identity
from payload.stack.stack_settings import DEFAULTS

REQUESTS = "requests.jsonl"
"""In a rehearsal's folder: a line for each request to Google."""
_LOG_LINES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command, and how it ended."""

    name: str
    argv: Sequence[str]
    status: int
    took_s: float
    log: Path | None = None

    @property
    def is_good(self) -> bool:
        """Tell whether it ended as it should."""
        return self.status == 0


def page(
    steps: Sequence[Step],
    *,
    folder: Path,
    settings: Mapping[str, str],
    hourly_usd: float,
    took_s: float,
    engine: str,
    project: str,
    trouble: str,
) -> str:
    """Return the page in Markdown; it names neither the project nor an address."""
    chosen = ", ".join(f"{key} = {value}" for key, value in sorted(settings.items()))
    lines = [
        "# A rehearsal in Google Cloud",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}: Tileforge {__version__}, Pulumi {engine}, pulumi-gcp "
        f"{_provider()}, Python {platform.python_version()}.",
        f"{took_s / 60:.1f} minutes, at most ${hourly_usd * took_s / 3600:.2f}.",
        f"Settings: {chosen}.",
        *([f"It broke off: {trouble}."] if trouble else []),
        "",
        "| Step | Exit code | Seconds |",
        "|---|--:|--:|",
        *(f"| {step.name} | {step.status} | {step.took_s:.1f} |" for step in steps),
        "",
        "| Resource | State | Seconds |",
        "|---|---|--:|",
        *_resource_rows(folder),
        "",
        "| Request | Count | Median s | Longest s | Failed |",
        "|---|--:|--:|--:|--:|",
        *_request_rows(folder / REQUESTS),
    ]
    failed = [step for step in steps if not step.is_good]
    if failed:
        lines += ["", "## What was refused", "", *_report(failed)]
    return f"{_anonymous(chr(10).join(lines), project=project).rstrip()}\n"


def _report(failed: Sequence[Step]) -> list[str]:
    """Return each failed step with its command and the end of its output, for a bug report."""
    lines = []
    for step in failed:
        tail = []
        if step.log is not None:
            tail = printable(read_bytes(step.log).decode("utf-8", "replace")).splitlines()
        lines += [f"`{' '.join(step.argv)}` ended with {step.status}:", "", "```text"]
        lines += [*tail[-_LOG_LINES:], "```", ""]
    return lines


def _anonymous(text: str, *, project: str) -> str:
    """Return the text without the project's id, addresses and home folders."""
    places = {Path.cwd(): "FOLDER", Path(sys.prefix): "PYTHON", Path.home(): "HOME"}
    places[Path(payload.__file__).parents[1]] = "CHECKOUT"
    for path, word in sorted(places.items(), key=lambda each: -len(each[0].parts)):
        text = text if path == Path("/") else text.replace(str(path), word)
    text = text.replace(project, "PROJECT")
    return re.sub(r"\b(?!10\.|127\.)\d{1,3}(?:\.\d{1,3}){3}\b", "ADDRESS", text)


def _resource_rows(folder: Path) -> list[str]:
    """Return a row of each resource that Pulumi changed."""
    paths = [*folder.glob("up-*.json"), *folder.glob("destroy-*.json")]
    rows = []
    for path in sorted(paths, key=lambda each: each.stat().st_mtime):
        for each in parse_json(read_bytes(path), where=str(path))["resources"]:
            what = f"{each['kind']} {each['name']}"
            rows.append(f"| {what} | {each['state']} | {each['seconds']:.1f} |")
    return rows


def _request_rows(path: Path) -> list[str]:
    """Return a row of each kind of request to Google."""
    asked: dict[str, list[tuple[float, bool]]] = {}
    if not path.exists():
        return []
    for line in read_bytes(path).splitlines():
        each = parse_json(line, where=str(path))
        asked.setdefault(each["what"], []).append((each["seconds"], each["failed"]))
    rows = []
    for what, times in sorted(asked.items()):
        seconds = [took for took, _ in times]
        failed = sum(bad for _, bad in times)
        figures = f"{len(times)} | {median(seconds):.3f} | {max(seconds):.3f} | {failed}"
        rows.append(f"| {what} | {figures} |")
    return rows


def _provider() -> str:
    try:
        return version("pulumi-gcp")
    except PackageNotFoundError:
        return "not installed"


_NAME = "rehearsal-{}"
"""Name of a rehearsal's stack, cluster and run, with the first digits of the cluster's identity."""
_NAME_DIGITS = 8
_SMALLEST = {
    "nodeCount": "2",
    "machineType": "c3-standard-4",
    "region": DEFAULTS.region,
}
_STEPS = 10
_BOOT_MINUTES = "20"
_LIFETIMES_MIN = (45, 120)
"""Shortest in which a rehearsal can end, and longest that it may take."""
_GRACE_S = 60.0


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """One way through; `steps` grows."""

    name: str
    """Name of its stack, its cluster and its run."""
    pulumi: Pulumi
    google: Google
    env: Mapping[str, str]
    folder: Path
    """The cluster's folder, which gets the logs and the page, too."""
    config: Path
    hourly_usd: float
    budget_usd: float
    engine: str
    """Pulumi's version."""
    talk: Console
    began_s: float = field(default_factory=time.monotonic)
    steps: list[Step] = field(default_factory=list)

    def through(self) -> None:
        """Take every step up to the healed cluster. Raises TileforgeError at the first bad step."""
        up = ("up", "--yes", "--results-may-be-lost", "--stack", self.name)
        self._step("doctor", "doctor", "--stack", self.name)
        self._step("up", *up)
        outputs = self._priced()
        job = ("--inventory", f"stack:{self.name}", *self._job(outputs))
        preflight = ("preflight", *job, "--wait", _BOOT_MINUTES)
        self._step("preflight", *preflight)
        self._step(f"run of {_STEPS} steps", "run", *job, "--run-id", self.name)
        self._lose(outputs)
        self._step("up heals it", *up)
        self._step("preflight again", *preflight)

    def end(self, *, collect: bool) -> bool:
        """Take everything down and look; nothing is raised, as this must go to its end.

        Return whether nothing is left. Where results cannot be collected, they are lost.
        """
        project = ("--project", self.google.project)
        data = ("--delete-filestore", filestore_name(self.name))
        down = ("down", "--yes", "--stack", self.name, *data, *project)
        gone = collect and self._tried("down", *down)
        gone = gone or self._tried("down, results lost", *down, "--without-collect")
        is_clean = self._tried("sweep", "sweep", "--cluster", self.name, *project)
        if gone and is_clean:
            with suppress(TileforgeError):
                self.pulumi.ask("stack", "rm", "--yes")
        return gone and is_clean

    def _tried(self, name: str, *words: str) -> bool:
        with suppress(TileforgeError):
            self._step(name, *words, limited=False)
        return self.steps[-1].is_good

    def _job(self, outputs: StackOutputs) -> list[str]:
        """Return the config, with a batch that this cluster's ranks share evenly."""
        config = load_run_config(self.config)
        nodes = outputs.inventory.nodes
        ranks = place_ranks(nodes, config.launch, device=config.device).world_size
        per_pass = config.batch.per_pass(ranks)
        batch = -(-config.batch.global_batch_size // per_pass) * per_pass
        values = {"batch.global_batch_size": batch, "train.steps": _STEPS}
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        return ["--config", str(self.config), *sets]

    def _priced(self) -> StackOutputs:
        outputs = read_outputs(self.pulumi)
        if outputs.hourly_usd is None or outputs.hourly_usd > 1.1 * self.hourly_usd:
            raise BudgetError(
                f"the cluster costs {outputs.hourly_usd} dollars an hour, and {self.hourly_usd:.4f}"
                " were reckoned with"
            )
        return outputs

    def _lose(self, outputs: StackOutputs) -> None:
        """Delete the last node through Google's API, as a preemption does."""
        victim, began_s = outputs.inventory.nodes[-1], time.monotonic()
        node = Resource(kind="instance", name=victim.name, location=victim.zone or "")
        failed = remove(self.google, [node])
        self._note(f"delete {victim.name}", ["DELETE", victim.name], int(bool(failed)), began_s)

    def _step(self, name: str, *words: str, limited: bool = True) -> None:
        """Run a command. Raises TileforgeError when it does not end as it should."""
        self.talk.print(f"+ {' '.join(words)}")
        began_s = time.monotonic()
        log = self.folder / f"{len(self.steps) + 1:02}-{words[0]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                module_words("payload.orchestrate", *words),
                env=code_environment(self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # What takes everything down is not ended by Ctrl-C.
                start_new_session=not limited,
            )
            status = self._within_budget(process) if limited else self._wait(process)
        self._note(name, words, status, began_s, log=log)

    def _within_budget(self, process: subprocess.Popen[bytes]) -> int:
        """Return its exit status; it is interrupted when the budget is spent."""
        try:
            return process.wait(timeout=self._left_s())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        except KeyboardInterrupt:
            # The terminal has sent it to the command, too.
            process.wait()
            raise
        try:
            process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return ExitCode.BUDGET

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Return its exit status, whatever the operator presses meanwhile."""
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                self.talk.print("interrupted: everything is being taken down; it costs until then")

    def _left_s(self) -> float:
        spent_s = time.monotonic() - self.began_s
        return max(1.0, self.budget_usd / self.hourly_usd * 3600 - spent_s)

    def _note(
        self,
        name: str,
        argv: Sequence[str],
        status: int,
        began_s: float,
        *,
        log: Path | None = None,
    ) -> None:
        took_s = time.monotonic() - began_s
        step = Step(name=name, argv=argv, status=status, took_s=took_s, log=log)
        self.steps.append(step)
        self.talk.print(f"  {name}: exit code {status} after {took_s:.1f} s")
        if not step.is_good:
            error = TileforgeError(f"step {name!r} ended with {status}. Its output: {log}")
            error.exit_code = _exit_code(status)
            raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseOptions:
    """Options of `rehearse`."""

    budget_usd: float
    project: str | None
    config: Path
    settings: list[str]
    yes: bool


def rehearse(options: RehearseOptions, env: Mapping[str, str]) -> int:
    """Ask, go through, take everything down, and print the page."""
    talk = text_console(stderr=True)
    data = load_run_config(options.config).data
    check_data(data.folder(), sequence_length=data.sequence_length)
    settings = _settings(options.settings)
    need = need_of({**settings, "zones": [settings["zone"]]})
    usd, minutes = _reckon(need, budget_usd=options.budget_usd)
    folder = Path.cwd()
    project = project_of(options.project, None, env, folder=folder)
    for name in _left_before(env, folder=folder):
        talk.print(f"{name} was not taken down, or is still going on. {_how_to_take_down(name)}")
    talk.print(
        f"a rehearsal in project {project}: {need.describe()}, ${usd:.4f} an hour, for at most "
        f"{minutes} minutes (${usd * minutes / 60:.2f}); the machines end themselves after that"
    )
    if not confirm("Build this, and take it down again?", assume_yes=options.yes):
        talk.print("nothing was built")
        return ExitCode.OK
    name = _settle_name(folder)
    settings["cluster"] = name
    pulumi = Pulumi(env, folder=folder, stack=name)
    _make_stack(
        pulumi,
        settings
        | {"project": project, "maxLifetime": f"{minutes}m", "maxHourlyUsd": f"{usd * 1.1:.2f}"},
    )
    own = cluster_folder(folder, name)
    logged = {**env, REQUEST_LOG: str(own / REQUESTS)}
    rehearsal = Rehearsal(
        name=name,
        pulumi=pulumi,
        google=Google(project, endpoints=Endpoints.from_env(logged)),
        env=logged,
        folder=own,
        config=options.config,
        hourly_usd=usd,
        budget_usd=options.budget_usd,
        engine=_engine(pulumi),
        talk=talk,
    )
    return _go(rehearsal, settings)


def _go(rehearsal: Rehearsal, settings: Mapping[str, str]) -> int:
    code, trouble = int(ExitCode.OK), ""
    try:
        rehearsal.through()
    except TileforgeError as error:
        code, trouble = error.exit_code, str(error)
    except KeyboardInterrupt:
        code, trouble = INTERRUPTED, "interrupted"
    if trouble:
        rehearsal.talk.print(f"error: {trouble}; taking everything down")
    if not rehearsal.end(collect=not trouble):
        code = ExitCode.TEARDOWN
        rehearsal.talk.print(f"not all is taken down. {_how_to_take_down(rehearsal.name)}")
    text = page(
        rehearsal.steps,
        folder=rehearsal.folder,
        settings=settings,
        hourly_usd=rehearsal.hourly_usd,
        took_s=time.monotonic() - rehearsal.began_s,
        engine=rehearsal.engine,
        project=rehearsal.google.project,
        trouble=trouble.rstrip("."),
    )
    write_whole(rehearsal.folder / "page.md", text)
    text_console(stderr=False).print(text, soft_wrap=True, end="")
    rehearsal.talk.print(f"the page: {rehearsal.folder / 'page.md'}")
    return code


def _settings(given: Sequence[str]) -> dict[str, str]:
    """Return the smallest stack's settings, changed by KEY=VALUE. Raises ConfigError."""
    settings = dict(_SMALLEST)
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key.isalnum() or key in ("cluster", "project"):
            raise ConfigError(f"--set {each}: must be KEY=VALUE of a cluster's settings.")
        settings[key] = value
    settings.setdefault("zone", f"{settings['region']}-a")
    return settings


def _reckon(need: Need, *, budget_usd: float) -> tuple[float, int]:
    """Return dollars an hour and for how many minutes. Raises BudgetError, ConfigError."""
    catalog = read_catalog(cluster_path(Path.cwd()), now_unix=time.time())
    usd = cluster_cost(need.billed(spot=need.spot == "true"), catalog=catalog).hourly_usd
    if usd is None:
        raise ConfigError(
            f"no price is known of {need.describe()}, so no budget can be kept. Take other "
            "settings: --set region=us-central1 --set machineType=c3-standard-4"
        )
    shortest, longest = _LIFETIMES_MIN
    minutes = min(longest, int(budget_usd / usd * 60))
    if minutes < shortest:
        raise BudgetError(
            f"--budget-usd {budget_usd:g}: {need.describe()} costs ${usd:.4f} an hour, and a "
            f"rehearsal needs {shortest} minutes. Allow ${usd * shortest / 60 + 0.01:.2f} or more."
        )
    return usd, minutes


def _settle_name(folder: Path) -> str:
    """Return the name of a new rehearsal, once it is known here: it may be killed any time."""
    identity = new_cluster_identity()
    name = _NAME.format(identity[:_NAME_DIGITS])
    settle_cluster_identity(folder, name, told=[identity])
    return name


def _left_before(env: Mapping[str, str], *, folder: Path) -> list[str]:
    """Return the rehearsals of this folder whose stack still exists. Raises PulumiError."""
    pattern = _NAME.format("[0-9a-f]" * _NAME_DIGITS)
    known = {path.parent.name for path in folder.glob(f".cluster/{pattern}/identity.json")}
    if not known:
        return []
    stacks = Pulumi(env, folder=folder).ask_json("stack", "ls")
    there = {
        str(each.get("name")).rpartition("/")[2]
        for each in (stacks if isinstance(stacks, list) else [])
        if isinstance(each, dict)
    }
    return sorted(known & there)


def _how_to_take_down(name: str) -> str:
    down = command("orchestrate", "down", "--stack", name)
    return f"Take it down: {down}; then: pulumi stack rm {name}"


def _make_stack(pulumi: Pulumi, settings: Mapping[str, str]) -> None:
    """Make the stack, and leave the operator's selected one selected. Raises PulumiError."""
    # Its name is the option's: the engine refuses one as an argument beside that.
    pulumi.ask("stack", "init", "--no-select")
    for key, value in settings.items():
        path = ("--path", "zones[0]") if key == "zone" else (key,)
        pulumi.ask("config", "set", *path, value)


def _engine(pulumi: Pulumi) -> str:
    try:
        return pulumi.ask("version").strip()
    except TileforgeError:
        return "unknown"


def _exit_code(status: int) -> ExitCode:
    with suppress(ValueError):
        return ExitCode(status)
    return ExitCode.TRAINING
