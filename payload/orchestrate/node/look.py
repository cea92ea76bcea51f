"""Inspects the node it runs on, reports what is missing for a run, and installs the code.

Runs on a node with python3 only. The program is read from stdin, followed by its arguments as a
JSON object: action (probe, look, finish, running) and its arguments. Prints a JSON object; unknown
values are null. All actions are idempotent.

probe: state_file, logs (paths; the first readable one is shown), route_to (address or null),
shared_folder (a path, tested if it is mounted or in fstab), gpu_query (columns of nvidia-smi) and
torch (a folder, and a glob pattern below it for torch's version.py).
look, finish: digest (of the code) and files (SHA-256 by path). look: also venv, programs (in its
bin folder) and wholes (files under ~/tileforge, each of which marks a complete folder).
"""

from __future__ import annotations

import contextlib
import ctypes.util
import fcntl
import hashlib
import json
import os
import platform
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_TAIL_LINES = 12
_COMMAND_S = 5
_RESOLVER_S = 3
_FOLDER_S = 5
_SMI_S = 8
_SMI_CHARS = 2**16
_VISIBLE_CHARS = 4096
_VERSION_CHARS = 64

# The test is a separate program, because access to a folder whose server is down blocks. It is
# killed after a timeout, so the file is unlinked before it is written. If the program is killed
# before it unlinks the file, a later test removes the file.
_TRY_FOLDER = """
import contextlib, errno, os, sys
folder, own = sys.argv[1], f".tileforge-preflight-{os.uname().nodename}-"
try:
    for name in os.listdir(folder):
        if name.startswith(own) and not os.path.exists(f"/proc/{name[len(own):]}"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))
    name = os.path.join(folder, f"{own}{os.getpid()}")
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(name)
        os.write(descriptor, b"preflight")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
except OSError as error:
    print(errno.errorcode.get(error.errno, "EIO"))
"""


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about this machine that preflight checks."""
    began_unix, began = time.time(), time.monotonic()
    answered = query_resolver(arguments["route_to"])
    trial = FolderTrial(Path(arguments["shared_folder"]))
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
        "nvidia": nvidia(arguments["gpu_query"], torch=arguments["torch"], env=os.environ),
        **route(arguments["route_to"]),
    }
    answered.wait(_RESOLVER_S)
    facts["resolver_answers"] = answered.is_set()
    facts["shared"] = trial.result()
    facts["took_s"] = time.monotonic() - began
    return facts


def hostname_addresses() -> list[str]:
    """Return the addresses of this machine's host name; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in found})


def query_resolver(address: str | None) -> threading.Event:
    """Start a reverse DNS lookup, as mpirun and gloo do; set the event when the lookup returns."""
    answered = threading.Event()

    def query() -> None:
        with contextlib.suppress(OSError):
            socket.gethostbyaddr(str(address))
        answered.set()

    if address is None:
        answered.set()
    else:
        threading.Thread(target=query, daemon=True).start()
    return answered


class FolderTrial:
    """Tests a shared folder by writing and removing a file."""

    def __init__(
        self,
        folder: Path,
        *,
        mounts: Path = Path("/proc/self/mounts"),
        fstab: Path = Path("/etc/fstab"),
    ) -> None:
        """Start the test if the mount table lists the folder; a check of the folder could block."""
        self._folder = folder
        self._is_expected = is_listed(folder, fstab)
        self._is_mounted = is_listed(folder, mounts)
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._error = ""
        if self._is_mounted:
            threading.Thread(target=self._try, daemon=True).start()

    def _try(self) -> None:
        command = [sys.executable, "-I", "-c", _TRY_FOLDER, str(self._folder)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            output, _ = process.communicate(timeout=_FOLDER_S)
        except subprocess.TimeoutExpired:
            process.kill()  # do not wait, because the process can block until the server is back
            return
        self._error = output.decode("ascii", "replace").strip() or (
            "" if not process.returncode else "EIO"
        )
        self._took_s = time.monotonic() - self._began
        self._ended.set()

    def result(self) -> dict[str, Any] | None:
        """Return the result; None if the folder is neither mounted nor in fstab."""
        if not self._is_mounted and not self._is_expected:
            return None
        found: dict[str, Any] = {"folder": str(self._folder), "mounted": self._is_mounted}
        if self._is_mounted:
            self._ended.wait(max(0.0, self._began + _FOLDER_S - time.monotonic()))
        ended = self._ended.is_set()
        return {
            **found,
            "took_s": self._took_s if ended else None,
            "error": (self._error or None) if ended else None,
        }


def is_listed(folder: Path, table: Path) -> bool:
    """Return whether a mount table lists the folder."""
    try:
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    rows = [line.split() for line in lines if not line.lstrip().startswith("#")]
    return any(len(row) > 1 and row[1] == str(folder) for row in rows)


def read_json(path: Path) -> Any:
    """Return the file's parsed JSON, or its text if it is not JSON; None if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def tail(paths: list[str]) -> list[str]:
    """Return the last lines of the first readable file."""
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        return lines[-_TAIL_LINES:]
    return []


def cpu_flags() -> list[str] | None:
    """Return the AMX and bf16 flags of the first CPU; None if the kernel lists no flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    # On Arm this line is called `Features`.
    named = [line.split() for line in lines if line.startswith(("flags", "Features"))]
    if not named:
        return None
    return sorted(flag for flag in named[0] if flag.startswith("amx") or "bf16" in flag)


def physical_cores() -> int | None:
    """Return the number of physical cores that this process may use."""
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
    """Return the number of NUMA domains that have a CPU."""
    folders = Path("/sys/devices/system/node").glob("node[0-9]*")
    lists = [(folder / "cpulist").read_text(encoding="ascii").strip() for folder in folders]
    return len([text for text in lists if text]) or None


def memory_bytes() -> int | None:
    """Return the size of the machine's memory."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def route(address: str | None) -> dict[str, Any]:
    """Return the interface, source address and MTU of the route to `address`."""
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


def nvidia(query: str, *, torch: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return nvidia-smi's output for the GPUs, the visible devices, and torch's CUDA version.

    Without nvidia-smi, `smi` is null; if nvidia-smi hangs, `smi.status` is null. Overlong output is
    truncated instead of causing an error, because commands that need no GPU also run this function.
    """
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    return {
        "smi": None if program is None else _query_smi(program, query),
        "visible": None if visible is None else _plain(visible, _VISIBLE_CHARS),
        "torch": torch_build(*torch),
    }


def _query_smi(program: str, query: str) -> dict[str, Any]:
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        return {"status": 126, "said": str(error)}
    try:
        output, _ = process.communicate(timeout=_SMI_S)
    except subprocess.TimeoutExpired:
        process.kill()  # do not wait, because a hanging driver can block the process
        return {"status": None, "said": ""}
    return {"status": process.returncode, "said": output.decode("utf-8", "replace")[:_SMI_CHARS]}


def torch_build(root: str, pattern: str) -> dict[str, Any] | None:
    """Return torch's version and its CUDA version; None if torch is not installed."""
    for path in sorted(Path(root).glob(pattern)):
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="utf-8", errors="replace")
            version = re.search(r"^__version__ = '([^'\n]+)'", text, re.MULTILINE)
            cuda = re.search(r"^cuda\b[^=\n]*= '([^'\n]+)'", text, re.MULTILINE)
            if version:
                return {
                    "version": _plain(version[1], _VERSION_CHARS),
                    "cuda": _plain(cuda[1], _VERSION_CHARS) if cuda else None,
                }
    return None


