"""Models by their name on the hub, served on a local port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from payload.core.errors import CheckpointError
from payload.formats.hub_names import HubName
from payload.weights.hub import fetch, fetch_config, resolve
from tests.models.fake_model_hub import FIRST, NAME, SECOND, model_hub, use_hub

CONFIG = {"model_type": "llama", "hidden_size": 8}


def write_model(folder: Path, *, value: float = 0.0) -> Path:
    """Write a model's files, and an unneeded one."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    save_file({"weight": torch.full((4,), value)}, folder / "model.safetensors")
    return folder


def write_shards(folder: Path) -> Path:
    """Write a model in two files with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    for tensor, name in names.items():
        save_file({tensor: torch.zeros(3)}, folder / name)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def commits(tmp_path: Path) -> dict[str, Path]:
    return {FIRST: write_model(tmp_path / "first")}


@pytest.fixture
def hub(
    commits: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Path]]:
    with model_hub(commits) as endpoint:
        use_hub(monkeypatch, endpoint=endpoint, cache=cache)
        yield commits


def refusal_of(name: str, *, revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as refused:
        fetch(HubName(name, revision), setting="model.init")
    text = str(refused.value)
    assert "\n" not in text
    assert text.startswith(f"model.init = {str(HubName(name, revision))!r}")
    return text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpt2", HubName("gpt2")),
        ("HuggingFaceTB/SmolLM2-135M", HubName("HuggingFaceTB/SmolLM2-135M")),
        ("a/b@main", HubName("a/b", "main")),
        (f"a/b@{FIRST}", HubName("a/b", FIRST)),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("a/b/c", None),
        ("a/..", None),
        ("a/b@", None),
        ("a/b@-x", None),
        ("/a/b", None),
        ("a b", None),
        ("", None),
    ],
)
def test_a_name_is_parsed_or_is_none(text: str, name: HubName | None) -> None:
    assert HubName.parse(text) == name
    assert name is None or str(name) == text


def test_a_name_without_a_revision_stands_for_one_commit(
    hub: dict[str, Path], tmp_path: Path
) -> None:
    settled = resolve(HubName(NAME), setting="model.init")
    assert settled == HubName(NAME, FIRST)
    hub[SECOND] = write_model(tmp_path / "second", value=1.0)
    assert fetch(settled, setting="model.init").name == FIRST
    assert fetch(HubName(NAME), setting="model.init").name == SECOND


def test_a_download_has_config_tokenizer_and_weights_alone(hub: dict[str, Path]) -> None:
    lines: list[str] = []
    folder = fetch(HubName(NAME), setting="model.init", say=lines.append)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert lines == [f"downloading {NAME}: model.safetensors"]


def test_shards_are_downloaded_with_their_index(hub: dict[str, Path], tmp_path: Path) -> None:
    hub[SECOND] = write_shards(tmp_path / "shards")
    folder = fetch(HubName(NAME), setting="model.init")
    assert len([*folder.glob("model-*.safetensors")]) == 2


def test_of_a_whole_file_and_shards_the_file_is_downloaded(
    hub: dict[str, Path], tmp_path: Path
) -> None:
    hub[SECOND] = write_shards(tmp_path / "both")
    save_file({"weight": torch.zeros(4)}, hub[SECOND] / "model.safetensors")
    folder = fetch(HubName(NAME), setting="model.init")
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]


def test_the_config_comes_without_the_weights(hub: dict[str, Path]) -> None:
    folder = fetch_config(HubName(NAME), setting="model.init")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    folder = fetch(HubName(NAME), setting="--tokenizer", weights=False)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]


def test_what_was_downloaded_serves_without_a_network(
    hub: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch(HubName(NAME), setting="model.init")
    use_hub(monkeypatch, endpoint="http://127.0.0.1:9", cache=cache)
    assert fetch(HubName(NAME), setting="model.init") == first
    assert resolve(HubName(NAME), setting="model.init") == HubName(NAME, FIRST)
    use_hub(monkeypatch, endpoint="http://127.0.0.1:9", cache=cache, offline=True)
    assert fetch(HubName(NAME), setting="model.init") == first
    assert resolve(HubName(NAME), setting="model.init") == HubName(NAME, FIRST)


def test_a_name_that_the_hub_does_not_have_is_refused(hub: dict[str, Path]) -> None:
    assert "not on the Hugging Face hub, or private" in refusal_of("someone/else")
    assert "the model has no revision 'v9'" in refusal_of(NAME, revision="v9")
    assert "Did you mean gpt2?" in refusal_of("gtp2")


def test_a_gated_model_is_refused_with_the_page_of_its_terms(
    commits: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_hub(commits, gated=True) as endpoint:
        use_hub(monkeypatch, endpoint=endpoint, cache=cache)
        text = refusal_of(NAME)
    assert "the model is gated" in text
    assert f"{endpoint}/{NAME}" in text
    assert "hf auth login" in text


def test_a_model_without_safetensors_is_refused_before_it_is_downloaded(
    hub: dict[str, Path], cache: Path, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "second")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hub[SECOND] = folder
    assert "pickle" in refusal_of(NAME)
    (folder / "pytorch_model.bin").rename(folder / "small.Q4_1.gguf")
    assert "GGUF" in refusal_of(NAME)
    (folder / "small.Q4_1.gguf").unlink()
    assert "the model has no model.safetensors" in refusal_of(NAME)
    assert not [*cache.rglob("*.bin")]


def test_no_network_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, endpoint="http://127.0.0.1:9", cache=cache)
    assert "Check the name or the network" in refusal_of(NAME)
    use_hub(monkeypatch, endpoint="http://127.0.0.1:9", cache=cache, offline=True)
    assert "HF_HUB_OFFLINE is set" in refusal_of(NAME)
