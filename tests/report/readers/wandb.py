"""Print the contents of wandb's offline file."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_HEADER, _BLOCK, _FULL, _LAST = 7, 32_768, 1, 4


def records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log, the format of wandb's file after its header."""
    place, record = _HEADER, b""
    while place < len(content):
        if _BLOCK - place % _BLOCK < _HEADER:
            place += _BLOCK - place % _BLOCK  # The rest of the block is shorter than a header.
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        place += _HEADER
        record += content[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def key_of(item: Any) -> str:
    """Return the name of an item."""
    return str(item.key or item.nested_key[0])


if __name__ == "__main__":
    file = next(Path(sys.argv[1]).rglob("*.wandb"))
    logged: dict[str, list[list[float]]] = {"loss": [], "val_loss": []}
    texts = set()
    for content in records(file.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        items = {key_of(each): json.loads(each.value_json) for each in record.history.item}
        for tag in logged.keys() & items.keys():
            logged[tag].append([items["_step"], items[tag]])
        if any(key_of(each) == "optimizer.lr" for each in record.run.config.update):
            texts.add("config")
        if any(key_of(each) == "status" for each in record.summary.update):
            texts.add("summary")
    sys.stdout.write(json.dumps([logged, sorted(texts)]))
