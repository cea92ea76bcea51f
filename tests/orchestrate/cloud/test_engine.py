"""Replays recorded cases of a real engine: exit code and error line of each."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.gcp.labels import mark
from payload.core.errors import INTERRUPTED, ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.pulumi import locks
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.events import parse_event
from payload.orchestrate.clouds.pulumi.operation_runner import Operations
from payload.orchestrate.clouds.pulumi.progress import Progress
from payload.orchestrate.terminal.console import text_console
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.fake_pulumi import ENGINE
from tests.orchestrate.cloud.stacks import Capture, head_says, own_key, words
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE
from tests.support.identities import cluster_labels

pytestmark = pytest.mark.processes

NODES = ("dev-node-0", "dev-node-1")
LABELS = cluster_labels("dev", expires=1795408579)
NETWORK = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/global/networks/dev-network"
ACCOUNT = f"dev-nodes@{PROJECT}.iam.gserviceaccount.com"
BETWEEN = [
    {"IPProtocol": "tcp", "ports": ["22", "20000-31999", "32768-60999"]},
    {"IPProtocol": "icmp"},
]
WEB = [{"IPProtocol": "tcp", "ports": ["80", "443"]}]


@pytest.fixture
def dev(site: Site) -> Site:
    """Return the site of the recorded cluster, with its outputs and the program's firewall."""
    site.build(cluster="dev", nodes=2)
    site.cloud.items.clear()
    site.configure(cluster="dev", project=PROJECT, zones=[ZONE])
    site.pulumi.machines()
    site.pulumi.replay("preview-new", status=0)
    build_firewall(site)
    return site


