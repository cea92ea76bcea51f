"""Each rank of a run whose ranks hold parts reads its own of the weights' files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.architecture_cases import CASES, make_folder
from benchmarks.loading import load_on_ranks, write_model
from payload.train.lazy_tensors import LazyTensors, Part, files_identity
from payload.train.weights import save_hf
from tests.support.launching import losses, train
from tests.train.alone import train_alone
from tests.train.strategies.runs import SIZES, STEPS
from tests.train.test_model import make_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_tensor_is_read_along_either_dimension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("payload.train.lazy_tensors._CHUNK_BYTES", 64)
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
    assert files_identity(tmp_path / "nothing") == ""


@pytest.mark.ranks
def test_a_sharded_run_reads_parts_and_trains_as_one_rank_does(
    tmp_path: Path, tiny_config: Path
) -> None:
    (tmp_path / "base").mkdir()
    save_hf(make_model(n_embd=32, n_head=2, n_layer=2, vocab_size=512), tmp_path / "base")
    settings = (
        *("schedule.warmup_steps=0", "train.steps=3", f"model.init={tmp_path / 'base'}"),
        *(f"model.{name}=none" for name in ("n_layer", "n_head", "n_embd")),
        "batch.global_batch_size=6",
    )
    train_alone(tmp_path / "alone", tiny_config, *settings)
    shard = "distributed.strategy=shard"
    said = train(tmp_path / "three", tiny_config, shard, *settings, num_ranks=3).stderr
    assert "each rank reads its own part" in said
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("family", ["gpt2", "llama, untied, biases"])
@pytest.mark.parametrize(
    "mesh",
    [
        ("distributed.pipeline_parallel=2", "distributed.tensor_parallel=2"),
        ("distributed.pipeline_parallel=2", "distributed.strategy=shard"),
        ("distributed.tensor_parallel=2", "distributed.strategy=shard"),
    ],
    ids=["pipeline x tensor", "pipeline x shard", "tensor x shard"],
)
def test_ranks_of_a_mesh_read_parts_and_train_as_one_rank_does(
    tmp_path: Path, tiny_config: Path, mesh: tuple[str, ...], family: str
) -> None:
    base = tmp_path / "base"
    if family == "gpt2":
        base.mkdir()
        save_hf(make_model(n_embd=32, n_head=2, n_layer=2, vocab_size=513), base)
    else:
        config = {**CASES[family], "vocab_size": 601, "num_key_value_heads": 2}
        make_folder(config, base)
    settings = (*STEPS, *SIZES, "train.steps=3", f"model.init={base}", "batch.micro_batch_size=1")
    train_alone(tmp_path / "alone", tiny_config, *settings)
    said = train(tmp_path / "four", tiny_config, *mesh, *settings, num_ranks=4).stderr
    assert "each rank reads its own part" in said
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", ["pipeline2+tensor2", "pipeline2+shard", "tensor2+shard"])
def test_no_rank_of_a_mesh_has_the_whole_model_in_memory(tmp_path: Path, mesh: str) -> None:
    size = 4 * write_model(tmp_path, params=120e6)
    ranks = load_on_ranks(tmp_path, ranks=4, whole=False, mesh=mesh)
    assert ranks is not None and len(ranks) == 4
    assert all(each["peak_bytes"] - each["before_bytes"] < 0.5 * size for each in ranks)


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
