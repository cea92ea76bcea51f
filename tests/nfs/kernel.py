"""Boots user-mode Linux, a kernel that runs as a process, with NFS server and client.

The host's kernel needs neither. The machine has the host's files read-only, and can write to `out`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.launching import REPO

PROGRAMS = ("linux.uml", "rpc.nfsd", "exportfs", "mount.nfs4", "insmod", "ip", "nsenter")
MODULES = ("bridge", "veth", "nfsd", "nfsv4")
_MODULES_AT = Path("/usr/lib/uml/modules")

_INIT = Path(__file__).with_name("init.sh")


def missing() -> str | None:
    """Return why this host cannot boot the kernel, or None."""
    if os.geteuid() != 0:
        return "it needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found (make test-packages)"
    if "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="ascii").split():
        # It panics in put_fp_registers when it starts init: the registers are larger than its
        # buffer of a fixed size.
        return "user-mode Linux 6.1 panics on a CPU with AMX"
    return None


def boot(out: Path, *, timeout_s: float) -> str:
    """Run `tests.nfs.inside` on a machine until it powers off; return the console's text."""
    (release,) = (path for path in _MODULES_AT.iterdir() if path.is_dir())
    kernel = ["linux.uml", "mem=2500M", "rootfstype=hostfs", "rootflags=/", "ro", f"init={_INIT}"]
    kernel += ["con=null", "con0=null,fd:1", "quiet"]
    # init gets parameters that the kernel does not know as environment variables.
    kernel += [
        f"OUT={out}",
        f"PYTHON={sys.executable}",
        f"REPO={REPO}",
        f"PATH={os.environ['PATH']}",
    ]
    kernel += [f"MODULES={':'.join(str(release / each) for each in _loads(release))}"]
    with (out / "console.log").open("wb") as console:
        # A separate session, so that the kernel's processes end with it.
        process = subprocess.Popen(
            kernel,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "TMPDIR": "/dev/shm"},
        )
        try:
            process.wait(timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    return (out / "console.log").read_text(encoding="utf-8", errors="replace")


def _loads(release: Path) -> list[str]:
    """Return the modules' files ordered by their dependencies."""
    lines = (release / "modules.dep").read_text(encoding="ascii").splitlines()
    needs = dict(line.split(":", 1) for line in lines)
    found: list[str] = []
    for name in MODULES:
        (file,) = (each for each in needs if each.endswith(f"/{name}.ko"))
        found += [*reversed(needs[file].split()), file]
    return list(dict.fromkeys(found))
