"""The rig itself: its machines are real, its faults take effect, and nothing remains."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.machines.inventory import ClusterInventory
from tests.rig.access import ssh
from tests.rig.cache import cache_dir
from tests.rig.cleanup import NETWORKS, remove_leftovers
from tests.rig.host import own_cgroups, pids_with_argument, wait_until
from tests.rig.machine import Machine
from tests.rig.rig import ROOT, Rig
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.rig, pytest.mark.timeout(1800)]

PLAIN = "#cloud-config\nlocale: C.UTF-8\nssh_deletekeys: true\nssh_genkeytypes: [ed25519]\n"
HOLDER = """\
import time
from tests.rig.rig import Rig
with Rig(["#cloud-config\\n"], wheels=()) as rig:
    print(rig.name, rig._reaper.pid, flush=True)
    time.sleep(600)
"""


def user_data(key: Path) -> str:
    """Return user-data with an account for the key and without bootstrap."""
    public = key.with_suffix(".pub").read_text(encoding="utf-8").strip()
    account = f"users: [{{name: trainer, shell: /bin/bash, ssh_authorized_keys: ['{public}']}}]\n"
    return PLAIN + account


@pytest.fixture(scope="module")
def pair(operator_key: Path) -> Iterator[Rig]:
    with Rig([user_data(operator_key)] * 2, wheels=()) as rig:
        for machine in rig.machines:
            machine.exec(["cloud-init", "status", "--wait"])
        yield rig


def pings(machine: Machine, target: str) -> bool:
    """Return True if the target answers the machine within a second."""
    return machine.exec(["ping", "-c1", "-W1", target], check=False).returncode == 0


def banner(address: str, *, timeout_s: float = 5) -> bytes:
    """Return sshd's banner, from this thread's network."""
    with socket.create_connection((address, 22), timeout=timeout_s) as connection:
        return connection.recv(4)


def left_of(name: str) -> list[str]:
    """Return everything on this host with the rig's name."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    found = [line for line in mounts if name in line]
    found += [str(path) for path in NETWORKS.glob(f"{name}*")]
    found += [f"process {pid}" for pid in pids_with_argument(f"--machine={name}-")]
    found += [str(path) for path in (cache_dir() / "live").glob(f"{name}*")]
    found += [str(path) for path in own_cgroups(f"{name}-node-0") if path.exists()]
    return found + [str(path) for path in Path("/run/systemd/nspawn").rglob(f"{name}*")]


def test_machines_reach_each_other_by_name(pair: Rig) -> None:
    head, worker = pair.machines
    assert pings(head, "node-1") and pings(worker, "node-0")
    assert head.exec(["hostname"]).stdout == "node-0\n"


def test_the_inventory_holds_the_host_keys_that_sshd_shows(pair: Rig, operator_key: Path) -> None:
    inventory = ClusterInventory.from_json(pair.inventory().to_json(), where="rig")
    keys = [node.host_keys for node in inventory.nodes]
    assert len(set(keys)) == 2 and all(len(of_node) == 1 for of_node in keys)
    for machine in pair.machines:
        done = ssh(pair, machine, "id -un; hostname", key=operator_key)
        assert done.stdout == f"trainer\n{machine.name}\n", done.stderr


def test_the_machines_are_on_a_network_of_their_own(pair: Rig) -> None:
    address = pair.machines[0].address
    with pair.joined():
        assert banner(address) == b"SSH-"
    assert address not in Path("/proc/net/fib_trie").read_text(encoding="utf-8")
    assert "default" not in pair.machines[0].exec(["ip", "-6", "route"]).stdout


def test_a_cut_link_is_silent_until_it_is_restored(pair: Rig) -> None:
    head, worker = pair.machines
    worker.cut_link()
    assert not pings(head, worker.address)
    assert "state UP" in worker.exec(["ip", "link", "show", "ens4"]).stdout
    worker.restore_link()
    wait_until(lambda: pings(head, worker.address), what="link")


