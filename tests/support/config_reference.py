"""Tables of docs that come from the code: `make docs` writes them, a test compares."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import yaml

from infra.gcp.security_rules import NOT_MET, RULES
from payload.config.json_schema import SCHEMAS, schema_file, schema_text
from payload.config.setting_reference import SectionReference, sections
from payload.core.errors import ExitCode
from payload.machines.machine_types import machine_types
from payload.pricing.cloud_prices import listed_machines, machine_price
from tests.support import command_reference, comparison, gpu_memory

README = Path(__file__).resolve().parents[2] / "README.md"
CLUSTER_SECTIONS = frozenset(
    {"device", "distributed", "launch", "limits", "slurm", "storage", "monitor", "track"}
)
"""Sections of run.toml that do not change what is learned; the others are of training."""

MEANINGS = {
    ExitCode.OK: "the command succeeded",
    ExitCode.USAGE: "the command line is invalid",
    ExitCode.CONFIG: "a setting, the data or a checkpoint is invalid; nothing was started",
    ExitCode.QUOTA: "a quota of the cloud project is too small",
    ExitCode.NO_CAPACITY: "the zone has no free machine of the requested type",
    ExitCode.AUTH: "credentials are missing, or the cloud or Pulumi's backend rejects them",
    ExitCode.SSH_UNREACHABLE: "a node does not answer on SSH",
    ExitCode.SSH_AUTH: "a node rejects the key",
    ExitCode.HOST_KEY: "a node's host key is not the expected one",
    ExitCode.BOOTSTRAP: "an environment or a node could not be set up",
    ExitCode.PREFLIGHT: "a machine is unsuitable for the run (launcher, port, memory, network or "
    "shared folder), the store of results does not answer, or the cloud's API does not answer",
    ExitCode.TRAINING: "training failed, or the ranks' weights differ",
    ExitCode.RANK_LOST: "a rank was lost, or its node cannot be reached",
    ExitCode.HANG: "no rank made progress within the time limit, because a rank hangs, a node is "
    "frozen, or a shared folder does not answer",
    ExitCode.BUDGET: "the run reached its cost limit or time limit, saved a checkpoint and stopped",
    ExitCode.TEARDOWN: "resources remain in the cloud, or their removal could not be verified",
}


def exit_codes() -> str:
    """Return the table of exit codes."""
    rows = [f"| {code.value} | `{code.label}` | {MEANINGS[code]} |" for code in ExitCode]
    return "\n".join(["| Code | `exit_class` | Meaning |", "|---|---|---|", *rows])


def training_settings() -> str:
    """Return a table for each section of run.toml that decides what is learned."""
    return _settings(name for name in sections() if name not in CLUSTER_SECTIONS)


def launch_settings() -> str:
    """Return a table for each section of run.toml about machines, launch, limits and results."""
    return _settings(name for name in sections() if name in CLUSTER_SECTIONS)


def _settings(names: Iterable[str]) -> str:
    found = sections()
    return "\n\n".join(_section(found[name]) for name in names)


def _section(section: SectionReference) -> str:
    rows = [
        f"| `{each.key}` | `{each.default_text()}` | {each.values(code='`')} | "
        f"{_cell(each.meaning)} |"
        for each in section.settings
    ]
    head = [
        f"## `[{section.name}]`",
        "",
        "| Key | Default | Values | Meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def security_rules() -> str:
    """Return the table of the rules for the cluster's resources."""
    rows = [f"| `{rule.name}` | {rule.cis} | {rule.holds} |" for rule in RULES]
    return "\n".join(["| Rule | CIS | What holds |", "|---|---|---|", *rows])


def not_met() -> str:
    """Return the table of the CIS recommendations that are not met."""
    rows = [f"| {number} | {why} |" for number, why in NOT_MET.items()]
    return "\n".join(["| CIS | Why |", "|---|---|", *rows])


