"""`doctor`: can this project hold the cluster? Credentials, APIs, quotas, offers, policies."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from payload.errors import CloudAuthError, CloudError, ExitCode, UsageError
from payload.orchestrate.cloud.endpoints import Endpoints
from payload.orchestrate.cloud.firewall import check_firewall
from payload.orchestrate.cloud.google import CloudMissingError, Google, UnreadableError
from payload.orchestrate.cloud.need import Need, need_of
from payload.orchestrate.cloud.price_check import check_price, fresh_catalog
from payload.orchestrate.cloud.project_checks import (
    Check,
    ask_compute,
    auth,
    check_key,
    check_offers,
    check_policies,
    check_services,
    unknown,
)
from payload.orchestrate.cloud.pulumi_cli import Pulumi, PulumiError
from payload.orchestrate.cloud.quota_checks import check_quotas
from payload.orchestrate.cloud.settings import cluster_name, settings
from payload.orchestrate.cloud.sweep import project_of
from payload.orchestrate.console import text_console

_SCHEMA_VERSION = 1
_TELLING = (ExitCode.AUTH, ExitCode.QUOTA, ExitCode.CONFIG, ExitCode.PREFLIGHT)


def doctor(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Check, print a table and each fault with its fix, and return the exit code."""
    talk, out = text_console(stderr=True), text_console(stderr=False)
    pulumi = Pulumi(env, folder=Path.cwd(), stack=arguments.stack)
    known, why = _settings(pulumi)
    need = _with_flags(need_of(known), arguments)
    configured = known.get("project")
    given = arguments.project or (configured if isinstance(configured, str) else None)
    project = project_of(given or None, None, env, folder=Path.cwd())
    talk.print(f"project {project}: {need.describe()} ({why})")
    google = Google(project, endpoints=Endpoints.from_env(env))
    # Of another project than the stack's, its firewall says nothing.
    own = pulumi if project == configured else None
    checks = list(examine(google, need, own))
    checks.append(check_price(need, *fresh_catalog(google, folder=Path.cwd() / ".cluster")))
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
        blind = sum(check.outcome == "unknown" for check in checks)
        more = f"; {blind} of {len(checks)} could not be checked" if blind else ""
        talk.print(f"nothing that was checked keeps the cluster from being built{more}")
    return code


def examine(google: Google, need: Need, pulumi: Pulumi | None) -> Iterator[Check]:
    """Yield every check; a check that cannot be made is reported and does not end it.

    Raises CloudAuthError without credentials.
    """
    yield Check(name="credentials", outcome="ok", found=google.check_credentials())
    try:
        project = ask_compute(google, "Projects", "GetProjectRequest", what="project")
    except (CloudAuthError, CloudMissingError) as error:
        fix = "" if "Enable it" in str(error) else f"Is {google.project} the project's id?"
        yield auth("Compute Engine", str(error), fix)
        return
    except UnreadableError as error:
        project = None
        yield unknown("Compute Engine", error)
    except CloudError as error:
        yield unknown("Compute Engine", error)
        return
    else:
        yield Check(name="Compute Engine", outcome="ok", found="answers for this project")
    yield from check_services(google, need)
    yield from check_offers(google, need)
    yield from check_quotas(google, need, project)
    yield from check_policies(google, need)
    yield from check_key(google, need)
    if pulumi is not None:
        yield from check_firewall(google, pulumi)


def exit_code(checks: Sequence[Check]) -> ExitCode:
    """The most telling one of what failed."""
    codes = {check.exit_code for check in checks if check.outcome == "error"}
    return next((code for code in _TELLING if code in codes), ExitCode.OK)


def _settings(pulumi: Pulumi) -> tuple[dict[str, Any], str]:
    """Return the stack's config, or nothing where there is no stack to be asked."""
    try:
        known = settings(pulumi)
    except PulumiError as error:
        if pulumi.stack is not None:
            raise
        return {}, f"defaults and flags, as {error.trouble}: no stack's config"
    with suppress(PulumiError):  # only a policy's message needs it
        known["cluster"] = cluster_name(pulumi, known)
    stack = f"stack {pulumi.stack}" if pulumi.stack else "the selected stack"
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
