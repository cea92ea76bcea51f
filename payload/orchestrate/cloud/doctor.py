"""`doctor`: can this project hold the cluster? Credentials, APIs, quotas, offers, policies."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from rich.table import Table

from payload.errors import CloudAuthError, CloudError, ExitCode, TileforgeError, UsageError
from payload.orchestrate.cloud.endpoints import Endpoints
from payload.orchestrate.cloud.google import REQUEST_S, CloudMissingError, Google, request_of
from payload.orchestrate.cloud.need import Need, Scope, need_of
from payload.orchestrate.cloud.pulumi_cli import Pulumi, PulumiError
from payload.orchestrate.cloud.settings import settings
from payload.orchestrate.cloud.sweep import project_of
from payload.orchestrate.console import text_console

_SCHEMA_VERSION = 1
Outcome = Literal["ok", "error", "warning", "unknown"]
_TELLING = (ExitCode.AUTH, ExitCode.QUOTA, ExitCode.CONFIG)
_QUOTA_PAGE = "https://console.cloud.google.com/iam-admin/quotas?project={project}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    outcome: Outcome
    found: str
    """With the numbers."""
    fix: str = ""
    exit_code: ExitCode = ExitCode.OK
    """What an error ends the command with."""


def doctor(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Check, print a table and each fault with its fix, and return the exit code."""
    talk, out = text_console(stderr=True), text_console(stderr=False)
    known, why = _settings(arguments, env)
    need = _with_flags(need_of(known), arguments)
    configured = known.get("project")
    given = arguments.project or (configured if isinstance(configured, str) else None)
    project = project_of(given or None, None, env, folder=Path.cwd())
    talk.print(f"project {project}: {need.describe()} ({why})")
    google = Google(project, endpoints=Endpoints.from_env(env))
    checks = list(examine(google, need))
    code = exit_code(checks)
    if arguments.json:
        document = {"schema_version": _SCHEMA_VERSION, "project": project, "exit_code": code}
        out.print(json.dumps(document | {"checks": [asdict(c) for c in checks]}, indent=2))
    else:
        out.print(_table(checks))
        for number, check in enumerate(checks, start=1):
            if check.fix:
                out.print(f"{number}: {check.outcome}: {check.name}: {check.found}. {check.fix}")
    errors = sum(check.outcome == "error" for check in checks)
    if errors:
        talk.print(f"error: {errors} of {len(checks)} checks failed")
    else:
        talk.print("nothing that was checked keeps the cluster from being built")
    return code


def examine(google: Google, need: Need) -> Iterator[Check]:
    """Every check; what cannot be looked at is said and does not end it.

    Raises CloudAuthError without credentials.
    """
    yield Check(name="credentials", outcome="ok", found=google.check_credentials())
    try:
        project = _get(google, "Projects", "GetProjectRequest", what="project")
    except (CloudAuthError, CloudMissingError) as error:
        fix = "" if "Enable it" in str(error) else f"Is {google.project} the project's id?"
        yield _auth("Compute Engine", str(error), fix)
        return
    except CloudError as error:
        yield _unknown("Compute Engine", error)
        return
    yield Check(name="Compute Engine", outcome="ok", found="answers for this project")
    yield from _services(google, need)
    yield from _offers(google, need)
    yield from _quotas(google, need, project)
    yield from _policies(google, need)


def exit_code(checks: Sequence[Check]) -> ExitCode:
    """The most telling one of what failed."""
    codes = {check.exit_code for check in checks if check.outcome == "error"}
    return next((code for code in _TELLING if code in codes), ExitCode.OK)


def _services(google: Google, need: Need) -> Iterator[Check]:
    try:
        names = _enabled(google)
    except TileforgeError as error:
        yield _unknown("APIs", error)
        return
    for service in need.services():
        api = f"{service}.googleapis.com"
        if api in names:
            yield Check(name=api, outcome="ok", found="enabled")
        else:
            fix = f"Enable it: gcloud services enable {api} --project={google.project}"
            yield _auth(api, "not enabled", fix)


def _enabled(google: Google) -> set[str]:
    path = f"/v1/projects/{google.project}/services?filter=state:ENABLED&pageSize=200"
    names: set[str] = set()
    token = ""
    while True:
        more = f"&pageToken={quote(token)}" if token else ""
        answer = google.get_json("serviceusage", path + more, what="listing enabled APIs")
        names |= {entry["config"]["name"] for entry in answer.get("services", [])}
        token = answer.get("nextPageToken", "")
        if not token:
            return names


def _offers(google: Google, need: Need) -> Iterator[Check]:
    for place, zone in enumerate(need.zones):
        machine = replace(need, zones=(zone,))
        for kind, name, request in (
            ("MachineTypes", need.machine_type, "GetMachineTypeRequest"),
            ("DiskTypes", need.disk_type, "GetDiskTypeRequest"),
        ):
            word = "machine_type" if kind == "MachineTypes" else "disk_type"
            label = f"{name} in {zone}"
            try:
                found = _get(google, kind, request, what=label, zone=zone, **{word: name})
            except CloudMissingError:
                # The first zone is where the nodes go; the others are for later.
                yield Check(
                    name=label,
                    outcome="warning" if place else "error",
                    found="not offered there",
                    fix=f"Use another zone of {machine.region}, or another one of its kind.",
                    exit_code=ExitCode.CONFIG,
                )
            except TileforgeError as error:
                yield _unknown(label, error)
            else:
                size = f", {found.guest_cpus} vCPUs" if kind == "MachineTypes" else ""
                yield Check(name=label, outcome="ok", found=f"offered{size}")


