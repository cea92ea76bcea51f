"""The project that a command looks in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from payload.core.errors import UsageError
from payload.orchestrate.clouds.cluster_records import recall, remembered_clusters
from payload.orchestrate.terminal.console import text_console


def project_of(
    given: str | None, cluster: str | None, env: Mapping[str, str], *, folder: Path
) -> str:
    """Return the project to look in. Raises UsageError when nothing says which.

    The environment is the operator's own; the folder's memory may have come with the folder.
    """
    if given:
        return given
    known = recall(folder, cluster) if cluster else None
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        if found := env.get(name):
            if known is not None and known.project != found:
                text_console(stderr=True).print(
                    f"note: {name} says project {found}; this folder has {cluster} in "
                    f"{known.project}. Another one: --project"
                )
            return found
    if known is not None:
        return known.project
    projects = {each.project for each in remembered_clusters(folder)}
    if len(projects) == 1:
        return projects.pop()
    raise UsageError(
        "which project? Name it with --project"
        + (f" (this folder has used {', '.join(sorted(projects))})." if projects else ".")
    )
