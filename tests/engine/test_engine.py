"""Clusters on the fake `pulumi`; with `make test-engine` on the real engine and provider."""

from __future__ import annotations

import json
import random
import re
import stat

import pytest

from payload.core.errors import INTERRUPTED
from tests.engine.engine import STARTED_LOG, Engine
from tests.engine.variants import VARIANTS
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE, CloudStandIn, Fault
from tests.support.data_folders import make_data_folder
from tests.support.launching import TINY_RUN
from tests.support.sampled import sampled
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
UP = (
    *("orchestrate", "up", "--yes", "--keep-on-failure", "--without-collect"),
    "--results-may-be-lost",
)
NODES = ("dev-node-0", "dev-node-1")
SAMPLE = ("default", "filestore")
"""Variants for `make test-all`."""


@pytest.mark.parametrize("name", sampled(VARIANTS, sample=SAMPLE))
def test_a_variant_comes_up_stays_as_it_is_and_goes(engine: Engine, name: str) -> None:
    settings = VARIANTS[name]
    engine.configure(**{"nodeCount": 3, **settings})
    engine.up()
    assert len(engine.machines()) == settings.get("nodeCount", 3)
    second = engine.pulumi("preview", "--expect-no-changes")
    assert second.returncode == 0, second.stdout
    engine.down()
    assert list(engine.left()) == (["buckets"] if settings.get("bucket") == "create" else [])


def test_pulumi_alone_is_a_whole_workflow_from_a_folder_without_keys(engine: Engine) -> None:
    key = engine.folder / ".cluster/dev/id_ed25519"
    engine.pulumi("preview")
    assert not key.exists()
    engine.up()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    state = engine.pulumi("stack", "export").stdout
    assert "PRIVATE KEY" not in state and key.read_text().splitlines()[1] not in state
    done = engine.pulumi("stack", "output", "inventory", "--json")
    assert [each["name"] for each in json.loads(done.stdout)["nodes"]] == list(NODES)
    assert engine.pulumi("destroy", "--yes").returncode == 0
    assert engine.left() == {}


def test_destroy_leaves_the_bucket_alone_and_nothing_else(engine: Engine) -> None:
    engine.configure(bucket="create")
    engine.up()
    for _ in range(2):
        assert engine.pulumi("destroy", "--yes").returncode == 0
        assert list(engine.left()) == ["buckets"]
    engine.stack("rm", "dev")
    engine.stack("init", "dev")
    engine.configure(bucket="create")
    engine.up()
    (old, new) = engine.left()["buckets"]
    assert old != new and old.startswith("dev-results-")
    done = engine.down()
    assert f"gs://{old}" in done.stderr and f"gs://{new}" in done.stderr


@pytest.mark.parametrize(
    ("settings", "replaced"),
    [
        ({"nodeCount": 3}, ()),
        ({"nodeCount": 1}, ()),
        ({"zones": [f"{REGION}-b"]}, NODES),
        ({"machineType": "c3-standard-8"}, NODES),
        ({"accessMode": "direct", "operatorCidr": "198.51.100.7/32"}, ()),
        ({"accessMode": "oslogin", "osLoginUser": "ada_example_com"}, NODES),
        ({"labels": ["owner=ada"]}, ()),
        ({"mtu": 1460}, NODES),
    ],
)
def test_a_change_replaces_the_machines_that_it_has_to(
    engine: Engine, settings: dict[str, object], replaced: tuple[str, ...]
) -> None:
    engine.up()
    before = engine.machines()
    engine.configure(**settings)
    engine.up()
    after = engine.machines()
    there = [name for name in before if name in after]
    assert len(engine.left()["networks"]) == 1
    assert len(after) == settings.get("nodeCount", 2)
    assert [name for name in there if before[name] != after[name]] == list(replaced)


@pytest.mark.parametrize("name", sampled(NODES, sample=NODES[1:]))
def test_a_preempted_machine_alone_is_made_again(engine: Engine, name: str) -> None:
    engine.up()
    before = engine.machines()
    engine.cloud.drop("instances", name)
    engine.cloud.drop("disks", name)
    engine.up()
    after = engine.machines()
    assert [each for each in NODES if before[each] != after[each]] == [name]


@pytest.mark.parametrize(
    "rule", sampled(("dev-allow-ssh", "dev-allow-nodes"), sample=("dev-allow-ssh",))
)
def test_a_rule_that_was_opened_by_hand_is_closed(engine: Engine, rule: str) -> None:
    engine.up()
    (found,) = [r for r in engine.cloud.items["firewalls", "global"] if r["name"] == rule]
    found["sourceRanges"] = [*found.get("sourceRanges", ()), "0.0.0.0/0"]
    done = engine.orchestrate(*UP[1:])
    assert done.returncode == 0, done.stderr
    (found,) = [r for r in engine.cloud.items["firewalls", "global"] if r["name"] == rule]
    assert "0.0.0.0/0" not in found.get("sourceRanges", ())


