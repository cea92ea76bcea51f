"""Prints what is in wandb's offline file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore


def key_of(item: object) -> str:
    """Return an item's name."""
    return str(item.key or item.nested_key[0])  # type: ignore[attr-defined]


if __name__ == "__main__":
    store = DataStore()
    store.open_for_scan(str(next(Path(sys.argv[1]).rglob("*.wandb"))))
    told: dict[str, list[list[float]]] = {"loss": [], "val_loss": []}
    texts = set()
    while (content := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(content)
        items = {key_of(each): json.loads(each.value_json) for each in record.history.item}
        for tag in told.keys() & items.keys():
            told[tag].append([items["_step"], items[tag]])
        if any(key_of(each) == "optimizer.lr" for each in record.run.config.update):
            texts.add("config")
        if any(key_of(each) == "status" for each in record.summary.update):
            texts.add("summary")
    sys.stdout.write(json.dumps([told, sorted(texts)]))
