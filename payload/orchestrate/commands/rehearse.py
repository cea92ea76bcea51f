"""`rehearse`: builds the smallest real cluster, tests its life cycle, and removes it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from payload.config.run_config import load_run_config
from payload.core.errors import INTERRUPTED, BudgetError, ConfigError, ExitCode, TileforgeError
from payload.core.files import write_whole
from payload.core.suggested_commands import command
from payload.orchestrate.clouds.cluster_records import cluster_folder
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.endpoints import REQUEST_LOG, Endpoints
from payload.orchestrate.clouds.gcp.project_choice import project_of
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.commands.cloud_options import RehearseOptions
from payload.orchestrate.commands.rehearsal_page import REQUESTS, page
from payload.orchestrate.commands.rehearsal_steps import Rehearsal
from payload.orchestrate.runs.run_input_checks import check_data
from payload.orchestrate.terminal.console import confirm, text_console
from payload.orchestrate.terminal.narrow import print_message
from payload.pricing.cloud_prices import read_catalog
from payload.pricing.cluster_cost import cluster_cost
from payload.stack.cloud_requirements import CloudRequirements, requirements_of
from payload.stack.cluster_files import cluster_path
from payload.stack.cluster_identity import new_cluster_identity, resolve_cluster_identity
from payload.stack.stack_settings import DEFAULTS

_NAME = "rehearsal-{}"
"""Name of the stack, the cluster and the run, with the first digits of the cluster's identity."""
_NAME_DIGITS = 8
_SMALLEST = {
    "nodeCount": "2",
    "machineType": "c3-standard-4",
    "region": DEFAULTS.region,
}
_LIFETIMES_MIN = (45, 120)
"""Shortest and longest lifetime of a rehearsal's cluster, in minutes."""


def rehearse(options: RehearseOptions, env: Mapping[str, str]) -> int:
    """Run the rehearsal after confirmation, destroy the cluster, and print the page."""
    talk = text_console(stderr=True)
    data = load_run_config(options.config).data
    check_data(data.folder(), sequence_length=data.sequence_length)
    settings = _settings(options.settings)
    need = requirements_of({**settings, "zones": [settings["zone"]]})
    usd, minutes = _price_and_lifetime(need, budget_usd=options.budget_usd)
    folder = Path.cwd()
    project = project_of(options.project, None, env, folder=folder)
    # Checked before the question: without them, the operator would confirm the price in vain.
    Pulumi(env, folder=folder).ask("whoami")
    Google(project, endpoints=Endpoints.from_env(env)).check_credentials()
    for name in _leftover_rehearsals(env, folder=folder):
        talk.print(
            f"{name} is still active, or was interrupted before its cluster was destroyed. "
            f"{_how_to_take_down(name)}"
        )
    most = f"${usd * minutes / 60:.2f}"
    print_message(
        talk,
        f"a rehearsal in project {project}: {need.describe()}, ${usd:.4f} an hour, for at most "
        f"{minutes} minutes ({most}); Google deletes the machines after this time",
    )
    question = f"Build this cluster for at most {most}, and destroy it afterwards?"
    if not confirm(question, assume_yes=options.yes):
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
        engine=_pulumi_version(pulumi),
        talk=talk,
    )
    return _run_rehearsal(rehearsal, settings)


def _run_rehearsal(rehearsal: Rehearsal, settings: Mapping[str, str]) -> int:
    code, trouble = int(ExitCode.OK), ""
    try:
        rehearsal.run_steps()
    except TileforgeError as error:
        code, trouble = error.exit_code, str(error)
    except KeyboardInterrupt:
        code, trouble = INTERRUPTED, "interrupted"
    if trouble:
        rehearsal.talk.print(f"error: {trouble}; destroying the cluster")
    if not rehearsal.take_down(collect=not trouble):
        code = ExitCode.TEARDOWN
        rehearsal.talk.print(f"some resources remain. {_how_to_take_down(rehearsal.name)}")
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
    rehearsal.talk.print(f"page: {rehearsal.folder / 'page.md'}")
    return code


def _settings(given: Sequence[str]) -> dict[str, str]:
    """Return the smallest stack's settings, overridden by KEY=VALUE. Raises ConfigError."""
    settings = dict(_SMALLEST)
    for each in given:
        key, equals, value = each.partition("=")
        if key == "cluster":
            raise ConfigError(
                f"--set {each}: rehearse chooses the name of the cluster. Remove this option."
            )
        if key == "project":
            raise ConfigError(f"--set {each}: choose the project with --project.")
        if not equals or not key.isalnum():
            raise ConfigError(f"--set {each}: must be KEY=VALUE with a setting of the cluster.")
        settings[key] = value
    settings.setdefault("zone", f"{settings['region']}-a")
    return settings


def _price_and_lifetime(need: CloudRequirements, *, budget_usd: float) -> tuple[float, int]:
    """Return dollars per hour and the lifetime in minutes. Raises BudgetError, ConfigError."""
    catalog = read_catalog(cluster_path(Path.cwd()), now_unix=time.time())
    usd = cluster_cost(need.billed(spot=need.spot == "true"), catalog=catalog).hourly_usd
    if usd is None:
        raise ConfigError(
            f"no known price for {need.describe()}, so the budget cannot be checked. Choose other "
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
    """Return the name of a new rehearsal. It is recorded first, in case the process is killed."""
    identity = new_cluster_identity()
    name = _NAME.format(identity[:_NAME_DIGITS])
    resolve_cluster_identity(folder, name, told=[identity])
    return name


def _leftover_rehearsals(env: Mapping[str, str], *, folder: Path) -> list[str]:
    """Return the rehearsals of this folder that still have a stack. Raises PulumiError."""
    pattern = _NAME.format("[0-9a-f]" * _NAME_DIGITS)
    known = {path.parent.name for path in folder.glob(f".cluster/{pattern}/identity.json")}
    if not known:
        return []
    stacks = Pulumi(env, folder=folder).ask_json("stack", "ls")
    existing = {
        str(each.get("name")).rpartition("/")[2]
        for each in (stacks if isinstance(stacks, list) else [])
        if isinstance(each, dict)
    }
    return sorted(known & existing)


def _how_to_take_down(name: str) -> str:
    down = command("orchestrate", "down", "--stack", name)
    return f"Destroy it: {down}; then: pulumi stack rm {name}"


def _make_stack(pulumi: Pulumi, settings: Mapping[str, str]) -> None:
    """Create the stack without selecting it. Raises PulumiError."""
    # The option --stack gives the name, and Pulumi refuses a second name as an argument.
    pulumi.ask("stack", "init", "--no-select")
    for key, value in settings.items():
        path = ("--path", "zones[0]") if key == "zone" else (key,)
        pulumi.ask("config", "set", *path, value)


def _pulumi_version(pulumi: Pulumi) -> str:
    try:
        return pulumi.ask("version").strip()
    except TileforgeError:
        return "unknown"
