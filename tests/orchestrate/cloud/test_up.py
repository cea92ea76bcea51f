"""`up`: Pulumi's results, and that no machine is deleted or billed without confirmation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from infra.gcp.labels import mark
from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.commands import results_at_stake
from payload.orchestrate.commands.head_runs import Head
from payload.stack.billed_resources import BILLED_ON
from payload.stack.operator_key_file import make_operator_key
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.fake_pulumi import step
from tests.orchestrate.cloud.stacks import (
    Capture,
    copy_of_run,
    destroys,
    head_says,
    own_key,
    stay,
    words,
)
from tests.orchestrate.cloud.standin import PROJECT
from tests.orchestrate.cloud.test_failures import DETAILS, LOCKED
from tests.support.identities import cluster_labels
from tests.support.waiting import DEADLINE_S, wait_until
from tests.test_architecture import ROOT

pytestmark = pytest.mark.processes


def test_up_shows_the_preview_builds_and_says_what_is_next(site: Site, capsys: Capture) -> None:
    site.build()
    site.pulumi.on("preview", out="     + 14 to create\n  hourly_usd: 1.59\n")
    site.pulumi.on("up", out="     + 14 created\n")
    assert main(["up", "--yes", "--stack", "dev"], site.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert err.index("14 to create") < err.index("14 created")
    assert "cluster mine: 3 node(s), $1.59/h until 2026-11-22 08:00 UTC" in err
    assert f"end of their lifetime; {BILLED_ON}" in err
    assert "--inventory stack:dev" in err
    assert words(site) == ["dev preview", "dev up --yes --skip-preview", "dev stack output --json"]
    # The cluster program reads the public half of the key, so the pair is created before.
    key = site.folder / ".cluster" / "mine" / "id_ed25519"
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.with_name("id_ed25519.pub").read_text().startswith("ssh-ed25519 AAAA")


def test_up_builds_nothing_without_a_yes(site: Site, capsys: Capture) -> None:
    site.pulumi.on("preview", out="+ 14 to create\n")
    assert main(["up", "--dry-run"], site.env) == ExitCode.OK
    assert main(["up"], site.env) == ExitCode.USAGE
    assert "repeat with --yes" in capsys.readouterr().err
    assert words(site) == ["preview", "preview"]


def test_a_failing_preview_builds_nothing(site: Site, capsys: Capture) -> None:
    site.pulumi.on("preview", out="error: maxHourlyUsd = 1 is less than 1.59\n", status=255)
    assert main(["up", "--yes"], site.env) == ExitCode.CONFIG
    assert "error: pulumi preview: maxHourlyUsd = 1" in capsys.readouterr().err
    assert words(site) == ["preview"]


def test_up_without_capacity_is_exit_12_with_the_next_command(site: Site, capsys: Capture) -> None:
    site.pulumi.on("preview")
    site.pulumi.on("up", out=DETAILS, status=255)
    assert main(["up", "--yes", "--keep-on-failure"], site.env) == ExitCode.NO_CAPACITY
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no c3-highmem-8 is free in us-central1-f" in last
    assert "pulumi config set --path 'zones[0]' us-central1-b && " in last
    assert "are kept and billed" in last and "payload.orchestrate down" in last
    assert "config set spot" not in last
    assert ".." not in last
    # An error that ends with a full stop gets no second full stop.
    site.pulumi.on("up", out="error: the machine was refused.\n", status=255, times=1)
    assert main(["up", "--yes", "--keep-on-failure"], site.env) == ExitCode.CONFIG
    last = capsys.readouterr().err.splitlines()[-1]
    assert "pulumi up: the machine was refused. Resources built so far are kept" in last
    # A cluster that had machines before is also kept.
    site.configure(cluster="mine", spot="true", bucket="create")
    site.pulumi.machines("mine-0")
    assert main(["up", "--yes"], site.env) == ExitCode.NO_CAPACITY
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        "To use on-demand machines: pulumi config set spot false. Resources built so far are kept"
        in last
    )
    assert "destroy" not in " ".join(words(site))


@pytest.mark.parametrize(
    ("leaves", "status", "said"),
    [
        ((), ExitCode.NO_CAPACITY, "The new resources were removed"),
        (("mine-1",), ExitCode.TEARDOWN, "Also, some of the new resources were not removed: 2 res"),
    ],
)
def test_a_first_up_that_fails_leaves_nothing_that_is_billed(
    site: Site, capsys: Capture, leaves: tuple[str, ...], status: ExitCode, said: str
) -> None:
    site.pulumi.on("preview")
    site.pulumi.on("up", out=DETAILS, status=255)
    assert main(["up", "--yes"], site.env) == ExitCode.NO_CAPACITY
    assert "No machine was built. Remove the rest" in capsys.readouterr().err
    assert not any(each.startswith("destroy") for each in words(site))
    site.build(nodes=2)
    site.pulumi.machines("mine-0", "mine-1")
    site.pulumi.on("stack", "export", out="{}", times=2)
    destroys(site, leaves=leaves)
    stay(site, *leaves)
    assert main(["up", "--yes"], site.env) == status
    err = capsys.readouterr().err
    last = err.splitlines()[-1]
    assert "built so far: mine-0, mine-1" in err
    assert "no c3-highmem-8 is free in us-central1-f" in last and said in last
    assert ("2/2 sweep: clean" in err) == (not leaves)
    assert words(site)[-1] == "destroy --yes --skip-preview --exclude-protected"


@pytest.mark.parametrize("pulumi_says", LOCKED)
def test_what_somebody_else_builds_meanwhile_is_never_removed(
    site: Site, capsys: Capture, pulumi_says: str
) -> None:
    site.build()
    site.pulumi.on("preview")
    site.pulumi.on("up", err=pulumi_says, status=255)
    site.pulumi.machines("mine-0", "mine-1")
    # They are built during the confirmation, or after pulumi has started.
    for looks, said in (
        (1, "error: the stack was changed by another user, so nothing was built"),
        (2, "error: pulumi up: nothing was done, because another update of the stack is running"),
    ):
        site.pulumi.on("stack", "export", out="{}", times=looks)
        assert main(["up", "--yes"], site.env) == ExitCode.CONFIG
        assert capsys.readouterr().err.splitlines()[-1].startswith(said)
    # And during the confirmation to remove our own `up`'s machines.
    site.pulumi.on("up", out=DETAILS, status=255)
    own = {"resources": [{"urn": "urn:pulumi:d::t::gcp:compute/instance:Instance::a", "id": "7"}]}
    site.pulumi.on("stack", "export", out=json.dumps({"deployment": own}), times=1)
    site.pulumi.on("stack", "export", out="{}", times=2)
    assert main(["up", "--yes"], site.env) == ExitCode.TEARDOWN
    assert (
        "the stack was changed by another user, so nothing was removed" in capsys.readouterr().err
    )
    assert words(site).count("up --yes --skip-preview") == 2
    assert "destroy" not in " ".join(words(site))


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_run_that_begins_while_the_question_waits_is_not_ended(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    site.build()
    site.pulumi.on("preview")
    own_key(site)
    site.pulumi.machines("mine-0", going=["mine-0"])
    heads = [Head(running="two"), Head()]
    monkeypatch.setattr(results_at_stake, "query_head", lambda *_, **__: heads.pop())
    assert main([command, "--yes"], site.env) == ExitCode.CONFIG
    assert "error: run two is active, so nothing was " in capsys.readouterr().err
    assert heads == [] and not {"up", "destroy"} & {each.split()[0] for each in words(site)}


def test_what_an_up_that_failed_has_left_is_seen(site: Site, capsys: Capture) -> None:
    site.pulumi.on("preview")
    site.pulumi.on("up", out="error: Quota 'NETWORKS' exceeded.  Limit: 5.0\n", status=255)
    # Made by hand; its name resembles the cluster's own resource, which has a description.
    site.cloud.add("networks", "mine-network", place="global", labels={})
    assert main(["up", "--dry-run"], site.env) == ExitCode.OK
    assert main(["sweep"], site.env) == ExitCode.USAGE  # no project is known yet
    assert main(["up", "--yes"], site.env) == ExitCode.QUOTA
    assert main(["sweep", "--delete", "--yes"], site.env) == ExitCode.OK
    assert site.cloud.count("^DELETE") == 0
    site.cloud.drop("networks", "mine-network")
    labels = cluster_labels("mine")
    site.cloud.add("networks", "mine-network", place="global", labels={}, description=mark(labels))
    capsys.readouterr()
    assert main(["sweep"], site.env) == ExitCode.TEARDOWN
    assert "networks delete mine-network --project=acme-lab" in capsys.readouterr().err


Sends = Sequence[tuple[Callable[[int, int], None], signal.Signals]]
# A terminal; `timeout`; `kill` and a CI job that was cancelled; a terminal that was closed.
_CTRL_C: Sends = [(os.killpg, signal.SIGINT)]
_TIMEOUT: Sends = [(os.kill, signal.SIGTERM), (os.killpg, signal.SIGTERM)]
_KILL: Sends = [(os.kill, signal.SIGTERM)]
_HANGUP: Sends = [(os.killpg, signal.SIGHUP)]
_UP_SAYS = (
    "up --yes --skip-preview",
    "up was interrupted: 3 machine(s) exist: mine-0, mine-1, mine-2. Resources built so far are "
    "kept and billed",
)
_DOWN_SAYS = (
    "destroy --yes --skip-preview --exclude-protected",
    f" -m payload.orchestrate sweep --cluster mine --project {PROJECT}",
)


@pytest.mark.parametrize(
    ("command", "told", "said", "sends"),
    [
        ("up", *_UP_SAYS, _CTRL_C),
        pytest.param("up", *_UP_SAYS, _TIMEOUT, marks=pytest.mark.slow),
        pytest.param("up", *_UP_SAYS, _HANGUP, marks=pytest.mark.slow),
        pytest.param("down", *_DOWN_SAYS, _CTRL_C, marks=pytest.mark.slow),
        pytest.param("down", *_DOWN_SAYS, _KILL, marks=pytest.mark.slow),
    ],
    ids=["up ctrl-c", "up timeout", "up hangup", "down ctrl-c", "down kill"],
)
def test_an_interrupted_command_waits_for_pulumi_and_says_what_is_billed(
    site: Site, command: str, told: str, said: str, sends: Sends
) -> None:
    site.build()
    site.pulumi.on("preview", out="14 to create\n")
    site.pulumi.on(told.split()[0], takes_s=60.0)
    process = subprocess.Popen(
        # A hangup counts also if the tests were started with nohup.
        [
            *("/usr/bin/env", "--default-signal=HUP", sys.executable, "-m", "payload.orchestrate"),
            *(command, "--yes", "--without-collect"),
        ],
        cwd=site.folder,
        env={**site.env, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        # Like a shell's foreground job: Ctrl-C goes to the process group.
        start_new_session=True,
    )
    wait_until(lambda: told in words(site), what=f"pulumi {told} to begin")
    for send, number in sends:
        send(process.pid, number)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "waiting for pulumi to end" in err and err.splitlines()[-1] == "interrupted"
    assert said in err and "python -m payload.orchestrate down" in err
    # Pulumi's message about the interrupt is in its log, so it has ended.
    (log,) = (site.folder / ".cluster/mine").glob(f"{told.split()[0]}-*.log")
    assert "KeyboardInterrupt" in log.read_text()


def test_up_that_would_end_machines_saves_what_is_on_them(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_operator_key(site.folder / "key")
    own_key(site)
    site.build()
    site.pulumi.on("preview", out="+- 1 to replace\n")
    site.pulumi.on("up")
    copy_of_run(site, "one", alive=True)
    site.pulumi.machines("mine-0", "mine-1", going=["mine-1"])
    assert main(["up", "--yes"], site.env) == ExitCode.CONFIG
    assert "cannot determine if a run is active, so nothing was" in capsys.readouterr().err
    head_says(monkeypatch)
    assert main(["up", "--yes"], site.env) == ExitCode.SSH_UNREACHABLE
    err = capsys.readouterr().err
    assert "this deletes 1 machine(s) with all their data: mine-1" in err
    assert "to collect first: one" in err
    assert "run one could not be collected, so nothing was built" in err
    assert "up --without-collect" in err
    assert words(site) == ["preview", "stack output --json"] * 2
    assert main(["up", "--yes", "--without-collect"], site.env) == ExitCode.OK
    # If no machine is deleted, no results are collected.
    site.pulumi.machines("mine-0", "mine-1")
    capsys.readouterr()
    assert main(["up", "--yes"], site.env) == ExitCode.OK
    assert "this deletes" not in capsys.readouterr().err


def test_another_key_for_machines_that_are_up_is_named(site: Site, capsys: Capture) -> None:
    own_key(site)
    site.pulumi.machines("mine-0")
    urn = "urn:pulumi:dev::tileforge::gcp:compute/instance:Instance::mine-0"
    for diffs, is_said in ((["metadata"], True), (["labels"], False)):
        site.pulumi.on("preview", events=step("update", urn, diffs=diffs))
        assert main(["up", "--dry-run"], site.env) == ExitCode.OK
        assert ("operator keys from their boot" in capsys.readouterr().err) == is_said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("stack export", "output of `pulumi stack export` cannot be parsed"),
        ("preview", "`pulumi preview`: an event of Pulumi's engine: expected an object, got []"),
    ],
)
def test_a_pulumi_that_says_something_else_builds_nothing(
    site: Site, capsys: Capture, command: str, said: str
) -> None:
    own_key(site)
    site.pulumi.machines("mine-0")
    site.pulumi.on("preview")
    site.pulumi.on(*command.split(), out="[]", events="[]\n")
    assert main(["up", "--yes"], site.env) == ExitCode.CONFIG
    assert said in capsys.readouterr().err