def test_a_machine_that_only_a_stop_can_change_back_is_made_again(engine: Engine) -> None:
    engine.up()
    before = engine.machines()
    node = engine.cloud.items["instances", ZONE][1]
    node["shieldedInstanceConfig"]["enableSecureBoot"] = False
    done = engine.orchestrate(*UP[1:])
    assert done.returncode == 0, done.stderr
    after = engine.machines()
    assert [each for each in NODES if before[each] != after[each]] == [node["name"]]


CREATIONS = (
    "global/networks",
    "regions/[^/]+/subnetworks",
    "regions/[^/]+/routers",
    "global/firewalls",
    "regions/[^/]+/resourcePolicies",
    "zones/[^/]+/instances",
    "serviceAccounts",
)


@pytest.mark.parametrize("path", sampled(CREATIONS, sample=CREATIONS[-1:]))
def test_what_was_made_although_the_answer_was_lost_is_made_again(
    engine: Engine, cloud: CloudStandIn, path: str
) -> None:
    lost = Fault(path=f"/{path}(\\?|$)", method="POST", status=503, after=True)
    cloud.faults.append(lost)
    engine.orchestrate(*UP[1:])
    cloud.faults.clear()
    done = engine.orchestrate(*UP[1:])
    assert done.returncode == 0, done.stderr
    assert set(engine.machines()) == set(NODES)
    engine.down()
    assert engine.left() == {}


@pytest.mark.parametrize("seed", sampled(range(20), sample=(0,)))
def test_after_faults_one_down_leaves_nothing(
    engine: Engine, cloud: CloudStandIn, seed: int
) -> None:
    """Inject ten faults: an error or no response, before or after the effect, on any request."""
    dice = random.Random(seed)
    cloud.operation_s = 0.02
    for _ in range(10):
        cloud.faults.append(
            Fault(
                path=dice.choice((*CREATIONS, "operations/", "instances/", "routers/")),
                method=dice.choice(("POST", "POST", "GET", "PATCH", "DELETE")),
                status=dice.choice((0, 403, 409, 429, 500, 502, 503)),
                after=dice.random() < 0.5,
            )
        )
    for words in (UP[1:], ("down", "--yes", "--without-collect")):
        done = engine.orchestrate(*words)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0 or done.stderr.splitlines()[-1].startswith("error: ")
    cloud.faults.clear()
    engine.down()
    assert engine.left() == {}


@pytest.mark.parametrize("seed", sampled(range(20), sample=(0, 1)))
def test_after_a_kill_up_completes_and_down_leaves_nothing(
    engine: Engine, cloud: CloudStandIn, seed: int
) -> None:
    cloud.operation_s = 0.2
    process = engine.start(*UP)
    engine.wait_for_requests(random.Random(seed).randrange(1, 60), process)
    engine.kill(process)
    if seed % 2:
        done = engine.orchestrate(*UP[1:])
        assert done.returncode == 0, done.stderr
        assert set(engine.machines()) == set(NODES)
    engine.down()
    assert engine.left() == {}


@pytest.mark.parametrize("requests", sampled(range(5, 55, 5), sample=(20,)))
@pytest.mark.parametrize("presses", [1, 2])
def test_after_ctrl_c_down_leaves_nothing(
    engine: Engine, cloud: CloudStandIn, presses: int, requests: int
) -> None:
    cloud.operation_s = 0.2
    process = engine.start(*UP)
    engine.wait_for_requests(requests, process)
    for _ in range(presses):
        engine.interrupt(process)
        engine.wait_for_requests(len(cloud.requests) + 2, process)
    code = process.wait(timeout=DEADLINE_S)
    assert code in (INTERRUPTED, 0), (engine.folder / STARTED_LOG).read_text()
    engine.down()
    assert engine.left() == {}


def test_a_rehearsal_that_was_killed_is_named_and_can_be_taken_down(engine: Engine) -> None:
    data = make_data_folder(engine.folder / "data", vocab_size=512)
    (engine.folder / "tiny.toml").write_text(TINY_RUN.format(data=data))
    rehearse = ("rehearse", "--project", PROJECT, "--config", "tiny.toml")
    process = engine.start("orchestrate", *rehearse, "--yes")
    engine.kill_while_it_builds(process)
    assert engine.left() != {}
    assert (
        engine.pulumi("stack", "--show-name").stdout.strip() == "dev"
    )  # the selected stack is unchanged
    asked = engine.orchestrate(*rehearse)
    (name,) = re.findall("(rehearsal-[0-9a-f]{8}) is still active", asked.stderr)
    done = engine.orchestrate("down", "--yes", "--without-collect", "--stack", name)
    assert done.returncode == 0, done.stderr
    assert engine.left() == {}
    assert engine.pulumi("stack", "rm", name, "--yes").returncode == 0


def test_a_lock_of_another_machine_is_named_and_left(engine: Engine) -> None:
    process = engine.start(*UP)
    engine.kill_while_it_builds(process)
    assert engine.locks()
    for path in engine.locks():
        lock = json.loads(path.read_text())
        path.write_text(json.dumps(lock | {"hostname": "elsewhere"}))
    done = engine.orchestrate(*UP[1:])
    assert done.returncode == 10
    last = done.stderr.splitlines()[-1]
    assert "elsewhere" in last and "pulumi cancel --yes" in last
