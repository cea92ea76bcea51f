"""A resumed run's settings send nothing of this machine that no person has named for it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from payload.errors import ConfigError, ExitCode
from payload.inventory import Access
from payload.orchestrate.__main__ import main
from payload.orchestrate.run.sent import note_sent, require_named
from payload.orchestrate.sites.ssh import Ssh
from payload.results import RunPaths
from payload.storage.objects import open_store
from payload.storage.records import fetch_records
from payload.store_address import parse_store_address
from tests.launch.inventories import make_inventory
from tests.orchestrate.test_commands import Workplace
from tests.storage.folders import write_checkpoint
from tests.storage.uploading import upload_all
from tests.support.identities import MINE, write_identity
from tests.support.run_folders import make_run


def words(workplace: Workplace, tmp_path: Path, named: str, *more: str) -> list[str]:
    inventory = replace(make_inventory(num_nodes=2), access=Access(kind="direct"))
    path = tmp_path / "inventory.json"
    path.write_text(inventory.to_json(), encoding="utf-8")
    return [*workplace.arguments("run", "--resume", named, "--inventory", str(path)), *more]


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stop a start where the cluster would be asked; `key` says that it came so far."""
    found: list[str] = []

    def key(_site: Ssh) -> Path:
        found.append("key")
        raise ConfigError("no key")

    monkeypatch.setattr(Ssh, "_key", key)
    return found


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """A store whose run.toml names data of the operator's machine."""
    planted = make_run(
        tmp_path / "node" / "one",
        settings=[
            f"data.dir={Workplace(tmp_path).data}",
            f"storage.results={tmp_path / 'results'}",
            "data.sequence_length=16",
            "model.preset=tiny",
        ],
    )
    write_identity(planted)
    write_checkpoint(planted.checkpoints, 10, seed=1, run=MINE)
    store = open_store(parse_store_address(str(tmp_path / "results" / "one")))
    upload_all(planted, store, is_new=True)
    return str(tmp_path / "results" / "one")


@pytest.mark.processes
@pytest.mark.parametrize("is_here", [False, True])
def test_a_store_has_no_data_sent(
    stored: str,
    is_here: bool,
    tmp_path: Path,
    reached: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attack: whoever may write to the store had any data of this machine sent to the nodes."""
    workplace = Workplace(tmp_path)
    if is_here:
        assert main(workplace.arguments("collect", stored), os.environ) == ExitCode.OK
    named = "one" if is_here else stored
    assert main(words(workplace, tmp_path, named), os.environ) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert f"--set data.dir={workplace.data}" in said and not reached
    again = words(workplace, tmp_path, "one", "--set", f"data.dir={workplace.data}")
    assert main(again, os.environ) == ExitCode.CONFIG
    assert "no key" in capsys.readouterr().err and reached == ["key"]


def test_what_was_named_once_is_known_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "one")
    paths.root.mkdir()
    monkeypatch.chdir(tmp_path)
    note_sent(paths, {"data.dir": "data"})
    note_sent(paths, {"data.dir": "gs://b/data", "model.init": str(tmp_path / "model")})
    for place in ("data", str(tmp_path / "data"), "gs://b/data", "./model"):
        require_named(paths, {"data.dir": place})
    for place in ("data/more", "gs://b/data2", "/", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"nobody has named data\.dir"):
            require_named(paths, {"data.dir": place})
        require_named(paths, {"data.dir": place}, named={"data.dir"})
    with pytest.raises(ConfigError, match=r"nobody has named model\.init"):
        require_named(paths, {"model.init": "\x1b[31m"}, named={"data.dir"})


@pytest.mark.parametrize("content", ["", "{", '{"places": "/"}', '{"places": [1]}', "[]"])
def test_a_damaged_record_allows_nothing(content: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.sent.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="nobody has named"):
        require_named(paths, {"data.dir": "/"})


def test_the_record_never_comes_from_a_store(tmp_path: Path) -> None:
    (tmp_path / "store" / "one").mkdir(parents=True)
    for name in ("sent.json", "run.toml"):
        (tmp_path / "store" / "one" / name).write_text(json.dumps({"places": ["/"]}))
    store = open_store(parse_store_address(str(tmp_path / "store" / "one")))
    assert fetch_records(store, tmp_path / "run") == ["run.toml"]
