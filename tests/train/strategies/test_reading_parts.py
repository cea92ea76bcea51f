"""Each rank of a run with distributed weights reads only its part of the weights' files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.loading import load_on_ranks, write_model, write_state
from payload.core.errors import CheckpointError
from payload.train.checkpoints.checkpoint import optimizer_tensors
from payload.train.models.split import Split, bounds
from payload.train.ranks.world import World
from payload.train.strategies.mesh_loading import read_part
from payload.train.strategies.zero3 import Zero3
from payload.train.tensors.lazy_tensors import LazyTensors, Part, files_identity
from tests.support.launching import losses
from tests.support.sampled import sampled
from tests.train.strategies.cases import READS_PARTS, names
from tests.train.strategies.runs import Runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_tensor_is_read_along_either_dimension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("payload.train.tensors.lazy_tensors._CHUNK_BYTES", 64)
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"other": whole + 1, "it": whole}, tmp_path / "model.safetensors")
    tensors = LazyTensors(tmp_path)
    rows, columns, none = torch.empty(3, 5), torch.empty(7, 2), torch.empty(0, 5)
    both = torch.empty(2, 3)
    tensors.copy_to("it", rows, Part(dim=0, first=4))
    tensors.copy_to("it", columns, Part(dim=1, first=3))
    tensors.copy_to("it", both, Part(dim=0, first=4), Part(dim=1, first=1))
    tensors.copy_to("it", none, Part(dim=0, first=7))
    assert torch.equal(rows, whole[4:].float())
    assert torch.equal(columns, whole[:, 3:].float())
    assert torch.equal(both, whole[4:6, 1:4].float())


def test_files_of_other_weights_have_another_identity(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("same", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"it": torch.full((3,), value)}, tmp_path / name / "model.safetensors")
    one, two = (files_identity(tmp_path / name) for name in ("one", "two"))
    assert one != two
    assert files_identity(tmp_path / "one" / "model.safetensors") == one
    assert files_identity(tmp_path / "nothing") == ""
    # The difference can come before the part of a file that is read.
    (tmp_path / "one" / "manifest.json").write_text("{}")
    assert files_identity(tmp_path / "one") != one


@pytest.mark.parametrize(
    ("shape", "split"),
    [
        ((9, 4), None),
        ((7,), None),
        ((13, 7), Split(dim=0)),
        ((7, 13), Split(dim=1)),
        ((18, 5), Split(dim=0, sections=(1, 1, 1))),
        ((5, 18), Split(dim=1, sections=(1, 1, 1))),
        ((18,), Split(dim=0, sections=(1, 1, 1))),
        ((24, 5), Split(dim=0, sections=(4, 1, 1))),
        ((5, 24), Split(dim=1, sections=(4, 1, 1))),
    ],
)
def test_what_a_rank_reads_of_a_file_is_its_part_of_the_whole_tensor(
    tmp_path: Path, shape: tuple[int, ...], split: Split | None
) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    save_file({"other": whole + 1, "it": whole}, tmp_path / "state.safetensors")
    tensors = LazyTensors(tmp_path / "state.safetensors")
    for size, index, shards, shard in ((1, 0, 3, 2), (2, 1, 1, 0), (2, 0, 2, 1), (3, 2, 8, 7)):
        rows = partial(bounds, index=shard, size=shards)
        read = read_part(tensors, "it", split, index=index, size=size, own_rows=rows)
        part = whole if split is None else split.part(whole, index=index, size=size)
        start, end = rows(len(part))
        assert torch.equal(read, part[start:end])
    for ranks, rank in ((2, 1), (4, 3), (200, 199)):
        zero3 = object.__new__(Zero3)
        zero3.world = cast(World, SimpleNamespace(world_size=ranks, rank=rank))
        assert torch.equal(zero3.read_part(tensors, "it", name=""), zero3.own_part("", whole))


def test_elements_of_a_tensor_are_read_from_any_index_on(tmp_path: Path) -> None:
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    save_file({"other": whole + 1, "it": whole}, tmp_path / "optimizer.safetensors")
    tensors = LazyTensors(tmp_path / "optimizer.safetensors")
    some = torch.empty(9)
    tensors.copy_elements("it", some, first=13)
    tensors.copy_elements("it", torch.empty(0), first=35)
    assert torch.equal(some, whole.flatten()[13:22])


def test_optimizer_state_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"optimizer.*No such file.* Use another checkpoint"):
        optimizer_tensors(tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("name", names(READS_PARTS))
def test_ranks_read_parts_and_train_as_one_rank_does(name: str, runs: Runs) -> None:
    assert "each rank reads its own part" in runs.output(name)
    wanted = losses(runs.alone(name))
    assert losses(runs.folder(name)) == pytest.approx(wanted, rel=1e-6)
    assert len(wanted) == 3


def test_parts_of_sections_come_together_again() -> None:
    whole = torch.arange(30.0).view(15, 2)
    split = Split(0, sections=(3, 1, 1))
    parts = [split.part(whole, index=index, size=2) for index in range(2)]
    assert parts[0][:, 0].tolist() == [0, 2, 4, 6, 8, 18, 20, 24, 26]
    assert tuple(parts[1].shape) == split.part_shape((15, 2), index=1, size=2)
    joined = torch.zeros_like(whole)
    for index, part in enumerate(parts):
        split.put(part, joined, index=index, size=2)
    assert torch.equal(joined, whole)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return weights and AdamW's state, and the bytes of the weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    size = 4 * write_model(folder, params=120e6)
    assert write_state(folder) > 2 * size
    return folder, size


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh",
    sampled(
        ("pipeline2+tensor2", "pipeline2+shard", "tensor2+shard"), sample=("pipeline2+tensor2",)
    ),
)
def test_no_rank_of_a_mesh_has_the_whole_model_or_its_optimizer_state_in_memory(
    checkpoint: tuple[Path, int], mesh: str
) -> None:
    folder, size = checkpoint
    ranks = load_on_ranks(folder, ranks=4, whole=False, mesh=mesh)
    assert ranks is not None and len(ranks) == 4
    assert all(each["peak_bytes"] - each["before_bytes"] < 0.5 * size for each in ranks)
    assert sum(each["state_bytes"] for each in ranks) >= 2 * size
    assert all(each["state_peak_bytes"] - each["before_bytes"] < 1.5 * size for each in ranks)


@pytest.mark.slow
@pytest.mark.ranks
def test_no_rank_has_the_whole_model_in_memory(tmp_path: Path) -> None:
    size = 4 * write_model(tmp_path, params=60e6)
    ranks = load_on_ranks(tmp_path, ranks=4, whole=False)
    assert ranks is not None and len(ranks) == 4
    assert all(each["peak_bytes"] - each["before_bytes"] < 0.5 * size for each in ranks)
    whole = load_on_ranks(tmp_path, ranks=4, whole=True)
    assert whole is not None and whole[0]["peak_bytes"] - whole[0]["before_bytes"] > size
    weights = load_file(tmp_path / "model.safetensors").values()
    total = float(torch.stack([each.double().sum() for each in weights]).sum())
    assert ranks[0]["sum"] == pytest.approx(total, abs=1e-6)
