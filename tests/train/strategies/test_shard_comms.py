"""Memory of sharded ranks' collectives, and the layer on which copies are measured."""

from __future__ import annotations

from dataclasses import replace

import torch

from payload.models.gpt2.spec import PRESETS
from payload.train.strategies.shard_calibration import layer_blocks
from payload.train.strategies.shard_comms import Buffers


def test_a_buffer_is_handed_out_again_once_no_view_of_it_is_left() -> None:
    buffers = Buffers()
    first = buffers.take(1000, torch.float32)
    place, view = first.data_ptr(), first.view(10, 100)[3:]
    second = buffers.take(1000, torch.float32)
    assert second.data_ptr() != place
    del first
    assert buffers.take(1000, torch.float32).data_ptr() != place, "a view is still there"
    del view
    assert buffers.take(1000, torch.float32).data_ptr() == place


def test_no_elements_are_an_empty_tensor() -> None:
    empty = Buffers().take(0, torch.bfloat16)
    assert (len(empty), empty.dtype) == (0, torch.bfloat16)


def test_buffers_of_another_size_or_dtype_keep_their_values() -> None:
    buffers = Buffers()
    whole = buffers.take(6, torch.float32).fill_(1.0)
    half = buffers.take(6, torch.bfloat16).fill_(2.0)
    assert (len(half), half.dtype) == (6, torch.bfloat16)
    assert whole.tolist() == [1.0] * 6 and half.tolist() == [2.0] * 6


def test_the_blocks_of_a_layer_are_its_matrices_scaled_down_where_they_are_many() -> None:
    assert layer_blocks(PRESETS["gpt2"]) == (2304 * 768, 768 * 768, 3072 * 768, 3072 * 768)
    large = replace(PRESETS["gpt2"], n_embd=3072)
    assert 2**25 - 4 <= sum(layer_blocks(large)) <= 2**25
