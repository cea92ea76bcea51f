"""Small data folders for tests, in the format that `payload.data prepare` writes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from payload.data.reading.range_hashes import RangeHasher
from payload.data.tokenizers.gpt2 import END_OF_TEXT, TOKENIZER_NAME, TOKENIZER_SHA256, VOCAB_SIZE
from payload.data.writing.meta import write_meta
from payload.formats.data_folder import DataFile, DataMeta, SplitRecord, token_dtype


def make_data_folder(
    folder: Path,
    *,
    num_train_tokens: int = 20_000,
    num_val_tokens: int = 1_000,
    vocab_size: int = VOCAB_SIZE,
    tokenizer_sha256: str = TOKENIZER_SHA256,
    seed: int = 7,
) -> Path:
    """Write and return a folder of repetitive random tokens, which a model learns quickly."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    phrases = generator.integers(0, vocab_size, size=(50, 16))
    files = {}
    for name, count in (("train.bin", num_train_tokens), ("val.bin", num_val_tokens)):
        chosen = phrases[generator.integers(0, len(phrases), size=-(-count // 16))]
        content = chosen.reshape(-1)[:count].astype(token_dtype(vocab_size)).tobytes()
        (folder / name).write_bytes(content)
        ranges = RangeHasher()
        ranges.update(content)
        files[name] = DataFile(
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            range_sha256=ranges.hashes(),
        )
    write_meta(
        folder,
        DataMeta(
            tokenizer=TOKENIZER_NAME,
            tokenizer_sha256=tokenizer_sha256,
            vocab_size=vocab_size,
            end_of_text=END_OF_TEXT,
            dtype=token_dtype(vocab_size),
            train_tokens=num_train_tokens,
            val_tokens=num_val_tokens,
            train_documents=1,
            val_documents=1,
            skipped_documents=0,
            text_bytes=0,
            source="random phrases",
            revision=None,
            fingerprint="",
            split=SplitRecord(method="permutation", val_fraction=0.05, seed=seed),
            encoder="none",
            files=files,
        ),
    )
    return folder
