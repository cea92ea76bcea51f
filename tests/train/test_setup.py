"""A run's checks of its disk and its checkpoints at the start."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from payload.config.run_config import load_run_config, parse_run_config
from payload.core.errors import CheckpointError, ConfigError
from payload.estimates import disk_room
from payload.models.gpt2.spec import Gpt2Spec
from payload.run_record.run_files import RunPaths
from payload.train.models.loading import load
from payload.train.ranks.world import World
from payload.train.setup import Start, find_start, require_disk_space, weights_folder
from payload.train.tasks.registry import open_task
from tests.train.alone import ALONE, train_alone
from tests.train.test_model import SMALL

KEEPS_TWO = parse_run_config("", overrides=["train.keep_checkpoints=2"], where="test")


FREE_BYTES = 10**10


@pytest.fixture
def known_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a disk with constant free space, whatever other programs write."""
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: FREE_BYTES)


def shape_of_a_checkpoint(*, room: float) -> Gpt2Spec:
    """Return a model with weights and moments of `room`; its vocabulary is chosen for that."""
    words = FREE_BYTES / room / 12 / SMALL.n_embd
    return replace(SMALL, vocab_size=int(words))


@pytest.mark.usefixtures("known_disk")
@pytest.mark.parametrize(
    ("there", "room", "refusal"),
    [
        (
            0,
            3.5,
            r"4 more checkpoint.* need .*\. The disk must hold 4 checkpoints.* Free space or lower "
            r"train.keep_checkpoints",
        ),
        (0, 4.5, None),
        (1, 2.5, r"3 more checkpoint\(s\) need .*\. The disk must hold 4 checkpoints"),
        (1, 3.5, None),
        (
            3,
            0.5,
            r"1 more checkpoint\(s\) need .*\. The disk must hold 4 checkpoints.* Free space\.$",
        ),
        (3, 1.5, None),
        (5, 1.5, None),
    ],
)
def test_a_start_needs_room_for_the_checkpoints_that_are_not_there_yet(
    tmp_path: Path, there: int, room: float, refusal: str | None
) -> None:
    paths = RunPaths(tmp_path)
    for step in range(there):
        paths.checkpoint(step + 1).mkdir(parents=True)
    shape = shape_of_a_checkpoint(room=room)
    if refusal is None:
        require_disk_space(KEEPS_TWO, shape, paths=paths)
    else:
        with pytest.raises(ConfigError, match=refusal):
            require_disk_space(KEEPS_TWO, shape, paths=paths)


@pytest.mark.usefixtures("known_disk")
def test_a_run_with_a_store_needs_room_for_the_checkpoint_that_is_uploaded(tmp_path: Path) -> None:
    with_store = ["train.keep_checkpoints=2", f"storage.results={tmp_path / 'store'}"]
    config = parse_run_config("", overrides=with_store, where="test")
    shape = shape_of_a_checkpoint(room=4.5)
    with pytest.raises(
        ConfigError, match=r"5 more checkpoint.* must hold 5 checkpoints.*the one in upload"
    ):
        require_disk_space(config, shape, paths=RunPaths(tmp_path))


def test_what_an_interrupted_write_left_takes_no_room_from_a_resume(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.checkpoint(1).mkdir(parents=True)
    (paths.checkpoints / "step_00000002.partial").mkdir()
    (paths.checkpoints / "step_00000002.partial" / "model.safetensors").write_bytes(b"half of it")
    require_disk_space(KEEPS_TWO, SMALL, paths=paths)
    assert list(paths.checkpoints.iterdir()) == [paths.checkpoint(1)]


def damage(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("ab") as file:
        file.write(b"!")


def test_a_resume_passes_over_what_is_damaged_and_never_begins_at_zero_instead(
    tmp_path: Path, tiny_config: Path, tiny_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_run_config(tiny_config, overrides=["schedule.warmup_steps=0"])
    task = open_task(config)
    paths = RunPaths(tmp_path)

    def start() -> Start:
        return find_start(config, task, paths=paths, world=ALONE)

    assert start().state is None
    train_alone(tmp_path, tiny_config, "train.steps=2", "train.checkpoint_every=1")
    damage(paths.checkpoint(2))
    caplog.clear()
    found = start()
    assert found.state is not None and found.state.step == 1
    assert f"checkpoint {paths.checkpoint(2)} is skipped: model.safetensors: " in caplog.text
    damage(paths.checkpoint(1))
    with pytest.raises(
        CheckpointError, match=r"none of 2 checkpoints is valid. .*_00000002: model.* from scratch"
    ):
        start()


def test_a_run_of_whole_weights_reads_no_base_that_a_checkpoint_names(tmp_path: Path) -> None:
    """The attack: a store's checkpoint was an adapter of a private model, which was trained on."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="an adapter, but the run trains all weights"):
        weights_folder(tmp_path, parse_run_config("", where="test"))


def test_training_alone_writes_through_no_link_either(tmp_path: Path, tiny_config: Path) -> None:
    config, paths = load_run_config(tiny_config), RunPaths(tmp_path / "run")
    (tmp_path / "other").mkdir()
    paths.root.mkdir()
    paths.checkpoints.symlink_to("../other")
    with pytest.raises(ConfigError, match="checkpoints is a link that leads out"):
        find_start(config, open_task(config), paths=paths, world=ALONE)


def test_the_other_ranks_build_a_checked_model_while_rank_0_reads_the_weights(
    tmp_path: Path, tiny_config: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_alone(tmp_path / "run", tiny_config, "train.steps=1")
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(RunPaths(tmp_path / "run").checkpoint(1) / name, folder)
    events: list[str] = []
    broadcast = World.broadcast

    def broadcast_and_note(world: World, value: Any, kind: type) -> Any:
        events.append(f"broadcast {kind.__name__}")
        return broadcast(world, value, kind)

    def load_and_note(folder: Path, **options: Any) -> Any:
        events.append("load")
        return load(folder, **options)

    monkeypatch.setattr(World, "broadcast", broadcast_and_note)
    monkeypatch.setattr("payload.train.setup.load", load_and_note)

    def start(*overrides: str) -> Start:
        config = load_run_config(tiny_config, overrides=[f"model.init={folder}", *overrides])
        return find_start(config, open_task(config), paths=RunPaths(tmp_path / "new"), world=ALONE)

    start()
    assert events[-2:] == ["broadcast str", "load"]
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(raw | {"n_layer": 500}), encoding="utf-8")
    events.clear()
    with pytest.raises(CheckpointError, match="but the weight files have"):
        start("model.n_layer=500")
    assert "broadcast str" not in events
