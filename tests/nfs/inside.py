"""Export from a head, mount on two workers, train, and interrupt the connection between them.

`python -m tests.nfs.inside OUT`. Each worker has a separate network, separate mounts, and the
folder under the path of a real node. The bootstrap's script exports it on the head and mounts it
on the workers.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from payload.machines.inventory import SHARED_FOLDER
from payload.orchestrate.node.look import FolderTrial
from payload.supervise.shared_folders import FolderWatch
from tests.support.launching import REPO

HEAD = "10.60.0.10"
_OWN = ("--net", "--mount", "--uts")
_HERE = "tests.nfs.inside"
SCRIPT = REPO / "bootstrap/shared-storage.sh"
SILENT_S = 25.0
Ranks = list[subprocess.Popen[bytes]]
_SYSTEMCTL = """\
#!/bin/sh
[ "$1" = restart ] || exit 0
exportfs -r && rpc.nfsd 0 && rpc.mountd && exec rpc.nfsd
"""


class Machine:
    """The virtual machine with its nodes; `out` is a folder of the host."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.nodes: list[int] = []
        """A process of each worker, which keeps its network and mounts."""
        self.began_s = time.monotonic()
        self.results: dict[str, Any] = {}

    def say(self, text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self.began_s:6.1f}] {text}\n")

    def export(self) -> None:
        """Run the bootstrap's export script; without systemd, the server is started here."""
        Path("/run/bin/systemctl").write_text(_SYSTEMCTL, encoding="ascii")
        Path("/run/bin/systemctl").chmod(0o755)
        for folder in ("rpc_pipefs", "v4recovery", "nfsdcld"):
            Path("/var/lib/nfs", folder).mkdir(parents=True)
        for name in ("etab", "rmtab"):
            Path("/var/lib/nfs", name).touch()
        run("mount -t nfsd nfsd /proc/fs/nfsd")
        run("mount -t rpc_pipefs sunrpc /var/lib/nfs/rpc_pipefs")
        run("ip link set lo up")
        run("ip link add br0 type bridge")
        run(f"ip addr add {HEAD}/24 dev br0")
        run("ip link set br0 up")
        run("nfsdcld -p /var/lib/nfs/rpc_pipefs -s /var/lib/nfs/nfsdcld")
        Path("/etc/exports").touch()
        os.environ["PATH"] = f"/run/bin:{os.environ['PATH']}"
        run(f"bash {SCRIPT} export 10.60.0.0/24")
        self.results["threads"] = int(Path("/proc/fs/nfsd/threads").read_text(encoding="ascii"))
        self.results["grace_s"] = int(
            Path("/proc/fs/nfsd/nfsv4gracetime").read_text(encoding="ascii")
        )

    def add_worker(self, index: int) -> None:
        """Make a worker, where the bootstrap's script mounts the folder."""
        node = subprocess.Popen(["unshare", *_OWN, "sleep", "infinity"])
        self.nodes.append(node.pid)
        own = Path("/proc/self/ns/net").readlink()
        wait_for(lambda: Path(f"/proc/{node.pid}/ns/net").readlink() != own, f"node-{index}")
        # NFS servers identify clients by their host names.
        self.on(index, ["hostname", f"node-{index}"])
        run(f"ip link add port{index} type veth peer name eth0 netns {node.pid}")
        run(f"ip link set port{index} master br0 up")
        for setting in ("lo up", "eth0 up"):
            self.on(index, ["ip", "link", "set", *setting.split()])
        self.on(index, ["ip", "addr", "add", f"10.60.0.{10 + index}/24", "dev", "eth0"])
        # A separate disk: otherwise the mount point would be the head's folder.
        self.on(index, ["mount", "-t", "tmpfs", "none", "/srv"])
        self.on(index, ["bash", str(SCRIPT), "mount", f"{HEAD}:/"])

    def command_on(self, index: int, argv: Sequence[str]) -> list[str]:
        """Return the command prefix that runs a command on a node; 0 is the head."""
        if index == 0:
            return list(argv)
        return ["nsenter", f"--target={self.nodes[index - 1]}", *_OWN, "--", *argv]

    def on(self, index: int, argv: Sequence[str]) -> str:
        """Run a command on a node; return its output."""
        return run(self.command_on(index, argv))

    def train(self) -> Ranks:
        """Start three ranks of a run, each on a node, with the data in the folder."""
        ranks = []
        for rank in range(3):
            env = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCHELASTIC_RUN_ID": "nfs",
                "TILEFORGE_NODE": f"node-{rank}",
                **{"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0"},
                **{"LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)},
                **{"MASTER_ADDR": HEAD, "MASTER_PORT": "29512"},
                "GLOO_SOCKET_IFNAME": "eth0" if rank else "br0",
            }
            folder = self.out / f"node-{rank}" / "run"
            program = [sys.executable, "-m", "payload.train", "--run-dir", str(folder)]
            program += ["--config", str(self.out / "run.toml")]
            log = (self.out / f"rank_{rank}.log").open("wb")
            ranks.append(
                subprocess.Popen(self.command_on(rank, program), env=env, stdout=log, stderr=log)
            )
        return ranks

    def step(self) -> int:
        """Return the last step of the run."""
        path = self.out / "node-0/run/metrics.jsonl"
        return path.read_bytes().count(b'"loss"') if path.exists() else 0

    def outage(
        self, name: str, *, begin: str, end: str, ranks: list[subprocess.Popen[bytes]]
    ) -> None:
        """Stop the server for a while; return the run's steps and the reported troubles."""
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
        before = self.step()
        self.say(f"{name} at step {before}")
        run(begin)
        time.sleep(SILENT_S)
        found: dict[str, Any] = {"before": before, "during": self.step()}
        found["troubles"] = json.loads((self.out / "watch.json").read_text(encoding="utf-8"))
        if name == "cut":
            found["trial"] = self.try_folder()
            found["killed_after_s"] = self._kill_a_reader()
        run(end)
        wait_for(
            lambda: self.step() > found["during"] + 5 or have_ended(ranks), f"steps after {name}"
        )
        # NFS and the ranks reconnect after different delays.
        watch = self.out / "watch.json"
        wait_for(lambda: watch.read_text(encoding="utf-8") == "{}", "the folder's answer")
        found["after"] = self.step()
        found["later"] = json.loads(watch.read_text(encoding="utf-8"))
        self.results[name] = found
        self.say(json.dumps(found))

    def try_folder(self) -> Any:
        """Return preflight's findings about the folder on a worker."""
        return json.loads(self.on(1, [sys.executable, "-m", _HERE, "trial"]))

    def try_lock(self) -> list[int]:
        """Return the statuses of a worker's lock, while the other worker holds the file and after.

        huggingface_hub takes such a lock (flock) for each download into its cache.
        """
        file = f"{SHARED_FOLDER}/hub/lock"
        holder = subprocess.Popen(
            self.command_on(2, ["flock", "--close", file, "sh", "-c", "echo; exec sleep 600"]),
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        attempt = self.command_on(1, ["flock", "--nonblock", file, "true"])
        while_held = subprocess.run(attempt, check=False).returncode
        holder.kill()
        holder.wait()
        return [while_held, subprocess.run(attempt, check=False).returncode]

    def _kill_a_reader(self) -> float:
        """Return the seconds until SIGKILL ends a program that waits for the server."""
        code = f"import os; os.statvfs({SHARED_FOLDER!r})"
        reader = subprocess.Popen(self.command_on(1, [sys.executable, "-c", code]))
        time.sleep(8.0)
        assert reader.poll() is None, "it did not wait for the server"
        began_s = time.monotonic()
        reader.kill()
        reader.wait(60)
        return time.monotonic() - began_s


def run(command: str | Sequence[str]) -> str:
    """Run a command and return its output."""
    argv = command.split() if isinstance(command, str) else list(command)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{argv}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def wait_for(condition: Callable[[], bool], what: str, *, timeout_s: float = 900.0) -> None:
    """Wait until the condition holds."""
    ends_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends_s:
            raise TimeoutError(what)
        time.sleep(0.2)


def have_ended(ranks: Ranks) -> bool:
    """Return True if a process has ended."""
    return any(rank.poll() is not None for rank in ranks)


def watch(path: Path) -> None:
    """Keep the folder's current troubles in a file, as a worker's heartbeat sends them."""
    folders = FolderWatch([SHARED_FOLDER], env=os.environ)
    while True:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(folders.troubles()), encoding="utf-8")
        part.replace(path)
        time.sleep(0.5)