def _plain(text: str, most: int) -> str:
    return re.sub("[^ -~]", "?", text)[:most]


_RUN_ID = re.compile(r"(?!latest\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CHECKPOINT = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,17})")
_TCMALLOC = ("tcmalloc", "tcmalloc_minimal")


def act(arguments: dict[str, Any], *, home: Path) -> dict[str, Any]:
    """Run one action in the login's `home`."""
    if arguments["action"] == "probe":
        return probe(arguments)
    root = home / arguments["folder"]
    if arguments["action"] == "running":
        return {"running": running(root / "runs"), "runs": results(root / "runs")}
    if arguments["action"] == "finish":
        return finish(root, arguments["digest"], arguments["files"])
    missing = missing_files(root, arguments["digest"], arguments["files"])
    programs = [Path(arguments["venv"], "bin", name) for name in arguments["programs"]]
    libraries = [ctypes.util.find_library(name) for name in _TCMALLOC]
    return {
        "home": str(home),
        "lacking": [str(path) for path in programs if not os.access(path, os.X_OK)],
        "tcmalloc": next((name for name in libraries if name), None),
        "port": free_port(range(*arguments["ports"])),
        "running": running(root / "runs"),
        "missing": missing,
        "has": [name for name in arguments["wholes"] if (root / name).is_file()],
    }


def code_folder(root: Path, digest: str, *, complete: bool) -> Path:
    """Return the folder for code with this digest, or its staging folder."""
    return root / (f"payload-{digest}" if complete else f".payload-{digest}")


def missing_files(root: Path, digest: str, files: dict[str, str]) -> list[str] | None:
    """Return the files that must be sent, or None if the code is complete.

    Files that another version on this node already has are copied.
    """
    if code_folder(root, digest, complete=True).is_dir():
        return None
    partial = code_folder(root, digest, complete=False)
    others = sorted(root.glob("payload-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    missing = []
    for name, sha256 in files.items():
        target = partial / name
        if sha256_of(target) == sha256:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        known = next((other / name for other in others if sha256_of(other / name) == sha256), None)
        if known:
            shutil.copyfile(known, target)
        else:
            missing.append(name)
    return missing


def finish(root: Path, digest: str, files: dict[str, str]) -> dict[str, Any]:
    """Rename the staging folder to the code's folder if the SHA-256 of every file is right."""
    target, partial = (code_folder(root, digest, complete=complete) for complete in (True, False))
    wrong = [name for name, sha256 in files.items() if sha256_of(partial / name) != sha256]
    if not wrong and not target.is_dir():
        partial.rename(target)
    return {"wrong": [] if target.is_dir() else wrong}


def sha256_of(path: Path) -> str | None:
    """Return the SHA-256 of the file's content; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def running(runs: Path) -> str | None:
    """Return the run that has a living supervisor, or None."""
    for lock in runs.glob("*/supervisor.lock"):
        try:
            descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.parent.name
        finally:
            os.close(descriptor)
    return None


def results(runs: Path) -> list[dict[str, Any]]:
    """Return for each run the newest complete checkpoint (or empty) and the SHA-256 of state.json.

    Folders with names that are not run IDs are ignored; people can have added such folders.
    """
    found = []
    for plan in sorted(runs.glob("*/plan.json")):
        folder = plan.parent
        if not _RUN_ID.fullmatch(folder.name):
            continue
        names = [path.parent.name for path in folder.glob("checkpoints/step_*/manifest.json")]
        steps = {name: int(step[1]) for name in names if (step := _CHECKPOINT.fullmatch(name))}
        state = sha256_of(folder / "state.json")
        newest = max(steps, key=lambda name: steps[name], default="")
        found.append({"run_id": folder.name, "checkpoint": newest, "state": state})
    return found


def free_port(ports: range) -> int | None:
    """Return a free port for the ranks' rendezvous; the supervisor reserves it when it starts."""
    for port in random.sample(ports, k=100):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(act(json.load(sys.stdin), home=Path.home())) + "\n")
