"""Headers of safetensors files: whole, sharded, damaged and hostile ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from payload.core.errors import CheckpointError
from payload.formats.hf_folder import INDEX_FILE, WEIGHTS_FILE, weight_files
from payload.formats.tensor_headers import tensor_headers
from payload.orchestrate.machine_profiles.code_and_data_uploads import local_weights

TENSORS = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}


def with_header(entries: object, *, data: bytes = b"") -> bytes:
    """Return a file with any header."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(*, dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def shards(folder: Path) -> Path:
    """Write two files and their index; return the index."""
    names = {}
    for number, (tensor, value) in enumerate(TENSORS.items(), start=1):
        names[tensor] = f"model-0000{number}-of-00002.safetensors"
        save_file({tensor: value}, folder / names[tensor])
    index = folder / INDEX_FILE
    index.write_text(json.dumps({"metadata": {"total_size": 58}, "weight_map": names}))
    return index


def test_a_whole_file_beside_an_index_is_the_model_as_in_transformers(tmp_path: Path) -> None:
    shards(tmp_path)
    save_file({"c": torch.zeros(2)}, tmp_path / WEIGHTS_FILE)
    assert list(tensor_headers(tmp_path)) == ["c"]
    assert weight_files(tmp_path) == (WEIGHTS_FILE,)
    (tmp_path / "config.json").write_text("{}")
    sent = local_weights(str(tmp_path))
    assert sent is not None and sorted(sent.files) == ["config.json", WEIGHTS_FILE]
    (tmp_path / WEIGHTS_FILE).unlink()
    assert sorted(tensor_headers(tmp_path)) == ["a", "b"]
    assert len(weight_files(tmp_path)) == 2


def rewrite(index: Path, **weight_map: str) -> None:
    index.write_text(json.dumps({"weight_map": weight_map}))


def test_a_whole_file_and_shards_have_the_same_tensors(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "shards").mkdir()
    save_file(TENSORS, tmp_path / "whole" / WEIGHTS_FILE)
    shards(tmp_path / "shards")
    for folder in ("whole", "shards"):
        found = tensor_headers(tmp_path / folder)
        assert {name: header.shape for name, header in found.items()} == {"a": (3, 4), "b": (5,)}
        assert [found[name].dtype for name in "ab"] == ["F32", "BF16"]
        for header in found.values():
            with header.path.open("rb") as file:
                file.seek(header.start)
                assert len(file.read(header.num_bytes())) == header.num_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"\x80\x04\x95", "not a safetensors file"),
        ((2**63).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Run `git lfs pull`"),
        (with_header(b"{ "), "not JSON"),
        (with_header(b"[" * 50_000), "nested too deeply"),
        (with_header([1, 2]), "is not a JSON object"),
        (with_header({"t": 3}), "expected an object"),
        (with_header(entry(dtype="PICKLE"), data=bytes(8)), "unknown dtype 'PICKLE'"),
        (with_header(entry(shape=(-2,)), data=bytes(8)), "must be at least 0"),
        (with_header(entry(shape=(2**40, 2**40)), data=bytes(8)), "the header reserves 8"),
        (with_header(entry(shape=(3,)), data=bytes(8)), "needs 12 bytes"),
        (with_header(entry(offsets=(8, 0)), data=bytes(8)), "the header reserves -8"),
        (with_header(entry(), data=bytes(4)), "file is truncated"),
        (with_header(entry(offsets=(2**40, 2**40 + 8)), data=bytes(8)), "file is truncated"),
        (with_header(b'{"t": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}'), "NaN"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        tensor_headers(tmp_path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def repeat(index: Path) -> None:
    """Write a tensor of the first shard into the second one, too, with other values."""
    second = index.with_name("model-00002-of-00002.safetensors")
    save_file({"a": torch.ones(3, 4), "b": TENSORS["b"]}, second)


def repeat_unnamed(index: Path) -> None:
    """Write a tensor that the index does not list into both shards."""
    for path in index.parent.glob("*.safetensors"):
        save_file({**load_file(path), "c": torch.ones(2)}, path)


def test_a_tensor_that_the_index_does_not_name_is_the_models_as_in_transformers(
    tmp_path: Path,
) -> None:
    second = shards(tmp_path).with_name("model-00002-of-00002.safetensors")
    save_file({"b": TENSORS["b"], "lm_head.weight": torch.ones(3, 4)}, second)
    found = tensor_headers(tmp_path)
    assert set(found) == {"a", "b", "lm_head.weight"} and found["lm_head.weight"].path == second


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda index: cut(index.with_name("model-00002-of-00002.safetensors")),
            "file is truncated",
        ),
        (lambda index: index.with_name("model-00001-of-00002.safetensors").unlink(), "is missing"),
        (lambda index: index.unlink(), f"shards but no {INDEX_FILE}"),
        (lambda index: index.write_text("{}"), "weight_map is missing"),
        (lambda index: index.write_text('{"weight_map": {}}'), r"weight_map = \{\}: must list the"),
        (lambda index: index.write_text("["), "not JSON"),
        (lambda index: rewrite(index, a="../model.safetensors"), "does not name a safetensors"),
        (lambda index: rewrite(index, a="/etc/passwd"), "does not name a safetensors file"),
        (lambda index: rewrite(index, a="pytorch_model.bin"), "does not name a safetensors file"),
        (lambda index: rewrite(index, c="model-00001-of-00002.safetensors"), "lacks tensor 'c'"),
        (repeat, "00001-of-00002.* and model-00002-of-00002.safetensors both have 'a'"),
        (repeat_unnamed, "and model-00002-of-00002.safetensors both have 'c'"),
    ],
)
def test_shards_that_contradict_their_index_are_refused(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    damage(shards(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        tensor_headers(tmp_path)


def test_a_link_out_of_the_folder_is_refused_and_one_of_the_hubs_cache_is_not(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file(TENSORS, tmp_path / "elsewhere.safetensors")
    (model / WEIGHTS_FILE).symlink_to("../elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="a link that leads out of its folder"):
        tensor_headers(model)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    save_file(TENSORS, blobs / "abcd")
    (snapshot / WEIGHTS_FILE).symlink_to("../../blobs/abcd")
    assert set(tensor_headers(snapshot)) == set(TENSORS)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_a_pickle_is_never_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError, match=f"a pickle .{name}., which can run code"):
        tensor_headers(tmp_path)


def test_a_folder_without_weights_names_the_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"has no weights .{WEIGHTS_FILE}"):
        tensor_headers(tmp_path)


def test_a_pipe_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:

    os.mkfifo(tmp_path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError):
        tensor_headers(tmp_path)
