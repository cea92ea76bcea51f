"""Chooses the project that a command uses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from payload.core.errors import UsageError
from payload.orchestrate.clouds.cluster_records import load_cluster_record, recorded_clusters
from payload.orchestrate.terminal.console import text_console


def project_of(
    given: str | None, cluster: str | None, env: Mapping[str, str], *, folder: Path
) -> str:
    """Return the project to use. Raises UsageError if it cannot be determined.

    The environment overrides the folder's records, which another operator can have written.
    """
    if given:
        return given
    known = load_cluster_record(folder, cluster) if cluster else None
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        if found := env.get(name):
            if known is not None and known.project != found:
                text_console(stderr=True).print(
                    f"note: using project {found}, the value of {name}, but cluster {cluster} of "
                    f"this folder is in {known.project}. Choose the project with --project"
                )
            return found
    if known is not None:
        return known.project
    projects = {each.project for each in recorded_clusters(folder)}
    if len(projects) == 1:
        return projects.pop()
    raise UsageError(
        "no project given. Set it with --project"
        + (f" (used in this folder: {', '.join(sorted(projects))})." if projects else ".")
    )
