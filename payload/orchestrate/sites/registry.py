"""The registry of the sites that `--site` selects."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from payload.core.errors import ConfigError
from payload.core.package_members import member_names
from payload.orchestrate import sites
from payload.run_record.run_files import RunJob, RunPaths, last_record

if TYPE_CHECKING:
    from payload.orchestrate.runs.site import NamedSite, SiteRun

_NOT_SITES = (
    "allocation",
    "operator_checkpoint_copies",
    "ssh_run",
    "local",
    "registry",
    "ssh",
    "ssh_start",
)
"""This machine and clusters over SSH are selected by an inventory, not by `--site`."""


def site_names() -> list[str]:
    """Return the values of `--site`, in alphabetical order."""
    return member_names(sites, besides=_NOT_SITES)


def find_site(name: str) -> NamedSite:
    """Return the site with this name. Raises ConfigError, which lists the known sites."""
    if name not in site_names():
        raise ConfigError(f"site {name!r}: unknown site. Use {', '.join(site_names())}.")
    site: NamedSite = importlib.import_module(f"{sites.__name__}.{name}").SITE
    return site


def run_at_site(paths: RunPaths, env: Mapping[str, str]) -> SiteRun | None:
    """Return the run at the site that the job record in its folder names; None without a record."""
    job = last_record(RunJob, paths.job)
    return None if job is None else find_site(job.site).run_of(paths, job, env)
