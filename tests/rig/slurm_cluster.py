"""A small Slurm cluster on the rig: a login node with the controller, and two nodes.

The three machines share a folder. Tests also imitate other engines on them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.rig.host import wait_until
from tests.rig.machine import Machine
from tests.rig.rig import ROOT, Rig
from tests.rig.slurm_layer import slurm_layer
from tests.support.waiting import DEADLINE_S

SHARED = "/shared"
CODE, VENV = "/srv/tileforge", "/srv/venv"
"""This checkout and the environment of the tests, which machines mount read-only."""
PACKAGES = f"{VENV}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
IMAGE_ENV = {
    "PATH": f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{VENV}/bin",
    "PYTHONPATH": f"{CODE}:{PACKAGES}",
    "HOME": "/root",
    "OMP_NUM_THREADS": "1",
}
"""Environment of an image with the payload: Debian's Python and the venv's Intel MPI."""
_USER_DATA = "#cloud-config\n{}\n"
# Slurm makes no control groups, and every node has two cores.
_CONF = """\
ClusterName=rig
SlurmctldHost=node-0
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=300
KillWait=30
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
NodeName=node-[1-2] CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=node-[1-2] Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Runs commands on the login node as the user `trainer`, in the shared folder."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.login, *self.nodes = rig.machines
        self.folder = folder
        """Path of the shared folder on this host."""

    def boot(self) -> None:
        """Start Slurm on all machines, and wait until both nodes are idle."""
        for machine in (self.login, *self.nodes):
            (machine.live_root() / "etc/slurm/slurm.conf").write_text(_CONF, encoding="ascii")
        self.login.exec(["sh", "-c", "mkdir -p /var/lib/slurm/slurmctld /var/log/slurm"])
        self.login.exec(["chown", "-R", "slurm:", "/var/lib/slurm", "/var/log/slurm"])
        self.login.exec(["systemctl", "start", "munge", "slurmctld"])
        for machine in self.nodes:
            self.start_node(machine)
        wait_until(lambda: self.slurm("sinfo -h -o %t:%D") == "idle:2", what="sinfo")

    def start_node(self, machine: Machine) -> None:
        """Start a node's daemons."""
        machine.exec(["sh", "-c", "mkdir -p /var/lib/slurm/slurmd /var/log/slurm"])
        machine.exec(["systemctl", "start", "munge", "slurmd"])

    def slurm(self, line: str) -> str:
        """Run one of Slurm's commands as root; return its output."""
        return self.login.exec(shlex.split(line), check=False).stdout.strip()

    def do(
        self, *arguments: str, before: Sequence[str] = (), timeout_s: float = DEADLINE_S
    ) -> tuple[int, str]:
        """Run a command of orchestrate; return its exit code and output.

        `before` is a command prefix.
        """
        argv = [*before, "python3", "-m", "payload.orchestrate", *arguments]
        return self.type(argv, timeout_s=timeout_s)

    def type(
        self, command: Sequence[str], *, folder: str = SHARED, timeout_s: float = DEADLINE_S
    ) -> tuple[int, str]:
        """Run a command in `folder`; return its exit code and output."""
        env = ["HOME=/home/trainer", f"PYTHONPATH={CODE}:{PACKAGES}", "TERM=dumb"]
        shell = ["sh", "-c", f"cd {folder} && exec {shlex.join(command)}"]
        argv = ["runuser", "-u", "trainer", "--", "env", *env, *shell]
        done = self.login.exec(argv, check=False, timeout_s=timeout_s)
        return done.returncode, done.stdout + done.stderr


@contextmanager
def slurm_cluster(folder: Path, *, shared: Mapping[Path, str]) -> Iterator[SlurmCluster]:
    """Yield three machines with Slurm that share `folder` and the mounts in `shared`."""
    places = {folder: SHARED, **shared}
    for each in places:
        each.chmod(0o777)
    with Rig(
        [_USER_DATA] * 3,
        layers=[slurm_layer()],
        wheels=(),
        binds=[f"{ROOT}:{CODE}", f"{sys.prefix}:{VENV}"],
        shared=[f"{here}:{there}" for here, there in places.items()],
    ) as rig:
        cluster = SlurmCluster(rig, folder)
        cluster.boot()
        yield cluster
