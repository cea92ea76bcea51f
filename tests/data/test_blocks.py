"""The data order is a keyed bijection, independent of how the ranks share the work."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from payload.core.errors import DataError
from payload.data.reading.blocks import BlockOrder, TokenBlocks, TokenData
from payload.data.writing.meta import write_meta
from payload.formats.data_folder import IGNORED_TARGET, load_meta
from tests.support.data_folders import make_data_folder
from tests.support.waiting import wait_until


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 64, 65, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1337])
def test_every_epoch_visits_every_block_once(num_blocks: int, seed: int) -> None:
    order = BlockOrder(num_blocks=num_blocks, seed=seed)
    for epoch in range(3):
        samples = np.arange(epoch * num_blocks, (epoch + 1) * num_blocks, dtype=np.int64)
        assert sorted(order.blocks(samples)) == list(range(num_blocks))


def test_every_epoch_and_seed_has_a_different_order() -> None:
    samples = np.arange(1000, dtype=np.int64)
    first = BlockOrder(num_blocks=1000, seed=1).blocks(samples)
    assert not np.array_equal(first, BlockOrder(num_blocks=1000, seed=1).blocks(samples + 1000))
    assert not np.array_equal(first, BlockOrder(num_blocks=1000, seed=2).blocks(samples))
    assert not np.array_equal(first, samples)


def test_seed_and_epoch_are_not_interchangeable() -> None:
    samples = np.arange(100, dtype=np.int64)
    ours = BlockOrder(num_blocks=100, seed=0).blocks(samples + 100)
    assert not np.array_equal(ours, BlockOrder(num_blocks=100, seed=1).blocks(samples))


def test_the_order_is_as_spread_out_as_a_random_one() -> None:
    blocks = BlockOrder(num_blocks=10_000, seed=5).blocks(np.arange(10_000, dtype=np.int64))
    neighbours = np.corrcoef(blocks[:-1], blocks[1:])[0, 1]
    position = np.corrcoef(blocks, np.arange(10_000))[0, 1]
    # Four standard deviations of the correlation of a random permutation, 1 / sqrt(n).
    assert abs(neighbours) < 0.04
    assert abs(position) < 0.04


def test_the_order_is_the_same_in_every_release() -> None:
    """A release that changes the order would silently change the data of a resumed run."""
    blocks = BlockOrder(num_blocks=1000, seed=1337).blocks(np.arange(998, 1004, dtype=np.int64))
    assert blocks.tolist() == [330, 204, 622, 499, 264, 632]


def test_samples_can_be_requested_in_any_grouping() -> None:
    order = BlockOrder(num_blocks=77, seed=3)
    whole = order.blocks(np.arange(200, dtype=np.int64))
    pieces = [order.blocks(np.array([i], dtype=np.int64))[0] for i in range(200)]
    assert whole.tolist() == pieces


def test_every_token_except_the_first_is_predicted_exactly_once(tmp_path: Path) -> None:
    folder = make_data_folder(tmp_path, num_train_tokens=1003, num_val_tokens=103)
    data = TokenData.open(folder, sequence_length=10)
    assert (data.val.num_full_blocks(), data.val.num_blocks()) == (10, 11)
    inputs, targets = data.val.gather(np.arange(11, dtype=np.int64))
    predicted = targets[targets != IGNORED_TARGET]
    assert predicted.tolist() == data.val.tokens[1:].tolist()
    assert inputs[targets != IGNORED_TARGET].tolist() == data.val.tokens[:-1].tolist()


def test_a_token_outside_the_vocabulary_is_named_with_its_file(tmp_path: Path) -> None:
    folder = make_data_folder(tmp_path, vocab_size=512)
    wrong = np.fromfile(folder / "train.bin", dtype=np.uint16)
    wrong[100] = 60_000
    wrong.tofile(folder / "train.bin")
    meta = load_meta(folder)
    # The format of older releases; with hashes of its ranges the file would be damaged.
    files = {
        name: replace(
            file, sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest(), range_sha256=()
        )
        for name, file in meta.files.items()
    }
    write_meta(folder, replace(meta, files=files))
    data = TokenData.open(folder, sequence_length=50)
    with pytest.raises(
        DataError, match=r"train\.bin: token 60000 is outside the vocabulary of 512"
    ):
        data.train.gather(np.arange(5, dtype=np.int64))


def test_a_sequence_longer_than_the_text_is_refused(tmp_path: Path) -> None:
    folder = make_data_folder(tmp_path, num_train_tokens=100)
    with pytest.raises(DataError, match=r"has 100 tokens, fewer than .* = 101"):
        TokenData.open(folder, sequence_length=100)


def _pages_in_memory(blocks: TokenBlocks) -> list[bool]:
    """Return for each page of the file whether it is in memory, without reading it."""
    size = blocks.tokens.nbytes
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    address = ctypes.c_void_p(blocks.tokens.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), found) == 0
    return [bool(page & 1) for page in found]


def test_expected_blocks_are_read_into_memory(tmp_path: Path) -> None:
    folder = make_data_folder(tmp_path / "data", num_train_tokens=4_000_000, vocab_size=512)
    with (folder / "train.bin").open("rb") as file:
        os.fsync(file.fileno())
        # Evicts the pages; on a file system in memory, they always stay.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    train = TokenData.open(folder, sequence_length=mmap.PAGESIZE // 2).train
    train.expect(np.array([600, 1500], dtype=np.int64))

    def are_there() -> bool:
        there = _pages_in_memory(train)
        # Each block is a page, and its last target is on the next page.
        return all(there[page] for page in (600, 601, 1500, 1501))

    wait_until(are_there, what="the blocks in memory")


def test_the_last_block_can_be_expected_too(tmp_path: Path) -> None:
    train = TokenData.open(make_data_folder(tmp_path / "data"), sequence_length=300).train
    train.expect(np.arange(train.num_blocks(), dtype=np.int64))
