"""Which files `model.init` names on this machine, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import cast

import pytest

from payload.core.errors import ConfigError
from payload.orchestrate.machine_profiles.code_and_data_uploads import local_weights
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.files import send_files


def make_folder(folder: Path, *, content: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    (folder / "optimizer.safetensors").write_bytes(b"not needed to begin with")
    return folder


def write_manifest(folder: Path) -> None:
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in folder.iterdir()
    }
    (folder / "manifest.json").write_text(json.dumps({"schema_version": 1, "files": files}))


@pytest.mark.parametrize("init", ["scratch", "gpt2", "openai-community/gpt2"])
def test_a_name_without_a_local_folder_is_left_to_the_nodes(init: str) -> None:
    assert local_weights(init) is None


def test_equal_weights_have_one_name_and_config_json_is_the_last_file(tmp_path: Path) -> None:
    first, second, third = (
        local_weights(str(make_folder(tmp_path / name, content=content)))
        for name, content in (("one", b"a"), ("two", b"a"), ("three", b"b"))
    )
    assert first is not None and second is not None and third is not None
    assert first.digest == second.digest != third.digest
    assert list(first.files) == ["model.safetensors", "config.json"]
    assert first.size_bytes() == 3


def test_a_run_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20):
        folder = make_folder(tmp_path / "checkpoints" / f"step_{step:08}", content=bytes([step]))
        write_manifest(folder)
    found = local_weights(str(tmp_path))
    assert found is not None and found.folder.name == "step_00000020"


def test_the_tokenizer_travels_with_the_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("not part of the model")
    found = local_weights(str(folder))
    assert found is not None
    assert list(found.files) == ["model.safetensors", "tokenizer.json", "config.json"]


def test_weights_in_several_files_come_with_their_index(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    (folder / "part-2.safetensors").write_bytes(b"more")
    index = {"weight_map": {f"h.{i}": f"part-{1 + i % 2}.safetensors" for i in range(4)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = local_weights(str(folder))
    assert found is not None
    parts = ["part-1.safetensors", "part-2.safetensors"]
    assert list(found.files) == [*parts, "model.safetensors.index.json", "config.json"]


def damage(folder: Path) -> None:
    write_manifest(folder)
    (folder / "model.safetensors").write_bytes(b"wEights")


def empty(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def point_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"h.0": "../secret"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def break_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")


def link_outside(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(__file__)


def link_a_tokenizer_outside(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to(__file__)


def put_a_pipe(folder: Path) -> None:
    empty(folder)
    os.mkfifo(folder / "model.safetensors")


def name_a_run_without_checkpoints(folder: Path) -> None:
    (folder / "checkpoints").mkdir()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damage, "is damaged, because it does not match the checkpoint's manifest"),
        (empty, "No such file"),
        (point_outside, "does not name a safetensors file of its folder"),
        (link_outside, "model.safetensors: a link that leads out of its folder"),
        (link_a_tokenizer_outside, "tokenizer.json: a link that leads out of its folder"),
        (put_a_pipe, "Not a regular file"),
        (break_index, "weight_map is missing"),
        (name_a_run_without_checkpoints, "no valid checkpoint"),
    ],
)
def test_weights_that_cannot_be_used_are_refused_before_anything_starts(
    tmp_path: Path, harm: object, words: str
) -> None:
    folder = make_folder(tmp_path / "model")
    assert callable(harm)
    harm(folder)
    with pytest.raises(ConfigError, match=words):
        local_weights(str(folder))


def test_a_path_that_leads_nowhere_is_no_hub_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the folder does not exist"):
        local_weights(str(tmp_path / "absent"))


class LacksAll:
    """A node without any file; nothing can be sent to it."""

    def check_run(self, argv: Sequence[str], *, timeout_s: float) -> bytes:
        return b""

    def run(self, argv: Sequence[str], *, timeout_s: float) -> SimpleNamespace:
        return SimpleNamespace(stdout=b"")


def test_a_link_that_replaces_a_file_is_not_sent(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    found = local_weights(str(folder))
    assert found is not None
    secret = tmp_path / "id_ed25519"
    secret.write_text("a private key")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(secret)
    with pytest.raises(ConfigError, match="so it is not sent"):
        send_files(cast(Connection, LacksAll()), folder, PurePosixPath("/there"), found.files)
