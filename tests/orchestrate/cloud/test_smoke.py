"""The smoke test's logic: its guards, its order, and its cleanup."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from benchmarks.cloud_smoke import Orchestrator, main
from payload.core.errors import ExitCode
from payload.orchestrate import __main__ as orchestrate
from payload.orchestrate.inventories.chosen import load_cluster
from tests.orchestrate.cloud.conftest import KEY, Site
from tests.orchestrate.cloud.stacks import head_says, words
from tests.orchestrate.cloud.standin import PROJECT, ZONE
from tests.orchestrate.cloud.test_failures import DETAILS
from tests.support.data_folders import make_data_folder
from tests.test_architecture import ROOT

pytestmark = pytest.mark.processes

Capture = pytest.CaptureFixture[str]


class Played(Orchestrator):
    """Run the commands in this process, without real machines.

    up, down and sweep are real, and so are finding the cluster and planning the run. Functions that
    need SSH are simulated: a run that makes two steps at each poll, and ends when a node is lost.
    """

    step: int | None = None

    def run(self, *words: str) -> int:
        match words:
            case ("preflight", "--inventory", stack, *job, "--wait", "20"):
                if not load_cluster(stack, env=self.env).inventory.head.host_keys:
                    return ExitCode.HOST_KEY
                return orchestrate.main(("plan", "--inventory", stack, *job), self.env)
            case ("run", *rest) if "--resume" in rest:
                load_cluster(rest[rest.index("--inventory") + 1], env=self.env)
                return 0
            case ("run", *rest):
                self.step = 0
                rest.remove("--detach")
                return orchestrate.main(("plan", *rest), self.env)
            case ("attach", _):
                return ExitCode.RANK_LOST
        return orchestrate.main(words, self.env)

    def read(self, *words: str) -> str:
        assert words[0] == "status" and self.step is not None
        self.step += 2
        return json.dumps({"status": "running", "step": self.step})


@pytest.fixture
def stack(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a stack that builds, repairs with the second `up`, and is removed by `destroy`."""
    head_says(monkeypatch)
    site.configure(cluster="mine", project=PROJECT, zones=[ZONE], maxHourlyUsd="5")
    site.build()
    make_data_folder(site.folder / "data" / "stdlib")
    for word in ("preview", "up", "destroy"):
        site.pulumi.on(word)

    def move(method: str, target: str) -> None:
        told = [call[1] for call in site.pulumi.calls()]
        instances = site.cloud.items["instances", ZONE]
        if "destroy" in told:
            for items in site.cloud.items.values():
                items.clear()
        elif told.count("up") == 2 and len(instances) == 2:
            site.cloud.add_node("mine-2", labels={})
            site.cloud.guest_attributes["mine-2"] = {"ssh-ed25519": KEY}

    site.cloud.before_each = move
    return site


def smoke(site: Site, *arguments: str, answers: str = f"{PROJECT}\n{PROJECT}\n") -> int:
    config = ROOT / "payload" / "configs" / "quickstart.toml"
    return main(
        ["--project", PROJECT, "--config", str(config), *arguments],
        site.env,
        answers=io.StringIO(answers),
        orchestrator=Played(site.env),
        sleep=site.sleeps.append,
    )


def rows(page: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ")
    ][1:]


def test_the_whole_way_ends_with_a_page_and_nothing_left(stack: Site, capfd: Capture) -> None:
    assert smoke(stack) == 0
    out, err = capfd.readouterr()
    assert [(row[0], row[1]) for row in rows(out)] == [
        ("up", "0"),
        ("preflight", "0"),
        ("run", "0"),
        ("10 steps", "0"),
        ("kill mine-2", "0"),
        ("the run notices", "41"),
        ("up again", "0"),
        ("preflight again", "0"),
        ("resume", "0"),
        ("down", "0"),
        ("sweep", "0"),
    ]
    assert "3 x c3-highmem-8 in us-central1-a" in out and "NOT" not in out
    assert "--set batch.global_batch_size=24 " in err  # 8 is not a multiple of 3 x 2 x 4
    assert stack.cloud.count("^DELETE .*/instances/mine-2") == 1
    # The replaced node has new keys, which were read.
    assert "mine-2: the machine was replaced" in err


def test_a_step_that_fails_ends_in_down_all_the_same(stack: Site, capfd: Capture) -> None:
    stack.pulumi.on("up", out=DETAILS, status=255)
    assert smoke(stack) == 1
    out, _ = capfd.readouterr()
    assert [(row[0], row[1], row[3]) for row in rows(out)] == [
        ("up", "12", "NOT as it should"),
        ("down", "0", "as it should"),
        ("sweep", "0", "as it should"),
    ]
    assert "It broke off: step 'up' ended with 12, not 0." in out


def test_a_cluster_over_the_limit_is_taken_down_at_once(stack: Site, capfd: Capture) -> None:
    stack.configure(cluster="mine", project=PROJECT, maxHourlyUsd="1")
    assert smoke(stack, "--max-hourly-usd", "1") == 1
    out, err = capfd.readouterr()
    assert "costs 1.5877 dollars an hour, the limit is 1" in err
    assert [row[0] for row in rows(out)] == ["up", "down", "sweep"]


@pytest.mark.parametrize(
    ("answers", "limit", "project", "status"),
    [
        (f"{PROJECT}\nother\n", "5", PROJECT, ExitCode.USAGE),
        ("y\ny\n", "5", PROJECT, ExitCode.USAGE),
        ("", "5", PROJECT, ExitCode.USAGE),
        (f"{PROJECT}\n{PROJECT}\n", "10", PROJECT, ExitCode.BUDGET),
        (f"{PROJECT}\n{PROJECT}\n", "none", PROJECT, ExitCode.BUDGET),
        (f"{PROJECT}\n{PROJECT}\n", "5", "another", ExitCode.CONFIG),
    ],
)
def test_nothing_is_built_unless_it_is_meant(
    stack: Site, answers: str, limit: str, project: str, status: ExitCode
) -> None:
    stack.configure(cluster="mine", project=project, maxHourlyUsd=limit)
    assert smoke(stack, answers=answers) == status
    assert words(stack) == [] and stack.cloud.requests == []


def test_nothing_is_built_without_the_data(stack: Site, capfd: Capture) -> None:
    (stack.folder / "data" / "stdlib" / "train.bin").unlink()
    assert smoke(stack) == ExitCode.CONFIG
    assert "train.bin, which meta.json lists: No such file" in capfd.readouterr().err
    assert words(stack) == [] and stack.cloud.requests == []


def test_the_orchestrator_is_run_and_read(tmp_path: Path, capfd: Capture) -> None:
    orchestrator = Orchestrator({"PYTHONPATH": str(ROOT)})
    arguments = ("--runs-dir", str(tmp_path))
    assert json.loads(orchestrator.read("list", "--json", *arguments)) == []
    assert orchestrator.run("status", *arguments) == ExitCode.USAGE
    assert "no run in" in capfd.readouterr().err
