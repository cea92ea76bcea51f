"""Readers with unknown input: a key, a tensor, another version.

docs/reference/file_formats.md documents each case.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.formats.commands import Commands
from tests.formats.recorded import Recorded, expected, named, read_json
from tests.formats.test_fixtures import require_continued
from tests.support.formats import GOLDEN, read_format

pytestmark = pytest.mark.processes

UNKNOWN = {"a_later_key": {"of": [1, "a later release"]}}
FORMATS = {
    "plan.json": "plan",
    "ranks.json": "ranks",
    "state.json": "state",
    "summary.json": "summary",
    "storage.json": "storage",
    "mirror.json": "mirror",
    "samples.json": "samples",
    "operators.json": "operators",
    "manifest.json": "manifest",
    "trainer.json": "trainer",
    "rank_0000.json": "heartbeat",
    "rank_0001.json": "heartbeat",
    "meta.json": "meta",
    "reference.json": "reference",
    "trial.json": "trial",
    "owner.json": "owner",
}
"""Formats by file name, for all files whose readers ignore unknown keys."""


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Replace the document in a file."""
    path.write_text(json.dumps(edit(read_json(path)), indent=2), encoding="utf-8")
    record_in_manifest(path)


def record_in_manifest(path: Path) -> None:
    """Write the size and hash of a changed file to its checkpoint's manifest."""
    manifest = path.with_name("manifest.json")
    if path == manifest or not manifest.exists():
        return
    content, known = path.read_bytes(), read_json(manifest)
    known["files"][path.name] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    manifest.write_text(json.dumps(known), encoding="utf-8")


def with_unknown_keys(document: Any, *, maps: frozenset[str], path: str = "") -> Any:
    """Return the document with an unknown key in each of its objects, except `maps`."""
    if isinstance(document, dict):
        inner = {
            key: with_unknown_keys(
                value,
                maps=maps,
                path=f"{path}{{}}" if path in maps else f"{path}.{key}".lstrip("."),
            )
            for key, value in document.items()
        }
        return inner if path in maps else inner | UNKNOWN
    if isinstance(document, list):
        return [with_unknown_keys(each, maps=maps, path=f"{path}[]") for each in document]
    return document


def maps_of(name: str) -> frozenset[str]:
    """Return the paths of a format's objects whose keys are data."""
    keys = read_format(GOLDEN / f"{name}.json").keys
    return frozenset(path.partition("{}")[0] for path in keys if "{}" in path)


@pytest.fixture
def later(recorded: Recorded) -> Recorded:
    """The fixtures with unknown keys in every object of every record."""
    for path in sorted(recorded.root.rglob("*.json")):
        if path.name in FORMATS and path.parent.name != "csv":
            maps = maps_of(FORMATS[path.name])
            change(path, partial(with_unknown_keys, maps=maps))
    for path in recorded.root.rglob("metrics.jsonl"):
        lines = [json.loads(line) | UNKNOWN for line in path.read_text("utf-8").splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return recorded


def test_unknown_keys_change_nothing(commands: Commands, later: Recorded) -> None:
    listed = json.loads(commands.do("list", "--json", folder=later.project).out)
    assert len(listed) == 6 and not any(each["damaged"] for each in listed)
    assert json.loads(commands.do("status", "kept", "--json", folder=later.project).out)["store"]
    for name, more in (("lora", ()), ("pairs", ("--set", "model.init=./models/base"))):
        words = ("--run-dir", f"runs/{name}", *named(name), "--set", "train.steps=8", *more)
        commands.do("train", *words, folder=later.project)
        require_continued(later.run_dir(name), name)
    # The stored log-probabilities of the pairs were used.
    assert "a_later_key" in read_json(later.project / "data" / "preference" / "reference.json")
    commands.do("report", "runs/full", "runs/lora", folder=later.project)
    page = (later.project / "report.html").read_text(encoding="utf-8")
    assert read_json(later.run_dir("lora") / "samples.json")["samples"][0]["after"] in page
    assert has_trial(commands, later.project)
    assert commands.do("storage", "list", later.store, folder=later.root).out == "kept\n"


def test_unknown_keys_of_settings_and_inventories_are_refused(
    commands: Commands, recorded: Recorded
) -> None:
    change(recorded.project / "rack.json", lambda document: document | UNKNOWN)
    words = ("plan", "text.toml", "--inventory", "rack.json")
    done = commands.run(*words, folder=recorded.project)
    assert done.status == 10 and "a_later_key" in done.err
    config = recorded.run_dir("lora") / "run.toml"
    config.write_text(config.read_text("utf-8") + "a_later_key = 1\n", encoding="utf-8")
    done = commands.run("train", "--run-dir", "runs/lora", folder=recorded.project)
    assert done.status == 10 and "a_later_key" in done.err


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("full", "model.safetensors"),
        ("full", "optimizer.safetensors"),
        ("lora", "adapter_model.safetensors"),
    ],
)
def test_an_unknown_tensor_is_refused(
    commands: Commands, recorded: Recorded, name: str, file: str
) -> None:
    path = recorded.stored_checkpoint(name) / file
    tensors = load_file(path) | {"a.later.tensor": np.zeros(3, np.float32)}
    save_file(tensors, path, metadata={"format": "pt"})
    record_in_manifest(path)
    last = expected()[name]["last_step"]
    words = ("train", "--run-dir", f"runs/{name}", *named(name), "--set", f"train.steps={last}")
    done = commands.run(*words, folder=recorded.project)
    assert done.status == 10 and "a.later.tensor" in done.err


