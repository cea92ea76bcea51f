"""`preflight`: checks every node of a cluster."""

from __future__ import annotations

from payload.orchestrate.commands.config_choice import load_config
from payload.orchestrate.commands.run_commands_options import PreflightOptions
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.preflight import checks


def preflight(options: PreflightOptions, access: LocalAccess) -> int:
    """Check every node, print a table, and return the exit code."""
    resolved = checks.PreflightRequest(
        inventory=options.inventory,
        ssh_key=options.ssh_key,
        config=load_config(options),
        is_configured=options.config_path is not None or bool(options.overrides),
        quick=options.quick,
        wait=options.wait,
        json=options.json,
    )
    return checks.preflight(resolved, access)