def scenario(machine: Machine) -> None:
    """Export, mount and train; restart the server and cut a worker's link during the run."""
    machine.export()
    for index in (1, 2):
        machine.add_worker(index)
    machine.say("mounted")
    mounts = machine.on(1, ["cat", "/proc/self/mounts"]).splitlines()
    machine.results["mount"] = next(line for line in mounts if f" {SHARED_FOLDER} nfs4 " in line)
    machine.results["trial"] = json.loads(machine.on(1, [sys.executable, "-m", _HERE, "trial"]))
    machine.results["locks"] = machine.try_lock()
    shutil.copytree(machine.out / "data", f"{SHARED_FOLDER}/data/tokens")
    look = [sys.executable, "-m", _HERE, "watch", str(machine.out / "watch.json")]
    watching = subprocess.Popen(machine.command_on(1, look))
    ranks = machine.train()
    wait_for(lambda: machine.step() >= 5 or have_ended(ranks), "the first steps")
    machine.outage("restart", begin="rpc.nfsd 0", end="rpc.nfsd", ranks=ranks)
    machine.outage("cut", begin="ip link set port1 down", end="ip link set port1 up", ranks=ranks)
    machine.results["exits"] = [rank.wait(900) for rank in ranks]
    watching.send_signal(signal.SIGKILL)
    machine.say("the run has ended")


def main(argv: Sequence[str]) -> int:
    """Run one of the commands."""
    if argv[0] == "trial":
        sys.stdout.write(json.dumps(FolderTrial(Path(SHARED_FOLDER)).result()))
        sys.stdout.flush()
        # A blocked thread must not delay the exit.
        os._exit(0)
    if argv[0] == "watch":
        watch(Path(argv[1]))
    machine = Machine(Path(argv[0]))
    try:
        scenario(machine)
    finally:
        kernel = run("dmesg").splitlines()
        machine.results["kernel"] = [line for line in kernel if "nfs" in line.lower()]
        text = json.dumps(machine.results, indent=1)
        (machine.out / "results.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
