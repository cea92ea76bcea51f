"""`rehearse` from its question to its page, on real sshd nodes: the run trains, a node is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from payload.orchestrate.clouds.gcp.endpoints import VARIABLE
from payload.stack.operator_key_file import operator_key_path
from tests.orchestrate.cloud.fake_pulumi import FakePulumi
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE, CloudStandIn
from tests.orchestrate.cluster.operating import Operator
from tests.orchestrate.cluster.separate import SeparateNodes
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.sshd, pytest.mark.ranks]
_TINY = """\
[model]
preset = "tiny"
n_layer = 1
n_head = 2
n_embd = 16

[data]
dir = "{data}"
sequence_length = 32

[batch]
micro_batch_size = 1
global_batch_size = 5

[precision]
dtype = "fp32"

[launch]
threads_per_rank = 1
"""


def test_a_rehearsal_goes_through_everything_and_leaves_nothing_but_a_page(tmp_path: Path) -> None:
    with SeparateNodes(tmp_path, num_nodes=2) as nodes, CloudStandIn() as cloud:
        operator = Operator(tmp_path, nodes)
        config = tmp_path / "tiny.toml"
        config.write_text(_TINY.format(data=operator.data))
        inventory = json.loads(nodes.inventory.to_json())
        for node in inventory["nodes"]:
            node["zone"] = ZONE
            kind, _, text = node["host_keys"][0].partition(" ")
            cloud.guest_attributes[node["name"]] = {kind: text}
        pulumi = FakePulumi(tmp_path / "stack")
        for words in (("stack", "init"), ("stack", "rm"), ("config", "set"), ("version",)):
            pulumi.on(*words)
        for word in ("whoami", "preview", "up", "destroy"):
            pulumi.on(word)
        settings = {"project": PROJECT, "nodeCount": "2"}
        document = {f"tileforge:{name}": {"value": value} for name, value in settings.items()}
        pulumi.on("config", "--json", out=json.dumps(document))
        pulumi.on("stack", "export", out="{}")
        for kind, name in (("machineTypes", "c3-highmem-8"), ("diskTypes", "pd-balanced")):
            cloud.add(kind, name, place=ZONE, labels={}, guestCpus=8)
        cloud.regions[REGION] = {"C3_CPUS": (100.0, 0.0), "SSD_TOTAL_GB": (500.0, 0.0)}
        name, ups = "", 0

        def prepare() -> None:
            """Leave what `up` makes, once the name is known: the key of the nodes' first boot."""
            key = operator_key_path(tmp_path, cluster=name)
            shutil.copy(nodes.key, key)
            shutil.copy(nodes.key.with_suffix(".pub"), key.with_suffix(".pub"))
            pulumi.on("stack", "--show-name", out=name)
            inventory["cluster"] = name
            pulumi.outputs(inventory=inventory, hourly_usd=0.4, project=PROJECT, region=REGION)

        def engine(method: str, target: str) -> None:
            """Do what Pulumi does to the cloud; the first request after a command sees it."""
            nonlocal name, ups
            if not name:
                made = [str(call[0]) for call in pulumi.calls() if "init" in call]
                if not made:  # the credentials are checked before the stack is made
                    return
                name = made[0]
                prepare()
            told = [str(call[1]) for call in pulumi.calls()]
            if "destroy" in told:
                cloud.items.pop(("instances", ZONE), None)
            elif told.count("up") > ups:
                ups = told.count("up")
                there = {each["name"] for each in cloud.items.get(("instances", ZONE), ())}
                for node in inventory["nodes"]:
                    if node["name"] not in there:
                        labels = {"tileforge-cluster": name}
                        cloud.add_node(node["name"], labels=labels)

        cloud.before_each = engine
        env = {"PATH": f"{pulumi.bin}:{os.environ['PATH']}", VARIABLE: cloud.url}
        words_typed = ("rehearse", "--project", PROJECT, "--config", str(config), "--yes")
        # Ten commands, one after the other: two minutes with two cores.
        code, said = operator.do(*words_typed, env=env, timeout_s=DEADLINE_S)
        assert code == 0, said
        deleted = [each for each in cloud.requests if each.startswith("DELETE")]
        told = [" ".join(str(word) for word in call[1:]) for call in pulumi.calls()]
    rows = [line.split(" | ")[:2] for line in said.splitlines() if line.startswith("| ")]
    assert rows[1:11] == [
        ["| doctor", "0"],
        ["| up", "0"],
        ["| preflight", "0"],
        ["| run of 10 steps", "0"],
        ["| delete node-1", "0"],
        ["| up repairs it", "0"],
        ["| preflight again", "0"],
        ["| resume", "0"],
        ["| down", "0"],
        ["| sweep", "0"],
    ]
    assert len(deleted) == 1 and "/instances/node-1" in deleted[0] and ups == 2
    assert told[-1] == "stack rm --yes"
    # The run resumed, and its newest checkpoint was copied before anything was destroyed.
    summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
    assert (summary["steps"], summary["nodes"], summary["status"]) == (20, 2, "finished")
    page = tmp_path / f".cluster/{name}/page.md"
    assert page.read_text() in said and "Failed steps" not in said
    assert PROJECT not in page.read_text() and "| removing instance node-1 | 2 | " in said
