"""Writes meta.json of a data folder, and compares files with the hashes in meta.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from payload.core.errors import DataError
from payload.core.files import write_whole
from payload.core.regular_files import read_bytes
from payload.data.reading.range_hashes import RangeHasher, damaged_ranges
from payload.formats.data_folder import META_NAME, DataFile, DataMeta, load_meta, task_files
from payload.formats.prepare_hints import prepare_again_hint

_READ_BYTES = 8 * 2**20


def write_meta(folder: Path, meta: DataMeta) -> None:
    """Delete the files of other tasks, then write meta.json atomically."""
    for name in task_files() - set(meta.files):
        (folder / name).unlink(missing_ok=True)
    values = asdict(meta)
    if not meta.tokenizer_files:
        # The format of releases that supported only GPT-2's tokenizer.
        del values["tokenizer_files"]
    if meta.task == "text":
        # The format of releases that supported only this task.
        del values["task"]
    for name in ("chat", "classify", "preference", "selection", "added_tokens"):
        if values[name] is None:
            del values[name]
    write_whole(folder / META_NAME, json.dumps(values, indent=2) + "\n")


def write_tokenizer(folder: Path, files: Mapping[str, bytes]) -> dict[str, DataFile]:
    """Write the tokenizer files, and return their entries for meta.json.

    Tokenizer files of an earlier run are deleted.
    """
    for name in _earlier_tokenizer(folder) - set(files):
        (folder / name).unlink(missing_ok=True)
    described = {}
    for name, content in files.items():
        write_whole(folder / name, content)
        described[name] = DataFile(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    return described


def check_tokenizer_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Raise DataError if the tokenizer files would overwrite files that prepare did not write."""
    for name in set(files) - _earlier_tokenizer(folder):
        path = folder / name
        if path.exists() and read_bytes(path) != files[name]:
            raise DataError(
                f"{path}: this tokenizer file differs from the new one, and was not written by "
                "`prepare`. Choose another --out."
            )


def _earlier_tokenizer(folder: Path) -> set[str]:
    """Return the names of the tokenizer files that the folder's meta.json lists."""
    try:
        return set(load_meta(folder).tokenizer_files)
    except DataError:
        return set()


def verify_files(folder: Path, meta: DataMeta) -> dict[str, DataFile]:
    """Compare each file with the hashes in meta.json, and return the file's own hashes.

    Raises DataError that names the first file that differs, and the ranges that differ.
    """
    found = {name: _describe(folder / name) for name in meta.all_files()}
    for name, expected in meta.all_files().items():
        whole = found[name].sha256
        where = damaged_ranges(found[name].range_sha256, expected.range_sha256)
        if whole != expected.sha256 or where:
            problem = f"sha256 is {whole}, not {expected.sha256} as in meta.json"
            if whole == expected.sha256:
                problem = "its hashes in meta.json contradict each other"
            raise DataError(
                f"{folder / name}: {problem}{where}. "
                f"{prepare_again_hint(folder, source=meta.source)}"
            )
    return {name: found[name] for name in meta.files}


def add_range_hashes(folder: Path) -> DataMeta:
    """Verify the files, then add the hashes of their ranges to meta.json.

    Older releases did not write hashes of ranges. Raises DataError.
    """
    meta = load_meta(folder)
    meta = replace(meta, files=verify_files(folder, meta))
    write_meta(folder, meta)
    return meta


def _describe(path: Path) -> DataFile:
    whole, ranges, size = hashlib.sha256(), RangeHasher(), 0
    with path.open("rb") as file:
        while content := file.read(_READ_BYTES):
            whole.update(content)
            ranges.update(content)
            size += len(content)
    return DataFile(bytes=size, sha256=whole.hexdigest(), range_sha256=ranges.hashes())
