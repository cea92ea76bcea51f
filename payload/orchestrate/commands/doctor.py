"""`doctor`: checks a Google Cloud project before `up`: access, quotas, machine types and price."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from payload.core.errors import CloudAuthError, CloudError, ExitCode, UsageError
from payload.orchestrate.clouds.gcp.api_and_machine_type_checks import (
    check_gpus,
    check_offers,
    check_own_gpus,
    check_services,
)
from payload.orchestrate.clouds.gcp.billing_catalog import fresh_catalog
from payload.orchestrate.clouds.gcp.check_result import Check, denied, unknown
from payload.orchestrate.clouds.gcp.client import CloudMissingError, Google, UnreadableError
from payload.orchestrate.clouds.gcp.compute_resource import get_compute_resource
from payload.orchestrate.clouds.gcp.encryption_key import check_key
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.orchestrate.clouds.gcp.organization_policies import check_policies
from payload.orchestrate.clouds.gcp.prerequisites import (
    check_billing,
    check_bucket,
    check_image,
    check_proxy,
    check_quota_project,
)
from payload.orchestrate.clouds.gcp.project_choice import project_of
from payload.orchestrate.clouds.gcp.quotas import check_quotas
from payload.orchestrate.clouds.pulumi.cli_errors import PulumiError
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.firewall_drift import check_firewall
from payload.orchestrate.clouds.pulumi.machine_status import check_machines
from payload.orchestrate.clouds.pulumi.stack_config import cluster_name, settings
from payload.orchestrate.commands.cloud_options import DoctorOptions
from payload.orchestrate.inventories.chosen import nvidia_here
from payload.orchestrate.terminal.console import text_console
from payload.orchestrate.terminal.narrow import print_message
from payload.orchestrate.terminal.tables import table
from payload.pricing.cloud_prices import Catalog, read_catalog, source, spot_warning
from payload.pricing.cluster_cost import cluster_cost
from payload.stack.cloud_requirements import CloudRequirements, requirements_of
from payload.stack.cluster_files import cluster_path


def check_price(need: CloudRequirements, catalog: Catalog | None, why_not: str = "") -> Check:
    """Return the cluster's price per hour, or which parts have no known price.

    `why_not` is the reason why the price catalog is missing or old.
    """
    spot = need.spot != "false"
    kind = "spot" if spot else "on demand"
    cost = cluster_cost(need.billed(spot=spot), catalog=catalog)
    origin = source(catalog, time.time())
    note = f"Today's prices are not known: {why_not}" if why_not else ""
    if cost.hourly_usd is None:
        return Check(
            name="price",
            outcome="unknown",
            found=f"no known price for {', '.join(cost.unknown)} ({origin})",
            fix=f"See https://cloud.google.com/compute/all-pricing. {note}".rstrip(". "),
        )
    bound = "at most " if cost.bounds else ""
    more = (("an external address", cost.address), ("Filestore", cost.filestore))
    extras = "".join(f", {name} ${usd:.4f}" for name, usd in more if usd)
    found = (
        f"{bound}${cost.hourly_usd:.4f} an hour: {need.node_count} x ${cost.machine} {kind}, disks "
        f"{bound}${cost.disks_usd:.4f}, NAT ${cost.nat:.4f}{extras} ({origin})"
    )
    warning = spot_warning(time.time()) if spot and catalog is None else None
    if warning is not None:
        fix = f"{warning}. {note}".rstrip()
        return Check(name="price", outcome="warning", found=found, fix=fix)
    return Check(name="price", outcome="ok", found=found, fix=note)


_SCHEMA_VERSION = 1
_BY_PRIORITY = (ExitCode.AUTH, ExitCode.QUOTA, ExitCode.CONFIG, ExitCode.PREFLIGHT)


def doctor(options: DoctorOptions, env: Mapping[str, str]) -> int:
    """Run all checks, print a table and the fixes, and return the exit code."""
    talk, out = text_console(stderr=True), text_console(stderr=False)
    pulumi = Pulumi(env, folder=Path.cwd(), stack=options.stack)
    known, why = _settings(pulumi)
    need = _with_flags(requirements_of(known), options)
    configured = known.get("project")
    given = options.project or (configured if isinstance(configured, str) else None)
    try:
        project = project_of(given or None, None, env, folder=Path.cwd())
        print_message(talk, f"project {project}: {need.describe()} ({why})")
        google = Google(project, endpoints=Endpoints.from_env(env))
        # Check the stack's firewall only if the command checks the stack's project.
        own = pulumi if project == configured else None
        checks = [*check_proxy(env), *examine(google, need, own)]
    except (CloudAuthError, UsageError) as error:
        # The price needs neither a project nor a login.
        price = check_price(need, read_catalog(cluster_path(Path.cwd()), now_unix=time.time()))
        print_message(talk, f"price of {need.describe()}: {price.found}")
        if isinstance(error, UsageError) and not known:
            raise UsageError(f"{error} Settings: {why}") from None
        raise
    checks += check_gpus(need)
    checks += check_own_gpus(nvidia_here(env))
    checks.append(check_price(need, *fresh_catalog(google, folder=cluster_path(Path.cwd()))))
    code = exit_code(checks)
    if options.json:
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
        talk.print(f"no check failed{more}")
    return code


def examine(google: Google, need: CloudRequirements, pulumi: Pulumi | None) -> Iterator[Check]:
    """Yield the result of every check. The result of a check that cannot run is `unknown`.

    Raises CloudAuthError without credentials.
    """
    yield Check(name="credentials", outcome="ok", found=google.check_credentials())
    try:
        project = get_compute_resource(google, "Projects", "GetProjectRequest", what="project")
    except (CloudAuthError, CloudMissingError) as error:
        yield denied(
            "Compute Engine", error, f"{error.fix} Is {google.project} the project's id?".lstrip()
        )
        return
    except UnreadableError as error:
        project = None
        yield unknown("Compute Engine", error)
    except CloudError as error:
        yield unknown("Compute Engine", error)
        return
    else:
        yield Check(name="Compute Engine", outcome="ok", found="enabled for this project")
    yield from check_quota_project(google)
    yield check_billing(google)
    yield from check_services(google, need)
    yield from check_offers(google, need)
    yield from check_quotas(google, need, project)
    yield from check_image(google, need)
    yield from check_bucket(google, need)
    yield from check_policies(google, need)
    yield from check_key(google, need)
    if pulumi is not None:
        yield from check_firewall(google, pulumi)
        yield from check_machines(google, pulumi)


def exit_code(checks: Sequence[Check]) -> ExitCode:
    """Return the exit code of the most important failed check."""
    codes = {check.exit_code for check in checks if check.outcome == "error"}
    return next((code for code in _BY_PRIORITY if code in codes), ExitCode.OK)


def _settings(pulumi: Pulumi) -> tuple[dict[str, Any], str]:
    """Return the stack's config and a text about the config's source.

    Without a stack, the config is empty.
    """
    try:
        known = settings(pulumi)
    except PulumiError as error:
        if pulumi.stack is not None:
            raise
        return {}, f"defaults and options; no stack config: {str(error).rstrip('.')}"
    with suppress(PulumiError):  # only messages about policies use this value
        known["cluster"] = cluster_name(pulumi, known)
    stack = f"stack {pulumi.stack}" if pulumi.stack else "the selected stack"
    return known, f"config of {stack}, and options"


def _with_flags(need: CloudRequirements, options: DoctorOptions) -> CloudRequirements:
    given: dict[str, Any] = {
        "machine_type": options.machine_type,
        "node_count": options.node_count,
        "region": options.region,
        "zones": tuple(options.zone) if options.zone else None,
        "spot": "true" if options.spot else None,
        "disk_type": options.disk_type,
    }
    if options.region and not options.zone and not need.zones[0].startswith(options.region):
        given["zones"] = (f"{options.region}-a",)
    values = {name: value for name, value in given.items() if value is not None}
    nodes = values.get("node_count", need.node_count)
    if nodes < 1:
        raise UsageError(f"--node-count {nodes}: must be 1 or more.")
    per_node = options.disk_gb or need.disk_gib / need.node_count
    return replace(need, **values, disk_gib=round(per_node * nodes))


def _table(checks: Sequence[Check]) -> Table:
    made = table("#", "check", "outcome", "found", wrapped=("found",))
    for number, check in enumerate(checks, start=1):
        made.add_row(str(number), check.name, check.outcome, check.found)
    return made