def prices() -> str:
    """Return the table of C3's prices."""
    head = "| Machine | Cores | GiB | On demand | Spot |\n|---|---|---|---|---|"
    rows = []
    for machine in machine_types():
        if machine.family == "c3":
            found = [
                machine_price(machine.name, region="us-central1", spot=spot)
                for spot in (False, True)
            ]
            shown = " | ".join(_price(price) for price in found)
            rows.append(
                f"| {machine.name} | {machine.physical_cores} | {machine.memory_gib:g} | {shown} |"
            )
    return "\n".join([head, *rows])


def gpu_prices() -> str:
    """Return the table of machines with GPUs, their sizes and prices."""
    head = (
        "| Machine | GPUs | Memory of a GPU, GiB | Cores | GiB | On demand | Spot | Regions |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    sold = list(listed_machines())
    rows = []
    for machine in machine_types():
        if machine.gpus is None:
            continue
        gpu, name = machine.gpus.gpu, machine.name
        regions = sorted(region for listed, region in sold if listed == name)
        region = "us-central1" if "us-central1" in regions else _cheapest(name, regions)
        on_demand, spot = (
            _price(machine_price(name, region=region, spot=spot)) for spot in (False, True)
        )
        elsewhere = "" if region == "us-central1" else f" ({region})"
        rows.append(
            f"| {name} | {machine.gpus.count} x {gpu.name} | {gpu.memory_mib / 1024:.1f} | "
            f"{machine.physical_cores} | {machine.memory_gib:g} | "
            f"{on_demand if machine.has_on_demand else 'not sold'} | {spot}{elsewhere} | "
            f"{len(regions)} |"
        )
    return "\n".join([head, *rows])


def _cheapest(name: str, regions: list[str]) -> str:
    """Return the region with the lowest price on demand."""
    known = {region: machine_price(name, region=region, spot=False) for region in regions}
    return min(known, key=lambda region: known[region] or float("inf"))


def cluster_settings() -> str:
    """Return the table of Pulumi.yaml's settings."""
    declared = yaml.safe_load((README.parent / "Pulumi.yaml").read_text(encoding="utf-8"))
    rows = [
        f"| `{key}` | `{json.dumps(entry['default'])}` | {' '.join(entry['description'].split())} |"
        for key, entry in declared["config"].items()
    ]
    return "\n".join(["| Key | Default | Meaning |", "|---|---|---|", *rows])


def _price(price: float | None) -> str:
    return "not known" if price is None else f"{price:.4f}"


TABLES: Mapping[str, Callable[[], str]] = {
    "exit codes": exit_codes,
    "training settings": training_settings,
    "launch settings": launch_settings,
    "prices": prices,
    "gpu prices": gpu_prices,
    "rules": security_rules,
    "not met": not_met,
    "cluster settings": cluster_settings,
    "commands": command_reference.commands,
    "options of runs": functools.partial(command_reference.options, "Runs"),
    "options of clusters": functools.partial(command_reference.options, "Google Cloud"),
    "options of data": functools.partial(command_reference.options, "Data"),
    "options of models": functools.partial(command_reference.options, "Models", "Shell"),
    "comparison": comparison.comparison,
    "GPU memory": gpu_memory.memory_table,
}
PAGES = tuple(
    README.parent / "docs" / name
    for name in (
        "comparison.md",
        "tutorials/gpu.md",
        *(
            f"reference/{page}.md"
            for page in (
                "cluster_settings",
                "security_rules",
                "exit_codes",
                "settings_training",
                "settings_machines",
                "prices",
                "commands",
                "commands_runs",
                "commands_clusters",
                "commands_data",
                "commands_models",
            )
        ),
    )
)


def with_tables(page: str) -> str:
    """Return `page` with every table between its marks replaced by the current one."""
    for name, render in TABLES.items():
        begin, end = f"<!-- {name}: written by make docs -->", f"<!-- {name} end -->"
        if begin in page:
            before, _, rest = page.partition(begin)
            _, _, after = rest.partition(end)
            page = f"{before}{begin}\n{render()}\n{end}{after}"
    return page


def main() -> None:
    """Rewrite the tables of the pages, and the schemas of the configs."""
    for name in SCHEMAS:
        schema_file(name).write_text(schema_text(name), encoding="utf-8")
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
