"""Looks at the machine it runs on and prints what it finds as JSON.

Runs on a node by python3 alone, from stdin, where its arguments follow, a JSON object:
state_file, logs (paths, the first that can be read is shown), route_to (an address, or null).
What the machine does not tell is null.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_TAIL_LINES = 12
_COMMAND_S = 5
_RESOLVER_S = 3


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """Everything that preflight decides on, about this machine."""
    began_unix, began = time.time(), time.monotonic()
    answered = ask_resolver(arguments["route_to"])
    facts = {
        "time_unix": began_unix,
        "hostname": socket.gethostname(),
        "hostname_addresses": hostname_addresses(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "bootstrap": read_json(Path(arguments["state_file"]).expanduser()),
        "bootstrap_log": tail(arguments["logs"]),
        "cpu_flags": cpu_flags(),
        "physical_cores": physical_cores(),
        "numa_domains": numa_domains(),
        "memory_bytes": memory_bytes(),
        "disk_path": str(Path.home()),
        "disk_free_bytes": shutil.disk_usage(Path.home()).free,
        **route(arguments["route_to"]),
    }
    answered.wait(_RESOLVER_S)
    facts["resolver_answers"] = answered.is_set()
    facts["took_s"] = time.monotonic() - began
    return facts


def hostname_addresses() -> list[str]:
    """What this machine's own name resolves to; empty when it does not."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in found})


def ask_resolver(address: str | None) -> threading.Event:
    """Set when the address's name is known, or is known to have none; mpirun and gloo ask, too."""
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(OSError):
            socket.gethostbyaddr(str(address))
        answered.set()

    if address is None:
        answered.set()
    else:
        threading.Thread(target=ask, daemon=True).start()
    return answered


def read_json(path: Path) -> Any:
    """The file's content, or null; a file that is no JSON comes back as its text."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def tail(paths: list[str]) -> list[str]:
    """The last lines of the first file that can be read."""
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        return lines[-_TAIL_LINES:]
    return []


def cpu_flags() -> list[str] | None:
    """The matrix and bf16 flags of the first CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return sorted(flag for flag in flags if flag.startswith("amx") or "bf16" in flag)


def physical_cores() -> int | None:
    """Cores that this process may use, each counted once however many threads it has."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package = (topology / "physical_package_id").read_text(encoding="ascii").strip()
            core = (topology / "core_id").read_text(encoding="ascii").strip()
        except OSError:
            package, core = "", str(cpu)
        cores.add((package, core))
    return len(cores)


def numa_domains() -> int | None:
    """NUMA domains that have a CPU."""
    folders = Path("/sys/devices/system/node").glob("node[0-9]*")
    lists = [(folder / "cpulist").read_text(encoding="ascii").strip() for folder in folders]
    return len([text for text in lists if text]) or None


def memory_bytes() -> int | None:
    """Memory of the machine."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def route(address: str | None) -> dict[str, Any]:
    """The interface on the way to `address`, the address that packets leave from, and the MTU."""
    unknown = {"interface": None, "source_address": None, "mtu": None}
    if address is None:
        return unknown
    command = ["ip", "-j", "route", "get", address]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_COMMAND_S
        )
        entry = json.loads(done.stdout)[0]
        mtu = int(Path(f"/sys/class/net/{entry['dev']}/mtu").read_text(encoding="ascii"))
    except (OSError, ValueError, LookupError, subprocess.SubprocessError):
        return unknown
    return {"interface": entry["dev"], "source_address": entry.get("prefsrc"), "mtu": mtu}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(json.load(sys.stdin))) + "\n")
