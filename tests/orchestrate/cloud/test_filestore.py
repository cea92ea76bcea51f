"""A Filestore instance, which can hold data, is deleted only if its name was typed or given."""

from __future__ import annotations

from functools import partial

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.gcp.filestore_confirmation import may_delete
from payload.orchestrate.clouds.gcp.removal_order import Resource
from payload.orchestrate.clouds.gcp.resource_kinds import FILESTORE as FILESTORE_KIND
from payload.orchestrate.commands.cluster_name_conflict import take_over
from payload.orchestrate.terminal.console import text_console
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.stacks import Answers, Capture, destroys, head_says, own_key, words
from tests.orchestrate.cloud.standin import ZONE, Fault
from tests.orchestrate.cloud.test_failures import DETAILS
from tests.orchestrate.cloud.test_what_stays import FILESTORE, MACHINE, NETWORK, state_has
from tests.support.identities import cluster_labels

pytestmark = pytest.mark.processes
NAMED = ("--delete-filestore", "mine-shared")
LISTING = "/locations/-/instances"


@pytest.fixture
def built(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a cluster with an instance that its state does not list."""
    site.build(nodes=1)
    head_says(monkeypatch)
    destroys(site)
    site.cloud.add_filestore("mine-shared", labels=cluster_labels("mine"), network="mine-network")
    return site


def is_untouched(site: Site) -> bool:
    destroyed = any(each.startswith("destroy") for each in words(site))
    return not destroyed and site.cloud.count("^(DELETE|POST)") == 0


def test_yes_alone_destroys_nothing_while_there_is_one(
    built: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["down", "--yes"], built.env) == ExitCode.USAGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert "This deletes Filestore mine-shared with all data on it. --yes does not confirm" in last
    assert "so nothing was destroyed" in last and last.endswith(f"repeat with {' '.join(NAMED)}")
    assert main(["down", "--dry-run"], built.env) == ExitCode.OK
    said = "every machine, disk and network, Filestore mine-shared with all its data; "
    assert said in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Answers("yes\n"))
    assert main(["down", "--yes"], built.env) == ExitCode.OK
    assert "nothing was destroyed" in capsys.readouterr().err and is_untouched(built)
    monkeypatch.setattr("sys.stdin", Answers("mine-shared\n"))
    assert main(["down", "--yes"], built.env) == ExitCode.OK
    assert built.cloud.filestores == {}


def test_a_script_names_it_and_may_name_one_that_is_gone(built: Site) -> None:
    for _ in range(2):
        assert main(["down", "--yes", *NAMED], built.env) == ExitCode.OK
        assert built.cloud.filestores == {}


def test_where_google_does_not_list_it_the_state_counts(built: Site, capsys: Capture) -> None:
    built.cloud.faults.append(Fault(path=LISTING, status=403, message="not allowed", times=99))
    state_has(built, NETWORK, FILESTORE)
    assert main(["down", "--yes"], built.env) == ExitCode.USAGE
    assert "--delete-filestore mine-shared" in capsys.readouterr().err and is_untouched(built)


def test_one_that_nobody_was_asked_about_is_left_and_named_with_its_price(
    built: Site, capsys: Capture
) -> None:
    """The first listing does not include it."""
    built.cloud.faults.append(Fault(path=LISTING, status=403, message="not allowed", times=1))
    assert main(["down", "--yes"], built.env) == ExitCode.TEARDOWN
    err = capsys.readouterr().err
    assert "remove with: gcloud filestore instances delete mine-shared" in err
    last = err.splitlines()[-1]
    assert "1 resource(s) of cluster mine left" in last and "at least $0.35/h" in last
    assert len(built.cloud.filestores) == 1


def test_another_cluster_is_not_taken_over_with_its_data_by_its_name_alone(
    built: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [Resource(kind=FILESTORE_KIND, name="mine-shared", location=ZONE)]
    for named, typed, is_taken in ((), "mine\nyes\n", False), (NAMED, "mine\n", True):
        monkeypatch.setattr("sys.stdin", Answers(typed))
        may = partial(may_delete, named=named)
        google, talk = built.google(), text_console(stderr=True)
        assert take_over(google, data, cluster="mine", may_delete=may, talk=talk) is is_taken
        assert bool(built.cloud.filestores) is not is_taken


@pytest.mark.parametrize("is_new", [True, False])
def test_an_up_that_fails_takes_back_the_instance_that_it_made_and_no_other(
    built: Site, is_new: bool, capsys: Capture
) -> None:
    if not is_new:
        (found,) = built.cloud.filestores.values()
        found["createTime"] = "2026-11-01T00:00:00Z"
    own_key(built)
    built.pulumi.on("preview")
    built.pulumi.on("up", out=DETAILS, status=255)
    state_has(built, NETWORK, MACHINE)
    state_has(built, NETWORK, looks=2)  # before the preview, and after the confirmation
    wanted = ExitCode.NO_CAPACITY if is_new else ExitCode.TEARDOWN
    assert main(["up", "--yes"], built.env) == wanted, capsys.readouterr().err
    assert len(built.cloud.filestores) == (0 if is_new else 1)
    assert any(each.startswith("destroy") for each in words(built))
