"""Hostile inventories against ssh itself: ssh reads accepted values as they are."""

from __future__ import annotations

import contextlib
import copy
import ipaddress
import json
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import ConfigError
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.ssh.remote_calls import iap_argv
from payload.orchestrate.ssh.ssh_config import render_known_hosts, render_ssh_config
from tests.support.waiting import DEADLINE_S

CASES = 3000
HOSTILE: tuple[object, ...] = (
    "a\nProxyCommand touch /tmp/owned",
    "a\rProxyCommand x",
    "a\x85Host *",
    "a\u2028User root",
    "a\x00b",
    "a b",
    "a\tProxyCommand",
    "-oProxyCommand=x",
    "--project=other",
    'a"b',
    "a'b",
    "`id`",
    "$(id)",
    "${HOME}",
    "%h",
    "%%",
    "a#b",
    "*",
    "?",
    "!node-0",
    "none",
    "NONE",
    "",
    "..",
    "../../.ssh",
    "/etc",
    ".",
    "~root",
    "a@b",
    "1",
    "10.2",
    "0x0a000003",
    "10.0.0.03",
    "a:22",
    "10.0.0.2:64",
    "[::1]:22",
    "::1",
    "fe80::1%eth0",
    ":::",
    "1:2:3:4:5:6:7:8:9",
    "user@host:22",
    "ssh://x",
    "a,b",
    "a=b",
    "a;b",
    "a|b",
    "@cert-authority",
    "|1|salt|hash",
    "ssh-ed25519 AAAA\n@cert-authority * ssh-rsa BBBB",
    "ssh-ed25519 AAAA comment",
    "\ud800",
    "é",
    "\uff41",
    "٣",
    "x" * 300,
    "x" * 70_000,
    0,
    -1,
    2**63,
    65_536,
    1e308,
    True,
    None,
    [],
    {},
    ["a\nb"],
    {"a": 1},
)
SOUND: dict[str, tuple[object, ...]] = {
    "name": ("Node-0", "NODE-1", "_a.b", "0x7f.1", "10.0.0.3", "a" * 253, "head.example.com"),
    "address": ("10.0.0.3", "node-1", "fd00::2", "FD00:0::A", "a_b", "NODE-0"),
    "external_address": ("203.0.113.9", "2001:db8::1", "head.example.com", None),
    "ssh_port": (1, 2222, 65_535),
    "host_keys": ([], ["ssh-ed25519 AAAA"], ["sk-ssh-ed25519@openssh.com AAAA=="]),
    "zone": ("us-central1-a", None),
    "project": ("my-project", "example.com:my-project", None),
    "bucket": ("my_bucket.example", None),
    "cluster": ("Mine", "a.b_c-d"),
    "ssh_user": ("ada_example_com", "Ada.L", "0day"),
    "instance_id": ("1234567890", None),
}
BASE: dict[str, Any] = {
    "schema_version": 1,
    "cluster": "c",
    "source": "file",
    "ssh_user": "trainer",
    "access": {"kind": "iap", "project": "pro"},
    "bucket": None,
    "project": None,
    "nodes": [
        {
            "name": f"node-{i}",
            "address": f"10.0.0.{i + 2}",
            "external_address": None,
            "ssh_port": 22,
            "host_keys": ["ssh-ed25519 AAAA"],
            "zone": "us-central1-a",
            "machine_type": "c3-highcpu-22",
            "physical_cores": 4,
            "numa_domains": 1,
            "memory_gib": 32,
            "hourly_usd": None,
            "instance_id": None,
        }
        for i in range(2)
    ],
}


def damaged(rng: random.Random) -> dict[str, Any]:
    """Return an inventory with one to three hostile or unusual fields."""
    raw = copy.deepcopy(BASE)
    raw["access"]["kind"] = rng.choice(["iap", "direct"])
    for _ in range(rng.randint(1, 3)):
        place = rng.choice([raw, raw["access"], *raw["nodes"], *raw["nodes"]])
        key = rng.choice([key for key in place if key not in ("schema_version", "nodes", "access")])
        if rng.random() < 0.5 and key in SOUND:
            place[key] = rng.choice(SOUND[key])
        elif rng.random() < 0.7:
            place[key] = copy.deepcopy(rng.choice(HOSTILE))
        else:
            alphabet = "ab01._-: \n\r\t\"'%$`#*?!@,;\\/é\x00\x1b"
            place[key] = "".join(rng.choices(alphabet, k=rng.randint(1, 8)))
    return raw


def read(raw: dict[str, Any]) -> ClusterInventory | None:
    """Return the inventory, or None if it is refused; any other result is a defect."""
    try:
        return ClusterInventory.from_json(json.dumps(raw), where="inventory.json")
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 400, str(error)[:500]
        return None


