"""Classifies texts with a model that was trained with `task.kind=classify`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch

from payload.core.errors import CheckpointError, ConfigError, UsageError
from payload.generate.codec import Codec
from payload.train.models.base import CausalLM
from payload.train.models.classifier import Classifier

_CHUNK_TEXTS = 1024
"""Number of texts that are sorted by length, classified and printed together."""
_BATCH_ROWS = 16


def require_classifier(model: CausalLM, *, folder: Path) -> Classifier:
    """Return the model as a classifier. Raises CheckpointError for a language model."""
    if not isinstance(model, Classifier):
        raise CheckpointError(
            f"{folder}: a language model without labels. Use a checkpoint of a run with "
            "task.kind=classify, or leave --classify out."
        )
    return model


def refuse_classifier(model: CausalLM, *, folder: Path) -> None:
    """Raise CheckpointError for a classifier, which cannot continue a text."""
    if isinstance(model, Classifier):
        raise CheckpointError(
            f"{folder}: a classifier, which cannot continue a text. Add --classify, or use a "
            "language model."
        )


def read_texts(arguments: Namespace) -> Iterator[str]:
    """Yield the texts of the command line: every line of --input, or the prompt.

    Raises ConfigError for an unreadable file, and UsageError if there is no text.
    """
    if arguments.input is None:
        if arguments.prompt is None:
            raise UsageError("--classify needs texts: --input FILE (- = stdin), or --prompt TEXT.")
        if not arguments.prompt.strip():
            raise ConfigError("--prompt is empty, and has no label. Write the text to classify.")
        yield str(arguments.prompt)
        return
    try:
        if arguments.input == "-":
            yield from _lines(sys.stdin.buffer, "-")
            return
        with Path(arguments.input).open("rb") as file:
            yield from _lines(file, arguments.input)
    except OSError as error:
        raise ConfigError(
            f"--input {arguments.input}: {error.strerror}. Use a file with a text on each line."
        ) from None


def _lines(file: BinaryIO, name: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--input {name}: line {number}: byte {error.start} is not UTF-8. Convert the file "
                "to UTF-8."
            ) from None
        if not text.strip():
            raise ConfigError(
                f"--input {name}: line {number} is empty, and has no label. Remove the line."
            )
        yield text


def classify(
    texts: Iterator[str], *, model: Classifier, codec: Codec, show: Callable[[str, Result], None]
) -> int:
    """Show the result of each text in the order of the texts, and return the number of texts."""
    model.eval()
    count = 0
    while chunk := list(islice(texts, _CHUNK_TEXTS)):
        for text, result in zip(chunk, _classify_chunk(chunk, model, codec), strict=True):
            show(text, result)
        count += len(chunk)
    return count


class Result:
    """The label of a text, and the probability of every label."""

    def __init__(self, labels: Sequence[str], probabilities: Sequence[float]) -> None:
        self.scores = dict(zip(labels, probabilities, strict=True))
        self.label = max(self.scores, key=self.scores.__getitem__)

    def as_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps({"label": self.label, "scores": self.scores})


def _classify_chunk(texts: Sequence[str], model: Classifier, codec: Codec) -> list[Result]:
    context = model.spec.context()
    encoded = [_encode(text, model, codec)[:context] for text in texts]
    order = sorted(range(len(texts)), key=lambda index: len(encoded[index]))
    found: dict[int, Result] = {}
    with torch.inference_mode():
        for start in range(0, len(order), _BATCH_ROWS):
            indices = order[start : start + _BATCH_ROWS]
            length = len(encoded[indices[-1]])
            tokens = torch.full((len(indices), length), model.pad_token)
            for row, index in enumerate(indices):
                tokens[row, : len(encoded[index])] = torch.tensor(encoded[index])
            for index, scores in zip(
                indices, model.class_logits(tokens).softmax(-1).tolist(), strict=True
            ):
                found[index] = Result(model.labels, scores)
    return [found[index] for index in range(len(texts))]


def _encode(text: str, model: Classifier, codec: Codec) -> list[int]:
    """Return the tokens of a text. An empty text becomes one padding token. Raises ConfigError."""
    tokens = codec.encode(text) or [model.pad_token]
    size = model.spec.vocab_size
    if max(tokens) >= size:
        raise ConfigError(
            f"a text has token {max(tokens)}, but the model's vocabulary ends at {size - 1}: "
            f"the model was trained with another tokenizer than {codec.name}. Copy the model's "
            "tokenizer next to its weights."
        )
    return tokens
