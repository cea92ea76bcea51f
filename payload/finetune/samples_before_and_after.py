"""`python -m payload.finetune.samples_before_and_after RUN`: write samples.json of a finished run.

The prompts are the beginnings of two documents or conversations of the validation data. The model
that the run began with continues them, and so does the run's newest checkpoint; each is one process
of `payload.generate`, which always takes the likeliest token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from payload.config.run_config import load_run_config
from payload.core.errors import ConfigError, DataError, ExitCode, TileforgeError, is_failure
from payload.core.files import write_whole
from payload.core.one_line import last_line
from payload.core.printable_text import one_line, printable
from payload.core.python_processes import code_environment, module_words
from payload.data.reading.packed_blocks import Split
from payload.data.show import read_samples
from payload.formats.data_folder import VAL_NAME, DataMeta, load_meta
from payload.formats.tokenizer_identity import TOKENIZER_FILE
from payload.run_record.run_files import RunPaths
from payload.run_record.run_samples import Sample, write_samples

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROMPTS = 2
_NEW_TOKENS = 40
_PROMPT_TOKENS = 24
"""Tokens of a document; a conversation's prompt is all that is before the first answer."""
_MOST_PROMPT_CHARS = 2000
_SEARCHED_TOKENS = 1_000_000
_LOOKED_AT = 20
"""Conversations among which prompts of that length are looked for."""
_VAL: Split = "val"


def main(argv: Sequence[str]) -> int:
    """Carry out the command and return its exit code."""
    try:
        (folder,) = argv
        paths = RunPaths(Path(folder).resolve())
        write_samples(paths.samples, _samples(paths))
    except TileforgeError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\n")
        return ExitCode.CONFIG
    return ExitCode.OK


def _samples(paths: RunPaths) -> list[Sample]:
    config = load_run_config(paths.config)
    prompts = find_prompts(config.data.folder())
    before = _continued(prompts, checkpoint=config.model.init)
    after = _continued(prompts, checkpoint=str(paths.root))
    return [
        Sample(prompt=prompt, before=one, after=other)
        for prompt, one, other in zip(prompts, before, after, strict=True)
    ]


def find_prompts(folder: Path) -> list[str]:
    """Return prompts from a data folder of the task `text` or `chat`. Raises TileforgeError."""
    meta = load_meta(folder)
    if meta.task not in ("text", "chat"):
        raise ConfigError(f"{folder}: samples are for --task text and chat, not {meta.task}.")
    found = _of_conversations(folder, meta) if meta.task == "chat" else _of_documents(folder, meta)
    if not found:
        raise DataError(f"{folder}: no validation text is long enough for a prompt.")
    return found


def _of_conversations(folder: Path, meta: DataMeta) -> list[str]:
    """Return the first conversations up to where the assistant begins."""
    tokenizer = _tokenizer(folder)
    # `payload.generate` puts a first token before every prompt where the tokenizer has one.
    first = tokenizer.decode(tokenizer.encode("").ids, skip_special_tokens=False)
    found = []
    for number in range(min(_LOOKED_AT, meta.val_documents)):
        (sample,) = read_samples(folder, meta, split=_VAL, number=number)
        text, is_answer = sample.parts[0]
        if not is_answer and text.strip() and len(text) <= _MOST_PROMPT_CHARS:
            found.append(text.removeprefix(first))
        if len(found) == _PROMPTS:
            break
    return found


def _of_documents(folder: Path, meta: DataMeta) -> list[str]:
    """Return the beginnings of the first documents, at most a half of each."""
    tokens: npt.NDArray[np.generic] = np.fromfile(
        folder / VAL_NAME, dtype=np.dtype(meta.dtype).newbyteorder("<"), count=_SEARCHED_TOKENS
    )
    tokenizer = _tokenizer(folder)
    ends = np.flatnonzero(tokens == meta.end_of_text)
    found = []
    for document in np.split(tokens, ends + 1):
        document = document[document != meta.end_of_text]
        first = document[: min(_PROMPT_TOKENS, len(document) // 2)].tolist()
        text = tokenizer.decode(first, skip_special_tokens=True)
        if text.strip():
            found.append(text)
        if len(found) == _PROMPTS:
            break
    return found


def _tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer in a data folder. Raises DataError where the payload's own was used."""
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise DataError(f"{folder}: it has no {TOKENIZER_FILE} to turn tokens into prompts.")
    try:
        return Tokenizer.from_file(str(path))
    except BaseException as error:  # The package raises no class of its own.
        if not is_failure(error):
            raise
        raise DataError(f"{path}: cannot be loaded: {one_line(error)}") from None


def _continued(prompts: Sequence[str], *, checkpoint: str) -> list[str]:
    """Return what the model writes behind each prompt. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="tileforge-samples-") as folder:
        file = Path(folder, "prompts.jsonl")
        write_whole(file, "".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
        words = ["--checkpoint", checkpoint, "--prompts-file", str(file), "--json"]
        words += ["--max-new-tokens", str(_NEW_TOKENS), "--temperature", "0", "--num-samples", "1"]
        done = subprocess.run(
            module_words("payload.generate", *words),
            env=code_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    if done.returncode:
        said = last_line(done.stderr, otherwise=f"it ended with {done.returncode}")
        raise ConfigError(f"{checkpoint} wrote nothing: {said}")
    return [json.loads(line)["samples"][0]["text"] for line in done.stdout.splitlines()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
