"""`python -m payload.finetune.samples_before_and_after RUN`: writes samples.json of a finished run.

The prompts are the beginnings of two documents or conversations of the validation data. The initial
model and the run's newest checkpoint continue them, each in a process of `payload.generate` with
greedy decoding.
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
from payload.core.python_processes import code_environment, module_command
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
"""Tokens of a document that form a prompt; the prompt of a conversation ends before its first
answer."""
_MAX_PROMPT_CHARS = 2000
_SEARCHED_TOKENS = 1_000_000
_SEARCHED_CONVERSATIONS = 20
"""Number of conversations that are searched for prompts of a suitable length."""
_VAL: Split = "val"


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
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
    _say(f"before the run: {len(prompts)} prompts for {config.model.init} (1 of 2)")
    before = _continue(prompts, checkpoint=config.model.init)
    _say(f"after the run: the same prompts for {paths.run_id} (2 of 2)")
    after = _continue(prompts, checkpoint=str(paths.root))
    return [
        Sample(prompt=prompt, before=one, after=other)
        for prompt, one, other in zip(prompts, before, after, strict=True)
    ]


def _say(line: str) -> None:
    sys.stderr.write(f"{printable(line)}\n")
    sys.stderr.flush()


def find_prompts(folder: Path) -> list[str]:
    """Return prompts from a data folder of the task `text` or `chat`. Raises TileforgeError."""
    meta = load_meta(folder)
    if meta.task not in ("text", "chat"):
        raise ConfigError(f"{folder}: samples need --task text or chat, not {meta.task}.")
    found = (
        _conversation_prompts(folder, meta)
        if meta.task == ("chat")
        else _document_prompts(folder, meta)
    )
    if not found:
        raise DataError(f"{folder}: no validation text is long enough for a prompt.")
    return found


def _conversation_prompts(folder: Path, meta: DataMeta) -> list[str]:
    """Return the starts of the first conversations, up to the assistant's first answer."""
    tokenizer = _tokenizer(folder)
    # `payload.generate` adds this token before every prompt, if the tokenizer has such a token.
    first = tokenizer.decode(tokenizer.encode("").ids, skip_special_tokens=False)
    found = []
    for number in range(min(_SEARCHED_CONVERSATIONS, meta.val_documents)):
        (sample,) = read_samples(folder, meta, split=_VAL, number=number)
        text, is_answer = sample.parts[0]
        if not is_answer and text.strip() and len(text) <= _MAX_PROMPT_CHARS:
            found.append(text.removeprefix(first))
        if len(found) == _PROMPTS:
            break
    return found


def _document_prompts(folder: Path, meta: DataMeta) -> list[str]:
    """Return the starts of the first documents, each at most half of its document."""
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
    """Return the tokenizer in a data folder. Raises DataError if it is missing."""
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise DataError(f"{folder}: no {TOKENIZER_FILE}, which decodes the prompts.")
    try:
        return Tokenizer.from_file(str(path))
    except BaseException as error:  # tokenizers raises plain Exception and panics.
        if not is_failure(error):
            raise
        raise DataError(f"{path}: cannot be loaded: {one_line(error)}") from None


def _continue(prompts: Sequence[str], *, checkpoint: str) -> list[str]:
    """Return the model's continuation of each prompt. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="tileforge-samples-") as folder:
        file = Path(folder, "prompts.jsonl")
        write_whole(file, "".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
        arguments = ["--model", checkpoint, "--prompts-file", str(file), "--json"]
        arguments += [
            "--max-new-tokens",
            str(_NEW_TOKENS),
            "--temperature",
            "0",
            "--num-samples",
            "1",
        ]
        done = subprocess.run(
            module_command("payload.generate", *arguments),
            env=code_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    if done.returncode:
        message = last_line(done.stderr, otherwise=f"exit code {done.returncode}")
        raise ConfigError(f"{checkpoint}: generate failed: {message}")
    return [json.loads(line)["samples"][0]["text"] for line in done.stdout.splitlines()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