def build_firewall(site: Site) -> None:
    """Create the missing rules, as the recorded program does."""
    nodes = {"targetServiceAccounts": [ACCOUNT]}
    between = {"allowed": BETWEEN}
    everywhere = {"destinationRanges": ["0.0.0.0/0"]}
    ssh = {"allowed": [{"IPProtocol": "tcp", "ports": ["22"]}]}
    rules = {
        "allow-ssh": {"sourceRanges": ["35.235.240.0/20"], **ssh, **nodes},
        "allow-nodes": {"sourceServiceAccounts": [ACCOUNT], **between, **nodes},
        "egress-web": {**everywhere, "allowed": WEB, **nodes},
        "egress-nodes": {"destinationRanges": ["10.60.0.0/24"], **between, **nodes},
        "deny-egress": {**everywhere, "denied": [{"IPProtocol": "all"}], "priority": 65534},
    }
    there = {each["name"] for each in site.cloud.items.get(("firewalls", "global"), ())}
    for name, rule in rules.items():
        if f"dev-{name}" not in there:
            values = {
                "direction": "EGRESS" if "egress" in name else "INGRESS",
                "priority": 1000,
                "network": NETWORK,
                "description": mark(LABELS),
                **rule,
            }
            site.cloud.add("firewalls", f"dev-{name}", place="global", labels={}, **values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "status", "code", "line"),
    [
        (
            "up-stockout",
            1,
            ExitCode.NO_CAPACITY,
            "no machine of this type is free in us-central1-a",
        ),
        (
            "up-quota",
            1,
            ExitCode.QUOTA,
            "quota C3_CPUS is 8 in us-central1, but the cluster",
        ),
        ("up-forbidden", 1, ExitCode.QUOTA, "machine dev-node-1: Error creating instance: googlea"),
        ("up-answer-lost", 1, ExitCode.CONFIG, "network dev-network: Error creating Network: go"),
        ("up-exists", 1, ExitCode.CONFIG, "network dev-network: Error creating Network: googlea"),
        (
            "up-killed",
            -9,
            ExitCode.CONFIG,
            "killed by signal 9; resources whose creation had begun can exist",
        ),
        (
            "up-locked",
            1,
            ExitCode.CONFIG,
            "nothing was done, because another update of the stack is running",
        ),
        ("up-pending", 1, ExitCode.CONFIG, "subnetwork dev-subnet: Error creating Subnetwork: go"),
        ("up-no-connection", 1, ExitCode.PREFLIGHT, "network dev-network: Error when reading or"),
        ("up-wrong-passphrase", 255, ExitCode.AUTH, "Set PULUMI_CONFIG_PASSPHRASE or PULUMI_CON"),
        ("preview-no-credentials", 1, ExitCode.AUTH, "gcloud auth application-default login"),
        ("preview-policy-broken", 1, ExitCode.CONFIG, "policy flow-logs: the subnet's flows are"),
        ("preview-bad-config", 1, ExitCode.CONFIG, "tileforge:project = '' is no Google Cloud pr"),
    ],
)
def test_a_failure_is_one_line_with_its_own_exit_code(
    dev: Site,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    status: int,
    code: ExitCode,
    line: str,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "desk")
    dev.cloud.items.clear()
    dev.pulumi.replay(case, status=status)
    assert main(["up", "--yes", "--keep-on-failure"], dev.env) == code
    err = capsys.readouterr().err
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and line in last
    assert "1 error occurred" not in err and "Traceback" not in err
    # All other output is in the named log file.
    (log,) = (dev.folder / ".cluster/dev").glob(f"{case.partition('-')[0]}-*.log")
    assert f"failed; log: {log}" in err
    recorded = [ENGINE / f"{case}.{kind}.txt" for kind in ("stdout", "stderr")]
    assert log.read_text() == "".join(path.read_text() for path in recorded if path.exists())


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("up-success", "machine dev-node-1: created (0 s)"),
        ("up-unchanged", "pulumi up: nothing changed"),
        ("up-replace-lost-node", "machine dev-node-1: created (0 s)"),
        ("up-replace-lost-node", "pulumi up: 1 create, 18 unchanged"),
    ],
)
def test_an_up_that_succeeds_says_what_it_did(
    dev: Site, capsys: Capture, case: str, line: str
) -> None:
    dev.pulumi.replay(case, status=0)
    assert main(["up", "--yes"], dev.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert line in err.splitlines() and "cluster dev: 2 node(s), $1.59/h" in err
    # The cluster program's messages are printed.
    assert "cost of 2 x c3-highmem-8 on demand in us-central1-a: $1.0937 an hour" in err


@pytest.mark.parametrize(
    ("case", "lines"),
    [
        ("preview-new", ["pulumi preview: 19 create, 0 unchanged"]),
        (
            "preview-replace",
            [
                "pulumi preview: 2 replace, 17 unchanged",
                "this deletes 2 machine(s) with all their data: dev-node-0, dev-node-1",
            ],
        ),
        ("preview-policy", ["policy os-login (advisory): who may log in is decided by OS Login"]),
    ],
)
def test_a_preview_says_what_it_plans(
    dev: Site, capsys: Capture, case: str, lines: list[str]
) -> None:
    dev.pulumi.machines(*NODES)
    dev.pulumi.replay(case, status=0)
    own_key(dev, "dev")
    assert main(["up", "--dry-run", "--without-collect"], dev.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert all(line in err for line in lines)


def test_an_interrupted_up_says_what_is_there_and_what_it_costs(dev: Site, capsys: Capture) -> None:
    dev.pulumi.replay("up-interrupted", status=1)
    dev.pulumi.on("stack", "export", out="{}", times=2)
    dev.pulumi.machines(*NODES)
    dev.pulumi.on("stack", "export", out="{}", times=2)
    dev.pulumi.replay("preview-new", status=0)
    assert main(["up", "--yes"], dev.env) == INTERRUPTED
    err = capsys.readouterr().err
    assert "up was interrupted: 2 machine(s) exist, $1.09/h: dev-node-0, dev-node-1. " in err
    assert "payload.orchestrate down" in err and err.splitlines()[-1] == "interrupted"


def add_orphans(site: Site) -> None:
    """Add the resources that the recorded kill left in Google Cloud."""
    more: dict[str, Any] = {"labels": {}, "network": NETWORK, "description": mark(LABELS)}
    site.cloud.add("subnetworks", "dev-subnet", place=REGION, **more)
    site.cloud.add("routers", "dev-router", place=REGION, **more)


def test_what_a_kill_left_outside_the_state_is_removed_and_built_again(
    dev: Site, capsys: Capture
) -> None:
    add_orphans(dev)
    # Another user's resource in the same project, of almost the same name.
    dev.cloud.add("routers", "dev-router-2", place=REGION, labels={}, network=NETWORK)
    dev.pulumi.machines(*NODES)
    dev.pulumi.replay("preview-new", status=0)
    dev.pulumi.replay("up-success", status=0)
    dev.pulumi.replay("up-pending", status=1, times=1)
    dev.cloud.before_each = lambda method, target: (
        build_firewall(dev) if words(dev).count("up --yes --skip-preview") == 2 else None
    )
    own_key(dev, "dev")
    assert main(["up", "--yes", "--without-collect"], dev.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert "with the identity of dev, but not in the stack: router dev-router, firewall rule" in err
    assert dev.cloud.count("^DELETE .*/subnetworks/dev-subnet") == 1
    assert dev.cloud.count("^DELETE .*/dev-router-2") == 0
    assert words(dev).count("up --yes --skip-preview") == 2


def test_a_refresh_names_the_machine_that_is_gone(dev: Site, capsys: Capture) -> None:
    """A preempted machine, found by the refresh before every operation."""
    dev.pulumi.replay("refresh-lost-node", status=0)
    operations = Operations(
        pulumi=Pulumi(dev.env, folder=dev.folder),
        cluster="dev",
        folder=dev.folder,
        talk=text_console(stderr=True),
        assume_yes=True,
    )
    assert operations.run("refresh", "--yes", "--skip-preview").status == 0
    lines = capsys.readouterr().err.splitlines()
    assert "machine dev-node-1: gone from Google Cloud" in lines
    assert lines[-1] == "pulumi refresh: 1 delete, 18 unchanged"


def test_the_recorded_outputs_are_the_cluster_whose_machines_are_gone(
    dev: Site, capsys: Capture
) -> None:
    """`pulumi stack output --json` lists machines that no longer exist."""
    outputs = (ENGINE / "stack-output.stdout.txt").read_text()
    dev.pulumi.on("stack", "output", "--json", out=outputs)
    assert main(["plan", "--inventory", "stack"], dev.env) == ExitCode.RANK_LOST
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: cluster dev: all 2 machine(s) are gone")
    dev.cloud.items.clear()
    dev.pulumi.replay("destroy-empty", status=0)
    assert main(["down", "--yes"], dev.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert "dev-node-0: the machine no longer exists" in err
    assert "3/3 sweep: clean" in err


def test_a_destroy_that_failed_at_its_last_step_is_repeated_once(
    dev: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All resources are gone, but the stack's state still lists them."""
    head_says(monkeypatch)
    dev.cloud.items.clear()
    dev.pulumi.replay("destroy-success", status=0)
    dev.pulumi.replay("destroy-failed", status=1, times=1)
    assert main(["down", "--yes"], dev.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert err.index("2/3 destroy: FAILED") < err.index("3/3 sweep: clean")


def test_every_recorded_case_is_replayed() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    cases = {path.name.partition(".")[0] for path in ENGINE.iterdir()} - {"README"}
    assert len(cases) == 32
    assert [case for case in sorted(cases) if f'"{case}' not in source] == []


@pytest.mark.parametrize("is_stale", [True, False])
def test_the_lock_of_a_dead_process_is_removed_and_no_other(
    dev: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch, is_stale: bool
) -> None:
    dev.pulumi.replay("up-success", status=0)
    dev.pulumi.replay("up-locked", status=1, times=1)
    dev.pulumi.replay("cancel", status=0)
    # The recorded machine is named vm; it booted after the lock was created, or has another name.
    monkeypatch.setattr(socket, "gethostname", lambda: "vm" if is_stale else "desk")
    monkeypatch.setattr(locks, "_boot_unix", lambda: 1e10)
    code = main(["up", "--yes"], dev.env)
    err = capsys.readouterr().err
    assert "root@vm (process 12143) since 2026-11-22T16:38:55Z" in err
    assert ("cancel --yes" in words(dev)) == is_stale
    if is_stale:
        assert code == ExitCode.OK and "that process no longer exists" in err
    else:
        assert code == ExitCode.CONFIG and "pulumi cancel --yes" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("case", "status", "code", "line"),
    [
        ("destroy-success", 0, ExitCode.OK, "3/3 sweep: clean"),
        ("destroy-empty", 0, ExitCode.OK, "pulumi destroy: nothing changed"),
        ("destroy-exclude-protected", 0, ExitCode.OK, "3/3 sweep: clean"),
        ("destroy-failed", 1, ExitCode.TEARDOWN, "machine dev-node-1: Internal error. Please try"),
        ("destroy-protected", 1, ExitCode.TEARDOWN, "bucket dev-results: it cannot be deleted be"),
        ("destroy-pending", 1, ExitCode.TEARDOWN, "network dev-network: Error when reading or ed"),
    ],
)
def test_down_ends_with_what_it_found(
    dev: Site,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    status: int,
    code: ExitCode,
    line: str,
) -> None:
    head_says(monkeypatch)
    dev.cloud.items.clear()
    dev.pulumi.replay(case, status=status)
    assert main(["down", "--yes"], dev.env) == code
    err = capsys.readouterr().err
    assert line in err and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ") == (code != ExitCode.OK)


def test_down_removes_what_the_stack_never_knew(
    dev: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_says(monkeypatch)
    add_orphans(dev)
    dev.cloud.add("networks", "dev-network", place="global", labels={}, description=mark(LABELS))
    dev.pulumi.replay("destroy-success", status=0)
    dev.pulumi.replay("destroy-pending", status=1, times=1)
    assert main(["down", "--yes"], dev.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert "leftovers of cluster dev: router dev-router, firewall rule dev-allow-nodes" in err
    assert err.index("2/3 destroy: FAILED") < err.index("3/3 sweep: clean")
    assert not any(dev.cloud.items.values())


@pytest.mark.parametrize("case", ["up-drift-firewall", "up-drift-nodes"])
@pytest.mark.parametrize("closes", [True, False])
def test_a_rule_that_was_opened_by_hand_is_replaced_or_up_fails(
    dev: Site, capsys: Capture, case: str, closes: bool
) -> None:
    name = "dev-allow-ssh" if case == "up-drift-firewall" else "dev-allow-nodes"

    def opened() -> None:
        (rule,) = [r for r in dev.cloud.items["firewalls", "global"] if r["name"] == name]
        rule["sourceRanges"] = [*rule.get("sourceRanges", ()), "0.0.0.0/0"]

    def engine(method: str, target: str) -> None:
        # The second `up` creates the removed rules.
        if words(dev).count("up --yes --skip-preview") == 2:
            there = {r["name"] for r in dev.cloud.items["firewalls", "global"]}
            build_firewall(dev)
            if not closes and name not in there:
                opened()

    opened()
    dev.cloud.add("firewalls", "by-hand", place="global", labels={}, network=NETWORK)
    dev.cloud.add("firewalls", "elsewhere", place="global", labels={}, network="x/networks/other")
    dev.cloud.before_each = engine
    dev.pulumi.replay(case, status=0)
    code = main(["up", "--yes"], dev.env)
    err = capsys.readouterr().err
    assert f"firewall rule {name} differs from the cluster program's rule: sources 0.0.0.0/0" in err
    assert dev.cloud.count(f"^DELETE .*/firewalls/{name}$") == 1
    assert dev.cloud.count("^DELETE ") == 1
    assert (
        "warning: firewall rule by-hand in dev-network was not created by the cluster program"
        in err
    )
    assert "elsewhere" not in err
    assert code == (ExitCode.OK if closes else ExitCode.PREFLIGHT)
    if not closes:
        assert f"firewall of dev-network: {name}: sources 0.0.0.0/0" in err.splitlines()[-1]


def rules_up(site: Site) -> None:
    """Set the stack's state to the resources of the recorded cluster."""
    steps = map(json.loads, (ENGINE / "up-unchanged.events.jsonl").read_text().splitlines())
    found = [each["resourcePreEvent"]["metadata"] for each in steps if "resourcePreEvent" in each]
    resources = [
        {"urn": each["urn"], "id": each["new"]["id"], "inputs": each["new"].get("inputs")}
        for each in found
        if each["op"] == "same"
    ]
    state = {"version": 3, "deployment": {"resources": resources}}
    site.pulumi.on("stack", "export", out=json.dumps(state))


def test_doctor_names_rules_that_differ_and_rules_that_are_not_the_programs(
    dev: Site, capsys: Capture
) -> None:
    rules_up(dev)
    assert main(["doctor"], dev.env) != ExitCode.PREFLIGHT
    out = capsys.readouterr().out
    assert re.search("firewall of dev-network +ok +5 rules equal to the cluster program's", out)
    # As in the recorded runs, after a successful `up`.
    for name in ("dev-allow-ssh", "dev-allow-nodes"):
        (rule,) = [each for each in dev.cloud.items["firewalls", "global"] if each["name"] == name]
        rule["sourceRanges"] = [*rule.get("sourceRanges", ()), "0.0.0.0/0"]
    dev.cloud.drop("firewalls", "dev-deny-egress")
    dev.cloud.add("firewalls", "by-hand", place="global", labels={}, network=NETWORK)
    dev.cloud.add("firewalls", "elsewhere", place="global", labels={}, network="x/networks/other")
    dev.cloud.regions[REGION] = {"C3_CPUS": (100.0, 0.0)}
    for kind, name in (("machineTypes", "c3-highmem-8"), ("diskTypes", "pd-balanced")):
        dev.cloud.add(kind, name, place=ZONE, labels={}, guestCpus=8)
    assert main(["doctor"], dev.env) == ExitCode.PREFLIGHT
    out = capsys.readouterr().out
    for name, how in {
        "dev-allow-ssh": "sources 0.0.0.0/0, 35.235.240.0/20 instead of 35.235.240.0/20",
        "dev-allow-nodes": "sources 0.0.0.0/0 instead of none",
        "dev-deny-egress": "it is missing",
    }.items():
        found = f"differs from the cluster program's rule: {how}. Replace it:"
        assert f"error: firewall rule {name}: {found}" in out
    assert (
        "warning: firewall rule by-hand: in dev-network, but not created by the cluster program"
        in out
    )
    assert "elsewhere" not in out
    assert dev.cloud.count("^DELETE") == 0
    # Another project than the stack's has a different firewall.
    main(["doctor", "--project", "other-project"], dev.env)
    assert "firewall" not in capsys.readouterr().out


def test_a_machine_that_only_a_stop_can_bring_back_is_built_again(
    dev: Site, capsys: Capture
) -> None:
    dev.pulumi.machines(*NODES)
    dev.pulumi.replay("preview-new", status=0)
    dev.pulumi.replay("up-unchanged", status=0)
    dev.pulumi.replay("up-drift-stopped", status=1, times=1)
    own_key(dev, "dev")
    assert main(["up", "--yes", "--without-collect"], dev.env) == ExitCode.OK
    err = capsys.readouterr().err
    what = "machine dev-node-1: shieldedInstanceConfig.enableSecureBoot was changed outside Pulumi"
    assert what in err
    assert "this deletes 1 machine(s) with all their data: dev-node-1" in err
    (replaced,) = [each for each in words(dev) if "--replace" in each]
    assert replaced.endswith("gcp:compute/instance:Instance::dev-node-1")
    # Only once: a second refusal is an error.
    dev.pulumi.replay("up-drift-stopped", status=1)
    assert main(["up", "--yes", "--without-collect"], dev.env) == ExitCode.CONFIG
    assert "only a stopped machine can be changed back" in capsys.readouterr().err


def test_machines_never_end_for_want_of_the_operators_key(dev: Site, capsys: Capture) -> None:
    dev.pulumi.machines(*NODES)
    assert main(["up", "--yes"], dev.env) == ExitCode.CONFIG
    last = capsys.readouterr().err.splitlines()[-1]
    assert "missing, but the 2 machine(s) of cluster dev accept no other key" in last
    assert words(dev) == []


def test_the_live_table_has_resource_state_and_seconds() -> None:
    clock: Callable[[], float] = iter(range(1000)).__next__
    progress = Progress("pulumi up", clock=clock)
    for line in (ENGINE / "up-quota.events.jsonl").read_bytes().splitlines():
        progress.handle(parse_event(line))
    table = progress.table()
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["machine", "machine", "pulumi up"]
    assert columns[1][:2] == ["dev-node-1", "dev-node-0"]
    assert columns[2] == ["creating FAILED", "creating FAILED", "running"]
    assert all(str(cell).isdigit() for cell in columns[3])