def _quotas(google: Google, need: Need, project: Any) -> Iterator[Check]:
    try:
        region = _get(google, "Regions", "GetRegionRequest", what="region", region=need.region)
        vcpus = _vcpus(google, need)
    except TileforgeError as error:
        yield _unknown("quotas", error)
        return
    limits: dict[Scope, Mapping[str, Any]] = {
        "region": {quota.metric: quota for quota in region.quotas},
        "project": {quota.metric: quota for quota in project.quotas},
    }
    page = _QUOTA_PAGE.format(project=google.project)
    seen = set()
    for scope, metrics, amount in need.quotas(vcpus_per_node=vcpus):
        where = need.region if scope == "region" else "all regions"
        known = [m for m in metrics if m in limits[scope]]
        # A limit of 0 for preemptible CPUs means that spot machines use the family's quota.
        metric = next((m for m in known[:-1] if limits[scope][m].limit > 0), (known or [""])[-1])
        name = f"{metric or metrics[-1]} in {where}"
        if name in seen:
            continue  # spot machines that use the quota of the others
        seen.add(name)
        if not metric:
            yield Check(
                name=name,
                outcome="unknown",
                found=f"{amount:g} needed, the limit is not listed",
                fix=f"Look at {page}",
            )
            continue
        quota = limits[scope][metric]
        free = quota.limit - quota.usage
        fits = amount <= free
        yield Check(
            name=name,
            outcome="ok" if fits else "error",
            found=f"{amount:g} needed, {free:g} free (limit {quota.limit:g}, used {quota.usage:g})",
            fix="" if fits else f"Ask for {quota.usage + amount:g} at {page}, or need less.",
            exit_code=ExitCode.OK if fits else ExitCode.QUOTA,
        )


def _vcpus(google: Google, need: Need) -> int:
    """Of one node, from the first zone that offers it."""
    for zone in need.zones:
        try:
            found = _get(
                google,
                "MachineTypes",
                "GetMachineTypeRequest",
                what=need.machine_type,
                zone=zone,
                machine_type=need.machine_type,
            )
        except CloudMissingError:
            continue
        return int(found.guest_cpus)
    raise CloudError(f"no zone offers {need.machine_type}, so its vCPUs are not known")


def _policies(google: Google, need: Need) -> Iterator[Check]:
    wanted = [
        (
            "compute.disableGuestAttributesAccess",
            "nodes could not publish their host keys",
        ),
        ("iam.disableServiceAccountCreation", "the nodes' service account could not be made"),
    ]
    if not need.uses_os_login:
        wanted.append(("compute.requireOsLogin", "the operator's key would be ignored"))
    for constraint, effect in wanted:
        name = f"policy {constraint}"
        path = f"/v2/projects/{google.project}/policies/{constraint}:getEffectivePolicy"
        try:
            answer = google.get_json("orgpolicy", path, what=name)
        except TileforgeError as error:
            yield _unknown(name, error)
            continue
        rules = answer.get("spec", {}).get("rules", [])
        if any(rule.get("enforce") for rule in rules):
            fix = "Ask the organization's administrators for an exception for this project"
            more = ", or use accessMode oslogin." if constraint.endswith("OsLogin") else "."
            yield _auth(name, f"enforced: {effect}", fix + more)
        else:
            yield Check(name=name, outcome="ok", found="not enforced")


def _auth(name: str, found: str, fix: str) -> Check:
    return Check(name=name, outcome="error", found=found, fix=fix, exit_code=ExitCode.AUTH)


def _unknown(name: str, error: TileforgeError) -> Check:
    return Check(name=name, outcome="unknown", found="could not be looked at", fix=str(error))


def _get(google: Google, kind: str, request: str, *, what: str, **fields: str) -> Any:
    client = google.compute(kind)
    asked = request_of(request, project=google.project, **fields)
    return google.ask(what, partial(client.get, request=asked, retry=None, timeout=REQUEST_S))


def _settings(arguments: argparse.Namespace, env: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """The stack's config, or nothing where there is no stack to be asked."""
    try:
        known = settings(Pulumi(env, folder=Path.cwd(), stack=arguments.stack))
    except PulumiError as error:
        if arguments.stack is not None:
            raise
        return {}, f"defaults and flags, as {error.trouble}: no stack's config"
    stack = f"stack {arguments.stack}" if arguments.stack else "the selected stack"
    return known, f"config of {stack}, and flags"


def _with_flags(need: Need, arguments: argparse.Namespace) -> Need:
    given = {
        "machine_type": arguments.machine_type,
        "node_count": arguments.node_count,
        "region": arguments.region,
        "zones": tuple(arguments.zone) if arguments.zone else None,
        "spot": "true" if arguments.spot else None,
        "disk_type": arguments.disk_type,
    }
    if arguments.region and not arguments.zone and not need.zones[0].startswith(arguments.region):
        given["zones"] = (f"{arguments.region}-a",)
    values = {name: value for name, value in given.items() if value is not None}
    nodes = values.get("node_count", need.node_count)
    if nodes < 1:
        raise UsageError(f"--node-count {nodes}: at least one node is needed.")
    per_node = arguments.disk_gb or need.disk_gib / need.node_count
    return replace(need, **values, disk_gib=round(per_node * nodes))


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("#", "check", "outcome", "found"):
        table.add_column(name, no_wrap=name != "found")
    for number, check in enumerate(checks, start=1):
        table.add_row(str(number), check.name, check.outcome, check.found)
    return table