def next_version(document: Any) -> Any:
    """Return the document with the version of a later release."""
    return document | {"schema_version": 2}


def names_version(text: str, name: str) -> bool:
    """Return True if a message names the file and its version."""
    return re.search(rf"{re.escape(name)}.*schema_version\D+2\b", text) is not None


def has_trial(commands: Commands, project: Path) -> bool:
    """Return True if a plan for the recorded cluster uses its trial."""
    words = ("plan", "text.toml", "--inventory", "rack.json", "--json")
    plan = json.loads(commands.do(*words, folder=project).out)["plan"]
    return plan["arithmetic"]["compute_s"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "ranks", "state", "summary", "inventory"])
def test_another_version_of_a_run_s_record_is_named_and_the_run_resumes_without_it(
    commands: Commands, recorded: Recorded, name: str
) -> None:
    change(recorded.run_dir("lora") / f"{name}.json", next_version)
    shown = json.loads(commands.do("status", "lora", "--json", folder=recorded.project).out)
    (problem,) = shown["damaged"]
    assert names_version(problem, f"{name}.json")
    words = ("train", "--run-dir", "runs/lora", *named("lora"), "--set", "train.steps=8")
    commands.do(*words, folder=recorded.project)
    require_continued(recorded.run_dir("lora"), "lora")


def test_a_resume_skips_a_checkpoint_of_another_version(
    commands: Commands, recorded: Recorded
) -> None:
    words = ("train", "--run-dir", "runs/lora", *named("lora"), "--set", "train.steps=8")
    newest = recorded.stored_checkpoint("lora")
    change(newest / "manifest.json", next_version)
    done = commands.do(*words, folder=recorded.project)
    assert names_version(done.err, newest.name)
    require_continued(recorded.run_dir("lora"), "lora")


@pytest.mark.parametrize("name", ["manifest.json", "trainer.json"])
def test_a_run_with_checkpoints_of_another_version_alone_is_refused(
    commands: Commands, recorded: Recorded, name: str
) -> None:
    run_dir = recorded.run_dir("lora")
    for path in run_dir.glob(f"checkpoints/step_*/{name}"):
        change(path, next_version)
    before = (run_dir / "metrics.jsonl").read_bytes()
    words = ("train", "--run-dir", "runs/lora", *named("lora"), "--set", "train.steps=8")
    done = commands.run(*words, folder=recorded.project)
    assert done.status == 10 and names_version(done.err, name)
    assert (run_dir / "metrics.jsonl").read_bytes() == before


REFUSED = {
    "data/text/meta.json": ("data", "verify", "data/text"),
    "rack.json": ("plan", "text.toml", "--inventory", "rack.json"),
    "runs/far/mirror.json": ("status", "far"),
    "data/preference/reference.json": (
        *("train", "--run-dir", "runs/pairs", *named("pairs"), "--set", "train.steps=8"),
        *("--set", "model.init=./models/base"),
    ),
}


@pytest.mark.parametrize(("name", "words"), REFUSED.items())
def test_another_version_is_refused(
    commands: Commands, recorded: Recorded, name: str, words: tuple[str, ...]
) -> None:
    change(recorded.project / name, next_version)
    done = commands.run(*words, folder=recorded.project)
    assert done.status == 10 and names_version(done.err, name)


def test_another_version_of_an_optional_file_is_ignored(
    commands: Commands, recorded: Recorded
) -> None:
    for path in ("runs/lora/samples.json", "runs/full/profile/operators.json"):
        change(recorded.project / path, next_version)
    change(recorded.project / ".cluster" / "rack" / "trial.json", next_version)
    change(recorded.run_dir("kept") / "storage.json", next_version)
    commands.do("report", "runs/lora", folder=recorded.project)
    page = (recorded.run_dir("lora") / "report.html").read_text(encoding="utf-8")
    assert read_json(recorded.run_dir("lora") / "samples.json")["samples"][0]["after"] not in page
    commands.do("report", "runs/full", folder=recorded.project)
    page = (recorded.run_dir("full") / "report.html").read_text(encoding="utf-8")
    assert "c10d::allreduce_" not in page
    assert not has_trial(commands, recorded.project)
    assert commands.do("status", "kept", folder=recorded.project).out
