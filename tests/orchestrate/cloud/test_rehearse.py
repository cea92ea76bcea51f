"""`rehearse`: confirmation, budget and page; and everything is removed after any failure."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from payload.config.training_sections import DataSection
from payload.core.errors import INTERRUPTED, ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.gcp.endpoints import VARIABLE
from payload.stack.cluster_identity import known_cluster_identity
from payload.stack.stack_settings import CLUSTER_NAME
from tests.orchestrate.cloud.conftest import Site, inventory_output
from tests.orchestrate.cloud.stacks import Answers, Capture, destroys, words
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE
from tests.support.data_folders import make_data_folder
from tests.support.identities import CLUSTER, cluster_labels
from tests.support.launching import TINY_RUN
from tests.support.waiting import DEADLINE_S, wait_until
from tests.test_architecture import ROOT

NAME = f"rehearsal-{CLUSTER[:8]}"


class KilledError(Exception):
    """Simulates a kill: no code after it runs."""


def kill(*_: Any) -> int:
    raise KilledError


@pytest.fixture
def rehearsal(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a folder with data and config, a Pulumi without a stack, a project with quota."""
    data = make_data_folder(site.folder / "data" / "tiny", vocab_size=512)
    (site.folder / "tiny.toml").write_text(TINY_RUN.format(data=data))
    site.env["PYTHONPATH"] = str(ROOT)
    # Without a name, the rehearsal's cluster has the stack's name.
    site.configure(project=PROJECT, zones=[ZONE], nodeCount="2")
    monkeypatch.setattr(
        "payload.orchestrate.commands.rehearse.new_cluster_identity", lambda: CLUSTER
    )
    site.pulumi.on("stack", "--show-name", out=NAME)
    for command in (
        *(("stack", "init"), ("stack", "rm"), ("config", "set"), ("version",)),
        ("whoami",),
    ):
        site.pulumi.on(*command, out="v3.260.0\n" if command == ("version",) else "")
    site.pulumi.outputs()
    destroys(site)
    for kind, name in (("machineTypes", "c3-highmem-8"), ("diskTypes", "pd-balanced")):
        site.cloud.add(kind, name, place=ZONE, labels={}, guestCpus=8)
    site.cloud.regions[REGION] = {"C3_CPUS": (100.0, 0.0), "SSD_TOTAL_GB": (500.0, 0.0)}
    return site


def argv(site: Site, *more: str) -> list[str]:
    config = str(site.folder / "tiny.toml")
    return ["rehearse", "--project", PROJECT, "--config", config, *more]


