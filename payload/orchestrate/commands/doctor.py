"""`doctor`: can this project hold the cluster, and at what price?"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from payload.core.errors import CloudAuthError, CloudError, ExitCode, TileforgeError, UsageError
from payload.core.files import write_whole
from payload.core.validation import checked
from payload.orchestrate.cloud.encryption_key import check_key
from payload.orchestrate.cloud.firewall_drift import check_firewall
from payload.orchestrate.cloud.google import CloudMissingError, Endpoints, Google, UnreadableError
from payload.orchestrate.cloud.machine_status import check_machines
from payload.orchestrate.cloud.prerequisites import (
    check_billing,
    check_bucket,
    check_image,
    check_proxy,
    check_quota_project,
)
from payload.orchestrate.cloud.project_checks import (
    Check,
    ask_compute,
    check_gpus,
    check_offers,
    check_own_gpus,
    check_policies,
    check_quotas,
    check_services,
    denied,
    unknown,
)
from payload.orchestrate.cloud.pulumi import Pulumi, PulumiError, cluster_name, settings
from payload.orchestrate.commands.sweep import project_of
from payload.orchestrate.inventories.chosen import nvidia_here
from payload.orchestrate.terminal.console import text_console
from payload.orchestrate.terminal.tables import table
from payload.pricing.cloud_prices import (
    CATALOG_FILE,
    Catalog,
    catalog_text,
    rate_key,
    read_catalog,
    source,
    spot_warning,
)
from payload.pricing.cluster_cost import cluster_cost
from payload.stack.cloud_need import Need, need_of
from payload.stack.cluster_files import cluster_path

# Compute Engine's number in the catalog: cloud.google.com/billing/docs/reference/rest/v1/services.
_SKUS = "/v1/services/6F81-5844-456A/skus?currencyCode=USD&pageSize=5000"
_FRESH_S = 86_400.0
_MACHINE = re.compile(
    r"(?P<spot>Spot Preemptible )?(?P<family>C3|C4|N4|H3) Instance (?P<part>Core|Ram) running in "
)
_DISK = re.compile(r"(Balanced PD|SSD backed PD|Storage PD|Hyperdisk Balanced) Capacity(?: in .*)?")
_DISK_TYPES = {
    "Balanced PD": "pd-balanced",
    "SSD backed PD": "pd-ssd",
    "Storage PD": "pd-standard",
    "Hyperdisk Balanced": "hyperdisk-balanced",
}
_UNITS = {"h": "hour", "GiBy.h": "hour", "GiBy.mo": "month"}
_INTEGER = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Price:
    currency: str = checked("USD", key="currencyCode")
    units: str = checked("0", pattern=_INTEGER, wanted="an integer as text")
    nanos: int = checked(0, low=0, high=10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rate:
    unit_price: _Price = checked(key="unitPrice")  # noqa: RUF009  # declares a field


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expression:
    unit: str = checked("", key="usageUnit")
    rates: tuple[_Rate, ...] = checked((), key="tieredRates")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pricing:
    expression: _Expression = checked(key="pricingExpression")  # noqa: RUF009  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Category:
    usage: str = checked("", key="usageType")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sku:
    """One of https://cloud.google.com/billing/docs/reference/rest/v1/services.skus#Sku."""

    description: str
    category: _Category
    regions: tuple[str, ...] = checked((), key="serviceRegions")
    pricing: tuple[_Pricing, ...] = checked((), key="pricingInfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    skus: tuple[_Sku, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


def fresh_catalog(google: Google, *, folder: Path) -> tuple[Catalog | None, str]:
    """Return the catalog, read again when the one in `folder` is older than a day, and why not.

    One that cannot be read again is used for a week.
    """
    now_unix = time.time()
    kept = read_catalog(folder, now_unix=now_unix)
    if kept is not None and now_unix - kept.read_unix < _FRESH_S:
        return kept, ""
    try:
        pages = google.get_pages("cloudbilling", _SKUS, what="billing catalog", shape=_Page)
        rates = {key: usd for page in pages for sku in page.skus for key, usd in _rates(sku)}
    except TileforgeError as error:
        return kept, str(error)
    if not rates:
        return kept, "billing catalog: it lists none of the machines and disks that are known here."
    catalog = Catalog(read_unix=now_unix, rates=rates)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(folder / CATALOG_FILE, catalog_text(catalog))
    return catalog, ""


def check_price(need: Need, catalog: Catalog | None, why_not: str = "") -> Check:
    """Return what the cluster costs an hour, or the parts whose price is not known.

    `why_not` is why there is no catalog, or no newer one.
    """
    spot = need.spot != "false"
    kind = "spot" if spot else "on demand"
    cost = cluster_cost(need.billed(spot=spot), catalog=catalog)
    origin = source(catalog, time.time())
    if why_not:
        origin = f"{origin}; {why_not}"
    if cost.hourly_usd is None:
        return Check(
            name="price",
            outcome="unknown",
            found=f"no price is known of {', '.join(cost.unknown)} ({origin})",
            fix="Look: https://cloud.google.com/compute/all-pricing",
        )
    bound = "at most " if cost.bounds else ""
    more = (("an external address", cost.address), ("Filestore", cost.filestore))
    words = "".join(f", {name} ${usd:.4f}" for name, usd in more if usd)
    found = (
        f"{bound}${cost.hourly_usd:.4f} an hour: {need.node_count} x ${cost.machine} {kind}, disks "
        f"{bound}${cost.disks_usd:.4f}, NAT ${cost.nat:.4f}{words} ({origin})"
    )
    warning = spot_warning(time.time()) if spot and catalog is None else None
    if warning is not None:
        return Check(name="price", outcome="warning", found=found, fix=f"{warning}.")
    return Check(name="price", outcome="ok", found=found)


def _rates(sku: _Sku) -> Iterator[tuple[str, float]]:
    """Yield key and dollars of each region of a SKU that a cluster is made of."""
    machine, disk = _MACHINE.match(sku.description), _DISK.fullmatch(sku.description)
    if machine is not None:
        spot = machine["spot"] is not None
        usage, per = ("Preemptible" if spot else "OnDemand"), "hour"
        what = f"{machine['family'].lower()} {machine['part'].lower()}"
    elif disk is not None:
        spot, usage, per, what = False, "OnDemand", "month", _DISK_TYPES[disk[1]]
    else:
        return
    if sku.category.usage != usage or not sku.pricing:
        return
    expression = sku.pricing[0].expression
    if _UNITS.get(expression.unit) != per or not expression.rates:
        return
    # The last tier: the first one of some is what is free in a month.
    price = expression.rates[-1].unit_price
    if price.currency == "USD":
        for region in sku.regions:
            usd = int(price.units) + price.nanos / 1e9
            yield rate_key(what, region=region, spot=spot), usd


_SCHEMA_VERSION = 1
_TELLING = (ExitCode.AUTH, ExitCode.QUOTA, ExitCode.CONFIG, ExitCode.PREFLIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of `doctor`, in addition to the stack's settings."""

    stack: str | None
    project: str | None
    machine_type: str | None
    node_count: int | None
    region: str | None
    zone: list[str] | None
    spot: bool
    disk_type: str | None
    disk_gb: int | None
    json: bool


def doctor(options: DoctorOptions, env: Mapping[str, str]) -> int:
    """Check, print a table and each fault with its fix, and return the exit code."""
    talk, out = text_console(stderr=True), text_console(stderr=False)
    pulumi = Pulumi(env, folder=Path.cwd(), stack=options.stack)
    known, why = _settings(pulumi)
    need = _with_flags(need_of(known), options)
    configured = known.get("project")
    given = options.project or (configured if isinstance(configured, str) else None)
    project = project_of(given or None, None, env, folder=Path.cwd())
    talk.print(f"project {project}: {need.describe()} ({why})")
    google = Google(project, endpoints=Endpoints.from_env(env))
    # Of another project than the stack's, its firewall says nothing.
    own = pulumi if project == configured else None
    checks = [*check_proxy(env), *examine(google, need, own)]
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
        yield Check(name="Compute Engine", outcome="ok", found="answers for this project")
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
    """Return the most telling exit code of what failed."""
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


def _with_flags(need: Need, options: DoctorOptions) -> Need:
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
        raise UsageError(f"--node-count {nodes}: at least one node is needed.")
    per_node = options.disk_gb or need.disk_gib / need.node_count
    return replace(need, **values, disk_gib=round(per_node * nodes))


def _table(checks: Sequence[Check]) -> Table:
    made = table("#", "check", "outcome", "found", wrapped=("found",))
    for number, check in enumerate(checks, start=1):
        made.add_row(str(number), check.name, check.outcome, check.found)
    return made