def ssh_says(config: Path, host: str) -> list[str]:
    """Return ssh's effective settings in lower case, because host names ignore case."""
    done = subprocess.run(
        ["ssh", "-G", "-F", str(config), host],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(line.lower() for line in done.stdout.splitlines())


@cache
def ssh_defaults() -> tuple[tuple[str, str], ...]:
    """Return ssh's defaults without a config, by keyword."""
    return tuple((words[0], words[2]) for words in map(_words, ssh_says(Path("/dev/null"), "host")))


def usual(address: str) -> str:
    """Return an IP address in ssh's format."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(address))
    return address


def _words(line: str) -> tuple[str, str, str]:
    return line.partition(" ")


def intended(
    inventory: ClusterInventory, node: Node, host: str, *, on_head: bool, key: str, known: str
) -> list[str]:
    """Return the expected settings of ssh for `host`."""
    is_head = node is inventory.head
    from_outside = is_head and not on_head
    ours = {
        "host": host,
        "hostname": usual((node.external_address if from_outside else None) or node.address),
        "port": str(node.ssh_port),
        "hostkeyalias": node.name,
        "user": inventory.ssh_user,
        "identityfile": key,
        "identitiesonly": "yes",
        "identityagent": "none",
        "userknownhostsfile": known,
        "globalknownhostsfile": "none",
        "stricthostkeychecking": "true",
        "updatehostkeys": "false",
        "passwordauthentication": "no",
        "kbdinteractiveauthentication": "no",
        "batchmode": "yes",
        "connecttimeout": "10",
        "serveraliveinterval": "15",
        "serveralivecountmax": "4",
    }
    if from_outside and inventory.access.kind == "iap":
        ours["proxycommand"] = " ".join(iap_argv(node, inventory.access))
    elif not is_head and not on_head:
        ours["proxyjump"] = inventory.head.name
    kept = [(keyword, value) for keyword, value in ssh_defaults() if keyword not in ours]
    return sorted(f"{keyword} {value}".lower() for keyword, value in [*kept, *ours.items()])


def accepted_cases(seed: int) -> Iterator[ClusterInventory]:
    rng = random.Random(seed)
    for _ in range(CASES):
        inventory = read(damaged(rng))
        if inventory is not None:
            yield inventory


def check(inventory: ClusterInventory, folder: Path) -> int:
    """Query ssh for every node, as operator and as head; return the number of queries."""
    folder.mkdir()
    key, known = folder / "id key", folder / "known hosts"
    questions = 0
    for on_head in (False, True):
        try:
            text = render_ssh_config(
                inventory.nodes,
                user=inventory.ssh_user,
                access=inventory.access,
                key=key,
                known_hosts=known,
                on_head=on_head,
            )
        except ConfigError as error:  # a valid inventory without the fields that iap needs
            assert "access kind 'iap' needs" in str(error)
            continue
        config = folder / f"config.{on_head}"
        config.write_text(text, encoding="utf-8")
        for node in inventory.nodes:
            for host in {node.name, node.address}:
                wanted = intended(
                    inventory, node, host, on_head=on_head, key=str(key), known=str(known)
                )
                assert ssh_says(config, host) == wanted, (host, on_head, inventory)
                questions += 1
    lines = render_known_hosts(inventory.nodes).splitlines()
    assert lines == [f"{node.name} {key}" for node in inventory.nodes for key in node.host_keys]
    return questions


@pytest.mark.sshd
def test_ssh_understands_of_any_accepted_inventory_what_it_says_and_nothing_else(
    tmp_path: Path,
) -> None:
    accepted = list(accepted_cases(seed=14))
    # Both results must be frequent; otherwise the fuzzing tests nothing.
    assert CASES / 10 < len(accepted) < CASES / 2
    unlike = list(dict.fromkeys(inventory.to_json() for inventory in accepted))
    found = [ClusterInventory.from_json(text, where="again") for text in unlike[:250]]
    with ThreadPoolExecutor(4) as pool:
        folders = [tmp_path / str(i) for i in range(len(found))]
        assert sum(pool.map(check, found, folders)) > 1000


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: ascii(value)[:30])
def test_a_hostile_value_in_any_field_is_refused_in_one_line_or_harmless(value: object) -> None:
    for place in ((), ("access",), ("nodes", 0), ("nodes", 1)):
        fields: Any = BASE
        for step in place:
            fields = fields[step]
        for key in fields:
            raw = copy.deepcopy(BASE)
            target: Any = raw
            for step in place:
                target = target[step]
            target[key] = copy.deepcopy(value)
            inventory = read(raw)
            if inventory is not None:
                again = json.dumps(json.loads(inventory.to_json()), ensure_ascii=False)
                assert not set(again) & set("\n\r\t\x00\x85\u2028`$*?!%#;|\\'/~")


def test_bytes_that_are_no_inventory_are_refused_in_one_line() -> None:
    rng = random.Random(4)
    whole = json.dumps(BASE).encode()
    for _ in range(CASES):
        cut = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(cut))
            cut[at : at + rng.randint(0, 9)] = rng.randbytes(rng.randint(0, 4))
        try:
            ClusterInventory.from_json(bytes(cut[: rng.randrange(len(cut) * 4)]), where="x")
        except ConfigError as error:
            assert "\n" not in str(error)