@pytest.mark.processes
def test_it_asks_before_it_spends(
    rehearsal: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(argv(rehearsal), rehearsal.env) == ExitCode.USAGE
    question = "Build this cluster for at most $0.88, and destroy it afterwards?"
    assert f"error: {question} No terminal for an answer: repeat with --yes." in (
        capsys.readouterr().err
    )
    monkeypatch.setattr("sys.stdin", Answers("n\n"))
    assert main(argv(rehearsal), rehearsal.env) == ExitCode.OK
    err = capsys.readouterr().err
    assert f"a rehearsal in project {PROJECT}: 2 x c3-standard-4 in us-central1-a" in err
    assert "for at most 120 minutes ($0.88" in err and "nothing was built" in err
    monkeypatch.setattr("sys.stdin", Answers(""))
    assert main(argv(rehearsal), rehearsal.env) == ExitCode.USAGE
    assert f"{question} The input ended without an answer" in capsys.readouterr().err
    assert set(words(rehearsal)) == {"whoami"} and rehearsal.cloud.requests == []


@pytest.mark.processes
def test_pulumi_and_its_login_are_checked_before_the_question(
    rehearsal: Site, capsys: Capture
) -> None:
    message = "error: PULUMI_ACCESS_TOKEN must be set for login during non-interactive CLI sessions"
    rehearsal.pulumi.on("whoami", err=message, status=255)
    assert main(argv(rehearsal), rehearsal.env) == ExitCode.AUTH
    err = capsys.readouterr().err
    assert "Log in: pulumi login" in err and "Build this cluster" not in err
    rehearsal.env["PATH"] = "/nowhere"
    assert main(argv(rehearsal), rehearsal.env) == ExitCode.CONFIG
    err = capsys.readouterr().err
    assert "`pulumi` not found on PATH. Install it" in err and "$" not in err


@pytest.mark.processes
def test_google_s_login_is_checked_before_the_question(rehearsal: Site, capsys: Capture) -> None:
    del rehearsal.env[VARIABLE]
    rehearsal.env |= {"CLOUDSDK_CONFIG": str(rehearsal.folder), "NO_GCE_CHECK": "true"}
    assert main(argv(rehearsal), rehearsal.env) == ExitCode.AUTH
    err = capsys.readouterr().err
    assert "Log in: gcloud auth" in err and "Build this cluster" not in err


@pytest.mark.processes
def test_data_of_a_bucket_is_looked_for_in_the_cache(
    rehearsal: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = rehearsal.folder / "home"
    monkeypatch.setenv("HOME", str(home))
    (rehearsal.folder / "tiny.toml").write_text(TINY_RUN.format(data="gs://b-1/tiny"))
    assert main(argv(rehearsal), rehearsal.env) == ExitCode.CONFIG
    cache = DataSection(dir="gs://b-1/tiny").folder()
    assert cache.is_relative_to(home)
    make_data_folder(cache, vocab_size=512)
    assert main(argv(rehearsal), rehearsal.env) == ExitCode.USAGE


@pytest.mark.parametrize(
    ("more", "code", "line"),
    [
        (("--budget-usd", "0.1"), ExitCode.BUDGET, "a rehearsal needs 45 minutes. Allow $0."),
        (
            ("--budget-usd", "0.4", "--set", "sharedStorage=filestore"),
            ExitCode.BUDGET,
            "a rehearsal needs 45 minutes. Allow $0.60",
        ),
        (("--set", "machineType=c9-x-4"), ExitCode.CONFIG, "no known price for 2 x c9-x-4"),
        (
            ("--set", "cluster=prod"),
            ExitCode.CONFIG,
            "rehearse chooses the name of the cluster. Remove this",
        ),
        (("--set", "project=a"), ExitCode.CONFIG, "choose the project with --project"),
        (("--set", "nothing"), ExitCode.CONFIG, "--set nothing: must be KEY=VALUE"),
        (("--config", "none.toml"), ExitCode.CONFIG, "none.toml"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_before_anything_is_asked(
    rehearsal: Site, capsys: Capture, more: tuple[str, ...], code: ExitCode, line: str
) -> None:
    assert main(argv(rehearsal, "--yes", *more), rehearsal.env) == code
    assert line in capsys.readouterr().err.splitlines()[-1]
    assert words(rehearsal) == []


@pytest.mark.processes
def test_each_rehearsal_has_a_name_of_its_own_and_one_that_was_killed_is_named(
    rehearsal: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(rehearsal.folder)
    monkeypatch.setattr("payload.orchestrate.commands.rehearse._run_rehearsal", kill)
    rehearsal.pulumi.on("stack", "ls", out="[]")
    for _ in range(2):
        with pytest.raises(KilledError):
            main(argv(rehearsal, "--yes"), rehearsal.env)
    one, two = (each.split()[0] for each in words(rehearsal) if "stack init" in each)
    assert one != two
    assert f"{one} stack init --no-select" in words(rehearsal)
    assert f"{one} config set cluster {one}" in words(rehearsal)
    for name in (one, two):
        assert CLUSTER_NAME.fullmatch(name)
        identity = known_cluster_identity(rehearsal.folder, name)
        assert identity is not None and name == f"rehearsal-{identity[:8]}"
    # The second rehearsal's stack was removed by hand.
    listed = [{"name": "dev", "current": True}, {"name": f"organization/tileforge/{one}"}]
    rehearsal.pulumi.on("stack", "ls", out=json.dumps(listed))
    capsys.readouterr()
    assert main(argv(rehearsal), rehearsal.env) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert f"{one} is still active, or was interrupted before its cluster" in err
    assert f"orchestrate down --stack {one}; then: pulumi stack rm {one}" in err
    assert two not in err


class StepHere:
    """Runs a step's command in this process instead of a child process."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], stdout: BinaryIO, **_: object
    ) -> None:
        text = io.TextIOWrapper(stdout, encoding="utf-8", write_through=True)
        with redirect_stdout(text), redirect_stderr(text):
            self._status = main(command[command.index("payload.orchestrate") + 1 :], env)
        text.detach()

    def wait(self, timeout: float | None = None) -> int:
        return self._status


@pytest.mark.processes
@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.seeds)])
def test_what_google_refused_is_on_the_page_and_everything_is_taken_down(
    rehearsal: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    if not apart:
        # Google's client is imported once, not in each step.
        here = SimpleNamespace(**{**vars(subprocess), "Popen": StepHere})
        monkeypatch.setattr("payload.orchestrate.commands.rehearsal_steps.subprocess", here)
    rehearsal.pulumi.replay("preview-new", status=0)
    rehearsal.pulumi.replay("up-quota", status=1)
    settings = ("--set", "machineType=c3-highmem-8", "--budget-usd", "3")
    assert main(argv(rehearsal, "--yes", *settings), rehearsal.env) == ExitCode.QUOTA
    out, err = capsys.readouterr()
    rows = [line.split(" | ")[:2] for line in out.splitlines() if line.startswith("| ")]
    assert rows[1:5] == [
        ["| doctor", "0"],
        ["| up", "11"],
        ["| down, results lost", "0"],
        ["| sweep", "0"],
    ]
    refused = out.partition("## Failed steps")[2]
    assert f"`up --yes --results-may-be-lost --stack {NAME}` failed with exit code 11:" in refused
    assert "quota C3_CPUS is 8 in us-central1, but the cluster needs more" in refused
    # It is ready to send.
    assert PROJECT not in out and str(rehearsal.folder) not in out and str(ROOT) not in out
    assert "Pulumi v3.260.0" in out and "machineType = c3-highmem-8" in out
    assert "| machine dev-node-0 | creating FAILED | " in out
    assert "| listing instances | " in out
    assert (rehearsal.folder / f".cluster/{NAME}/page.md").read_text() == out
    assert "error: step 'up' failed with exit code 11" in err and "destroying the cluster" in err
    assert f"+ down --yes --stack {NAME} --delete-filestore {NAME}-shared --project" in err
    told = words(rehearsal)
    assert told[-1] == f"{NAME} stack rm --yes"
    assert any("destroy --yes" in each for each in told)
    assert f"{NAME} config set maxLifetime 120m" in told


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("hourly_usd", "problem"),
    [
        (99.0, "the cluster costs $99.0 an hour; the estimate was $0."),
        pytest.param(
            None,
            "the cluster's price is unknown, because the output hourly_usd is missing from the "
            "stack; the estimate was",
            marks=pytest.mark.seeds,
        ),
    ],
)
def test_a_cluster_that_costs_too_much_is_taken_down_and_what_stays_is_exit_60(
    rehearsal: Site, capsys: Capture, hourly_usd: float | None, problem: str
) -> None:
    rehearsal.cloud.add_node(f"{NAME}-node-0", labels=cluster_labels(NAME))
    rehearsal.cloud.stuck[f"{NAME}-node-0"] = "it is in use"
    destroys(rehearsal, leaves=(f"{NAME}-node-0",))
    rehearsal.pulumi.on("preview")
    rehearsal.pulumi.on("up", out="done\n")
    rehearsal.pulumi.outputs(
        inventory=inventory_output(NAME, [f"{NAME}-node-0"]),
        hourly_usd=hourly_usd,
        project=PROJECT,
        region=REGION,
    )
    assert main(argv(rehearsal, "--yes"), rehearsal.env) == ExitCode.TEARDOWN
    out, err = capsys.readouterr()
    assert f"It failed: {problem}" in out
    assert "some resources remain. Destroy it: " in err and f"down --stack {NAME};" in err
    assert "| down, results lost | 60 |" in out and "| sweep | 60 |" in out
    assert words(rehearsal)[-1] != f"{NAME} stack rm --yes"


@pytest.mark.slow
@pytest.mark.processes
def test_ctrl_c_takes_everything_down(rehearsal: Site) -> None:
    rehearsal.pulumi.on("preview", takes_s=60)
    process = subprocess.Popen(
        [sys.executable, "-m", "payload.orchestrate", *argv(rehearsal, "--yes")],
        env=rehearsal.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(
            lambda: any("preview" in each for each in words(rehearsal)), what="the preview to begin"
        )
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED
    assert "It failed: interrupted." in out and "| down, results lost | 0 |" in out
    assert json.dumps(words(rehearsal)).count("destroy --yes") == 1
