"""Short names of meshes, and their settings."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.equality import MESHES
from benchmarks.meshes import mesh_settings
from payload.config.run_config import parse_run_config


@pytest.mark.parametrize(
    ("name", "ranks", "mesh"),
    [
        ("replicate", 2, "replicate 2"),
        ("shard", 4, "shard 4"),
        ("shard2", 4, "replicate 2 x shard 2"),
        ("zero3", 2, "shard 2"),
        ("pipeline2+shard", 4, "pipeline 2 x shard 2"),
        ("pipeline2+tensor2", 4, "pipeline 2 x tensor 2"),
    ],
)
def test_a_name_is_a_mesh(name: str, ranks: int, mesh: str) -> None:
    settings = [f"{key}={value}" for key, value in mesh_settings(name).items()]
    config = parse_run_config("", overrides=settings, where="test")
    assert config.distributed.mesh(ranks).describe() == mesh


@pytest.mark.parametrize("name", ["", "fsdp", "tensor", "replicate2", "shard+", "zero3x"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not replicate, shard"):
        mesh_settings(name)


def test_the_meshes_of_the_equality_table_fit_their_ranks() -> None:
    for ranks, names in MESHES.items():
        for name in names:
            settings = [f"{key}={value}" for key, value in mesh_settings(name).items()]
            config = parse_run_config("", overrides=settings, where="test")
            assert config.distributed.mesh(ranks).world_size == ranks
