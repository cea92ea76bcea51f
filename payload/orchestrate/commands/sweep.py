"""`sweep`: lists and deletes leftover cloud resources."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from payload.core.errors import (
    ConfigError,
    ExitCode,
    TeardownError,
    UsageError,
)
from payload.core.printable_text import shown
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.orchestrate.clouds.gcp.filestore_confirmation import may_delete
from payload.orchestrate.clouds.gcp.leftovers import (
    Sweep,
    find_leftovers,
    folder_ownership,
    print_leftovers,
    report_leftovers,
)
from payload.orchestrate.clouds.gcp.ownership import NO_IDENTITY, Ownership
from payload.orchestrate.clouds.gcp.project_choice import project_of
from payload.orchestrate.clouds.gcp.removal import remove
from payload.orchestrate.clouds.gcp.resource_kinds import FILESTORE
from payload.orchestrate.commands.cloud_options import SweepOptions
from payload.orchestrate.terminal.console import confirm, confirm_by_name, text_console
from payload.stack.cluster_identity import PATTERN, WANTED, recorded_cluster_identity


def sweep(options: SweepOptions, env: Mapping[str, str]) -> int:
    """List leftover resources; with --delete, delete them."""
    folder = Path.cwd()
    project = project_of(options.project, options.cluster, env, folder=folder)
    _check_identity(options)
    google = Google(project, endpoints=Endpoints.from_env(env))
    named = _named_proof(options, folder)
    again = partial(
        find_leftovers,
        google,
        options.cluster,
        folder=folder,
        keep_buckets=options.keep_buckets,
        ownership=named,
    )
    found = again()
    talk = text_console(stderr=True)
    if options.delete and found.removable() and not found.may_live():
        _show(found, as_json=False)
        if named is not None and not confirm_by_name(
            f"Nothing on this machine proves that cluster {options.cluster} (identity "
            f"{', '.join(named.identities)}) is yours. Delete its resources?",
            name=str(options.cluster),
        ):
            raise TeardownError("nothing was removed.")
        data = [each.name for each in found.removable() if each.kind == FILESTORE]
        if not may_delete(data, named=options.delete_filestore, kept="nothing was removed"):
            raise TeardownError("nothing was removed.")
        _remove(google, found, assume_yes=options.yes or named is not None, talk=talk)
        found = again()
    _show(found, as_json=options.json)
    report_leftovers(found, talk=talk)
    return ExitCode.OK


def _named_proof(options: SweepOptions, folder: Path) -> Ownership | None:
    """Return the ownership that --identity proves; None for the folder's own cluster.

    With --delete, the user must type the cluster's name to use an identity from --identity. The
    same holds for an identity that only the folder's identity.json contains.
    """
    if options.cluster is None:
        return None
    own, identity = folder_ownership(folder, options.cluster).identities, options.identity
    if identity is None and options.delete and not own:
        with suppress(ConfigError):
            identity, _ = recorded_cluster_identity(folder, options.cluster)
    if identity is None or identity in own:
        return None
    return Ownership(identities=frozenset((identity,)), cluster=options.cluster)


def _check_identity(options: SweepOptions) -> None:
    """Raise UsageError for an invalid --identity."""
    identity = options.identity
    if identity is None:
        return
    if not (identity == NO_IDENTITY or PATTERN.fullmatch(identity)):
        raise UsageError(
            f"--identity {shown(identity)}: must be {WANTED} as printed by `sweep`, or "
            f"{NO_IDENTITY!r} for resources without an identity."
        )
    if options.cluster is None:
        raise UsageError("--identity needs the cluster's name. Add --cluster NAME.")


def _show(found: Sweep, *, as_json: bool) -> None:
    if as_json:
        text_console(stderr=False).print(found.to_json())
    else:
        print_leftovers(found)


def _remove(google: Google, found: Sweep, *, assume_yes: bool, talk: Console) -> None:
    going = found.removable()
    if not confirm(
        f"Delete these {len(going)} resource(s) from {found.project}? Buckets, snapshots and "
        "images stay.",
        assume_yes=assume_yes,
    ):
        raise TeardownError("nothing was removed.")
    for reason in remove(google, going):
        talk.print(f"warning: {reason}")
