"""Folders in the current folder with the name of a model on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.core.errors import CheckpointError, DataError, TileforgeError, UsageError
from payload.data.detect import DataOptions, detect_data
from payload.data.tokenizers import load_hf_tokenizer
from payload.formats.hub_names import (
    HubName,
    hub_name,
    local_name,
    pinned_name,
    require_one_meaning,
)
from payload.train.models.hf_weights import checkpoint_folder
from payload.weights.source import find_source
from tests.storage.folders import write_checkpoint

COMMIT = "1234567890abcdef1234567890abcdef12345678"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that contains folders with hub names, as the current folder."""
    for name in ("gpt2", "Qwen/Qwen3-4B", f"gpt2@{COMMIT}", "gpt2@main", "runs/first", "data/a"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        (folder / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-4B", "gpt2@main"])
def test_a_folder_of_a_hub_name_is_not_taken_unasked(clone: Path, name: str) -> None:
    use = rf"Use \./{name}, or {name.partition('@')[0]}@COMMIT\."
    wanted = rf" = '{name}' is ambiguous: a local folder, and possibly a hub model\. {use}"
    with pytest.raises(CheckpointError, match=wanted) as refused:
        find_source(name, setting="model.init")
    assert "\n" not in str(refused.value)
    if name != "gpt2":  # `--tokenizer gpt2` is the packaged one
        with pytest.raises(DataError, match=wanted):
            load_hf_tokenizer(name)
    source = find_source(f"./{name}", setting="model.init")
    assert (source.kind, source.folder) == ("folder", Path(name))


def test_a_name_with_its_commit_is_the_hubs(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"gpt2@{COMMIT}"
    assert find_source(name, setting="model.init").kind == "hub"
    asked: list[str] = []

    def download(repository: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append(f"{repository}@{revision}")
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(DataError, match="hub cannot be reached"):
        load_hf_tokenizer(name)
    assert asked == [name]


def test_data_of_a_hub_name_is_not_taken_from_a_folder(clone: Path) -> None:
    with pytest.raises(TileforgeError, match=r"'Qwen/Qwen3-4B' is ambiguous"):
        detect_data(["Qwen/Qwen3-4B"], DataOptions())


@pytest.mark.parametrize("name", ["runs/first", "data/a", "./gpt2", "nothing", "a/b/c", "gpt2/"])
def test_other_names_have_one_meaning(clone: Path, name: str) -> None:
    require_one_meaning(name, setting="x", kind="dataset", error=UsageError)


def test_a_commit_makes_a_name_the_hubs() -> None:
    assert pinned_name(f"a/b@{COMMIT}") == HubName("a/b", COMMIT)
    assert hub_name(f"gpt2@{COMMIT}") == pinned_name(f"gpt2@{COMMIT}")
    assert pinned_name("a/b@main") is None and pinned_name("a/b") is None
    assert pinned_name(f"./a/b@{COMMIT}") is None


def test_a_printed_folder_is_one_that_loads(clone: Path) -> None:
    for name in ("gpt2", "Qwen/Qwen3-4B"):
        assert local_name(Path(name)) == f"./{name}"
        assert find_source(local_name(Path(name)), setting="x").folder == Path(name)
    for name in ("runs/first", "a/b/c", str(clone / "gpt2")):
        assert local_name(Path(name)) == name


def test_a_checkpoint_is_a_run_here_although_it_has_a_hub_name_s_form(
    clone: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a name is still ambiguous as model.init, and for a folder that is not a run."""
    step = write_checkpoint(clone / "exp/first/checkpoints", 3, seed=0)
    (clone / "exp/copy").symlink_to(step)
    for name, found in (("exp/first", step.relative_to(clone)), ("exp/copy", Path("exp/copy"))):
        assert checkpoint_folder(name) == found
        assert f"'{name}': using the local folder {found}, not the hub model" in caplog.text
        with pytest.raises(CheckpointError, match="is ambiguous"):
            find_source(name, setting="model.init")
    with pytest.raises(CheckpointError, match="is ambiguous"):
        checkpoint_folder("Qwen/Qwen3-4B")
