"""Helpers for tests of `up` and `down`: a stack with simulated operations, and copies of runs."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from typing import Any

import pytest

from payload.machines.inventory import Access
from payload.orchestrate.commands import results_at_stake
from payload.orchestrate.commands.head_runs import Head
from payload.orchestrate.runs.mirror import Mirrored, write_mirrored
from payload.run_record.run_files import RunPaths
from payload.stack.operator_key_file import make_operator_key, operator_key_path
from tests.launch.inventories import make_inventory
from tests.orchestrate.cloud.conftest import KEY, Site
from tests.support.run_folders import make_run

Capture = pytest.CaptureFixture[str]


class Answers(io.StringIO):
    """An operator's input at a terminal."""

    def isatty(self) -> bool:
        return True


def stay(site: Site, *names: str) -> None:
    """Make every removal of these resources fail."""
    site.cloud.stuck |= dict.fromkeys(names, "it is in use")


def own_key(site: Site, cluster: str = "mine") -> None:
    """Write the operator's key of the cluster to its default path."""
    path = operator_key_path(site.folder, cluster=cluster)
    public = make_operator_key(path)
    path.with_name("id_ed25519.pub").write_text(f"{public}\n")


def words(site: Site) -> list[str]:
    """Return Pulumi's commands, except reads of config and state."""
    told = [" ".join(word for word in call if word) for call in site.pulumi.calls()]
    return [each for each in told if not each.endswith(("config --json", "stack export"))]


def destroys(site: Site, *, leaves: tuple[str, ...] = (), status: int = 0, out: str = "") -> None:
    """Make `pulumi destroy` remove everything except `leaves`."""
    site.pulumi.on("destroy", out=out or "destroyed\n", status=status)

    def fake(method: str, target: str) -> None:
        if any(call[1:2] == ["destroy"] for call in site.pulumi.calls()):
            for items in site.cloud.items.values():
                items[:] = [item for item in items if item["name"] in leaves]

    site.cloud.before_each = fake


def head_says(monkeypatch: pytest.MonkeyPatch, **said: Any) -> None:
    """Set the head's reported state for `up` and `down`, because its address is unreachable."""
    monkeypatch.setattr(results_at_stake, "query_head", lambda *_, **__: Head(**said))


def copy_of_run(
    site: Site,
    name: str,
    *,
    alive: bool,
    collected: str | None = None,
    instance_id: str | None = None,
) -> RunPaths:
    """Create a local copy of a run on the cluster, whose node is unreachable."""
    paths = make_run(site.folder / "runs" / name)
    (node,) = make_inventory().nodes
    keys = (f"ssh-ed25519 {KEY}",)
    node = replace(node, ssh_port=9, host_keys=keys, instance_id=instance_id)
    inventory = replace(
        make_inventory(),
        cluster="mine",
        ssh_user="trainer",
        access=Access(kind="direct"),
        nodes=(node,),
    )
    paths.inventory.write_text(inventory.to_json())
    key = site.folder / "key"
    mirrored = Mirrored(alive=alive, seen_unix=time.time(), ssh_key=str(key), collected=collected)
    write_mirrored(paths, mirrored)
    return paths
