"""Checks that a run leaves nothing on machines."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.rig.machine import Machine
from tests.rig.sweep import processes_of
from tests.support.waiting import wait_until

HOME = "home/trainer"
# Variables of a person's shell that no node must get.
CANARIES = {
    "HF_TOKEN": "hf_canary7Qm2xWvT",
    "GOOGLE_APPLICATION_CREDENTIALS": "/nowhere/canary4Zr9.json",
    "AWS_SECRET_ACCESS_KEY": "canaryUe83LkPd",
}
# The account's own services, which run without a run.
_SERVICES = ("/lib/systemd/systemd --user", "(sd-pam)")


def is_quiet(machine: Machine) -> bool:
    """Return True if the account only runs its user services."""
    mine = [process for process in processes_of(machine) if process.user == "trainer"]
    return all(process.command in _SERVICES for process in mine)


def marked(machine: Machine) -> list[str]:
    """Return the processes of a run under any user."""
    words = ("payload", "mpirun", "hydra")
    found = []
    for process in processes_of(machine):
        if b"TILEFORGE_" in process.environment or any(word in process.command for word in words):
            found.append(process.command)
    return found


def assert_nothing_is_left(machines: list[Machine], operator_key: Path) -> None:
    """Assert that the machines have no process, no key and no session of a run."""
    for machine in machines:
        assert not marked(machine)
        wait_until(partial(is_quiet, machine), what=f"{machine.name}: the last session to end")
        ssh = machine.root / HOME / ".ssh"
        public = operator_key.with_suffix(".pub").read_text(encoding="ascii")
        assert (ssh / "authorized_keys").read_text(encoding="ascii").strip() == public.strip()
        assert not [path for path in (ssh / "tileforge").rglob("*") if path.is_file()]
