"""Which checkpoints are valid according to their manifests, and which is the newest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from payload.core.file_hash import sha256_of
from payload.formats.checkpoint_listing import (
    NEEDED_FILES,
    checkpoint_config,
    manifest_problems,
    newest_valid,
)


def make_checkpoint(folder: Path, *, config: str = "") -> Path:
    """Write a folder with a valid manifest of a checkpoint."""
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.safetensors", "config.json"):
        (folder / name).write_bytes(b"weights")
    (folder / "trainer.json").write_text(json.dumps({"config_toml": config}))
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in folder.iterdir()
    }
    (folder / "manifest.json").write_text(json.dumps({"schema_version": 1, "files": files}))
    return folder


def test_the_newest_sound_checkpoint_is_found_behind_damaged_ones(tmp_path: Path) -> None:
    good = make_checkpoint(tmp_path / "step_00000010")
    (make_checkpoint(tmp_path / "step_00000020") / "model.safetensors").write_bytes(b"weightz")
    make_checkpoint(tmp_path / "step_00000030.partial")
    (tmp_path / "step_00000040").write_text("a file")
    passed: list[str] = []
    assert newest_valid(tmp_path, passed_over=lambda folder, _: passed.append(folder.name)) == good
    assert passed == ["step_00000040", "step_00000020"]
    assert newest_valid(tmp_path / "none") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"schema_version": 1, "files": {}}',
        '{"schema_version": 1, "files": {"model.safetensors": {"bytes": "7", "sha256": "x"}}}',
        '{"schema_version": 1, "files": {"../../x": {"bytes": 7, "sha256": "%s"}}}' % ("0" * 64),
        "[" * 20_000,
        '{"schema_version": 1, "files": {"a": {"bytes": ' + "9" * 4400 + "}}}",
        "\ufffe",
    ],
)
def test_a_manifest_that_says_nothing_makes_no_checkpoint_sound(tmp_path: Path, text: str) -> None:
    folder = make_checkpoint(tmp_path / "step_00000010")
    (folder / "manifest.json").write_text(text)
    (problem,) = manifest_problems(folder)
    assert "manifest.json" in problem and "\n" not in problem


@pytest.mark.parametrize("name", ["config.json", *NEEDED_FILES])
def test_a_manifest_that_leaves_out_a_file_makes_no_checkpoint_sound(
    tmp_path: Path, name: str
) -> None:
    folder = make_checkpoint(tmp_path / "step_00000010")
    assert manifest_problems(folder) == []
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"][name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert manifest_problems(folder) == [f"manifest.json: the manifest does not list {name}."]
    assert newest_valid(tmp_path) is None


def test_a_checkpoint_says_what_it_was_trained_by(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "step_00000010", config="[run]\n")
    assert checkpoint_config(folder) == "[run]\n"
    (folder / "trainer.json").write_bytes(b"\xff")
    assert checkpoint_config(folder) is None
