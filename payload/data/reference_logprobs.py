"""Stored log-probabilities of the answers in a preference folder, computed before training.

The log-probabilities are stored in the data folder. reference.json names the model that computed
them. Each matmul dtype has one file. The file holds two float64 numbers for each pair, first the
training pairs, then the validation pairs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from payload.core.dtype import Dtype
from payload.core.errors import DataError
from payload.core.files import write_whole
from payload.core.regular_files import open_regular, read_bytes
from payload.core.suggested_commands import command
from payload.core.symlink_safety import inside_folder
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import SHA256
from payload.core.validation.records import build, check_schema
from payload.formats.data_folder import DataFile, DataMeta

REFERENCE_FILE = "reference.json"
VALUES_FILES: Mapping[Dtype, str] = {"bf16": "reference.bf16.bin", "fp32": "reference.fp32.bin"}
SCHEMA_VERSION = 1

_DTYPE = np.dtype("<f8")

LogProbs = npt.NDArray[np.float64]
"""Shape (pairs, 2): the log-probabilities of the chosen and the rejected answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """The model that computed the log-probabilities."""

    source: str
    """Folder or hub name of the model."""
    revision: str | None = None
    sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")
    """SHA-256 over the weight files."""
    config_sha256: str | None = checked(None, pattern=SHA256, wanted="64 hexadecimal digits")
    """SHA-256 over the settings of config.json that change results; None if an older release wrote
    the file."""
    quantize: Literal["none", "nf4"] = "none"

    def name(self) -> str:
        """Return the model's name for a command line."""
        return f"{self.source}@{self.revision}" if self.revision else self.source

    def is_same(self, other: ReferenceModel) -> bool:
        """Return True if both models give the same results.

        The location of the files does not matter.
        """
        configs = {self.config_sha256, other.config_sha256} - {None}
        same_weights = (self.sha256, self.quantize) == (other.sha256, other.quantize)
        return same_weights and len(configs) <= 1

    def has_same_hashes(self, other: ReferenceModel) -> bool:
        """Return True if all hashes are equal, including the hash of config.json."""
        return self.is_same(other) and self.config_sha256 == other.config_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Contents of reference.json."""

    model: ReferenceModel
    data_sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")
    """SHA-256 over the hashes of the data folder's files."""
    files: dict[str, DataFile]
    """The files with log-probabilities that were written: names in `VALUES_FILES`."""
    schema_version: int = SCHEMA_VERSION


def reference_command(
    folder: Path, model: ReferenceModel | None, *, dtype: Dtype | None = None
) -> str:
    """Return the command that computes and stores a model's log-probabilities."""
    arguments = ["--model", "MODEL" if model is None else model.name(), "--data", str(folder)]
    if dtype is not None:
        arguments += ["--dtype", dtype]
    if model is not None and model.quantize != "none":
        arguments += ["--quantize", model.quantize]
    return command("train.reference", *arguments)


def read_reference(folder: Path, meta: DataMeta) -> Reference | None:
    """Return the contents of reference.json; None if the file is missing or is for other data.

    Raises DataError for a damaged file.
    """
    path = folder / REFERENCE_FILE
    fix = f"Remove this file, or compute the values again with: {reference_command(folder, None)}"
    try:
        raw = parse_json(read_bytes(inside_folder(path)), where=str(path), fix=fix, error=DataError)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). {fix}") from None
    check_schema(raw, SCHEMA_VERSION, where=str(path), fix=fix, error=DataError)
    found = build(Reference, raw, where=str(path), fix=fix, error=DataError)
    return found if found.data_sha256 == _data_sha256(meta) else None


def read_values(folder: Path, meta: DataMeta, found: Reference, dtype: Dtype) -> LogProbs | None:
    """Return the log-probabilities that were stored for this dtype, or None.

    Raises DataError for a damaged file.
    """
    name = VALUES_FILES[dtype]
    if name not in found.files:
        return None
    path, again = folder / name, reference_command(folder, found.model, dtype=dtype)
    try:
        with open_regular(inside_folder(path)) as file:
            content = file.read()
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}, but {REFERENCE_FILE} lists this file. Compute the file "
            f"again with: {again}"
        ) from None
    if hashlib.sha256(content).hexdigest() != found.files[name].sha256:
        raise DataError(
            f"{path}: its SHA-256 differs from the one in {REFERENCE_FILE}. Compute the file again "
            f"with: {again}"
        )
    count = meta.train_documents + meta.val_documents
    if len(content) != (size := count * 2 * _DTYPE.itemsize):
        raise DataError(
            f"{path}: the file has {len(content):,} bytes, but {count:,} pairs need {size:,}. "
            f"Compute the file again with: {again}"
        )
    return np.frombuffer(content, dtype=_DTYPE).astype(np.float64).reshape(-1, 2)


def write_reference(
    folder: Path, meta: DataMeta, *, model: ReferenceModel, dtype: Dtype, values: LogProbs
) -> None:
    """Store log-probabilities. Delete values that belong to another model or to other data.

    Raises DataError.
    """
    before: Reference | None = None
    with contextlib.suppress(DataError):  # A damaged record is replaced.
        before = read_reference(folder, meta)
    # A record without the hash of config.json may belong to a model with another config.
    is_kept = before is not None and before.model.has_same_hashes(model)
    kept = before.files if before is not None and is_kept else {}
    content = values.astype(_DTYPE).tobytes()
    name = VALUES_FILES[dtype]
    file = DataFile(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    found = Reference(model=model, data_sha256=_data_sha256(meta), files={**dict(kept), name: file})
    try:
        for other in set(VALUES_FILES.values()) - set(found.files):
            (folder / other).unlink(missing_ok=True)
        write_whole(folder / name, content)
        write_whole(folder / REFERENCE_FILE, json.dumps(asdict(found), indent=2) + "\n")
    except OSError as error:
        raise DataError(
            f"{folder}: cannot write the reference log-probabilities ({error.strerror}). Free disk "
            "space, or copy the data to a writable folder."
        ) from None


def _data_sha256(meta: DataMeta) -> str:
    hashes = sorted(f"{name} {file.sha256}" for name, file in meta.files.items())
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()
