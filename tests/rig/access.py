"""SSH from the operator on a rig's network, with the rig's host keys."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.rig.machine import Machine
from tests.rig.rig import Rig
from tests.support.waiting import DEADLINE_S


def ssh(
    rig: Rig,
    machine: Machine,
    command: str,
    *,
    key: Path,
    user: str = "trainer",
    options: Sequence[str] = (),
    timeout_s: float = DEADLINE_S,
) -> subprocess.CompletedProcess[str]:
    """Run `command` on a machine, with strict host keys and without prompts."""
    known_hosts = key.parent / f"known_hosts.{machine.full_name}"
    lines = [f"{machine.address} {host_key}\n" for host_key in machine.host_keys()]
    known_hosts.write_text("".join(lines), encoding="utf-8")
    argv = ["ssh", "-F", "none", "-i", str(key), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
    argv += ["-o", "StrictHostKeyChecking=yes", "-o", f"UserKnownHostsFile={known_hosts}"]
    argv += ["-o", "ConnectTimeout=5", *options, f"{user}@{machine.address}", "--", command]
    return subprocess.run(
        rig.operator_argv(argv),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