def test_two_machines_cut_from_each_other_still_reach_the_rest(pair: Rig) -> None:
    head, worker = pair.machines
    worker.cut_from(head)
    assert not pings(head, worker.address)
    with pair.joined():
        assert banner(worker.address) == b"SSH-"
    worker.restore_to(head)
    assert pings(head, worker.address)


def test_a_small_disk_can_be_full() -> None:
    with Rig([PLAIN], disk_mib=100, wheels=()) as rig:
        (machine,) = rig.machines
        done = machine.exec(["dd", "if=/dev/zero", "of=/var/big", "bs=1M"], check=False)
        assert "No space left on device" in done.stderr


def test_a_limited_link_is_as_slow_as_asked(pair: Rig, operator_key: Path) -> None:
    machine = pair.machines[1]

    def seconds_for_a_megabyte() -> float:
        began = time.monotonic()
        done = ssh(pair, machine, "head -c 1000000 /dev/zero", key=operator_key)
        assert len(done.stdout) == 1_000_000
        return time.monotonic() - began

    # The shortest time: on a busy machine a single login takes seconds.
    free = min(seconds_for_a_megabyte() for _ in range(3))
    machine.limit(mbit_per_s=4)
    limited = seconds_for_a_megabyte()
    machine.unlimit()
    # 8 Mbit at 4 Mbit/s, less the burst.
    assert limited > 1.7 > free


def test_a_frozen_machine_answers_nothing_until_it_is_thawed(pair: Rig) -> None:
    machine = pair.machines[1]
    machine.freeze()
    with pair.joined(), pytest.raises(TimeoutError):
        banner(machine.address, timeout_s=1)
    machine.thaw()
    with pair.joined():
        assert banner(machine.address) == b"SSH-"


def test_a_rebooted_machine_keeps_its_disk_and_keys(pair: Rig) -> None:
    machine = pair.machines[1]
    boot_id = ["cat", "/proc/sys/kernel/random/boot_id"]
    before, keys = machine.exec(boot_id).stdout, machine.host_keys()
    machine.exec(["touch", "/var/lib/kept"])
    machine.reboot()
    assert machine.exec(boot_id).stdout != before
    assert (machine.root / "var/lib/kept").exists()
    assert machine.host_keys() == keys


def test_a_killed_machine_sends_no_farewell_and_starts_again(pair: Rig) -> None:
    head, machine = pair.machines
    with (
        pair.joined(),
        socket.create_connection((machine.address, 22), timeout=DEADLINE_S) as connection,
    ):
        assert connection.recv(100).startswith(b"SSH-")
        machine.kill()
        connection.settimeout(1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    assert not pings(head, machine.address)
    machine.restore_link()
    machine.start()
    machine.wait_for_ssh()
    with pair.joined():
        assert banner(machine.address) == b"SSH-"


def test_two_rigs_at_once_have_the_same_addresses_and_do_not_meet(pair: Rig) -> None:
    with Rig([PLAIN], wheels=()) as other:
        other.machines[0].exec(["cloud-init", "status", "--wait"])
        assert other.machines[0].address == pair.machines[0].address
        assert other.machines[0].host_keys() != pair.machines[0].host_keys()
        other.machines[0].exec(["systemctl", "stop", "ssh"])
        with pair.joined():
            assert banner(pair.machines[0].address) == b"SSH-"
        assert not pings(other.machines[0], pair.machines[1].address)
    assert left_of(other.name) == []


@pytest.mark.parametrize("reaper_too", [False, True], ids=["the test", "the test and the reaper"])
def test_nothing_is_left_when_a_signal_kills(reaper_too: bool) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder.stdout:
        name, reaper = holder.stdout.readline().split()
    assert len(left_of(name)) >= 5
    if reaper_too:
        os.kill(int(reaper), signal.SIGKILL)
    holder.kill()
    holder.wait()

    def is_gone() -> bool:
        if reaper_too:
            remove_leftovers()  # as every rig does before it starts
        return not left_of(name)

    wait_until(is_gone, what="everything to be removed")
