"""Labels for texts, by a model that was trained with `task.kind=classify`."""

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

_AT_ONCE = 1024
"""Texts that are sorted by length, classified and printed together."""
_ROWS = 16


def require_classifier(model: CausalLM, *, folder: Path) -> Classifier:
    """Return the model as a classifier. Raises CheckpointError for a language model."""
    if not isinstance(model, Classifier):
        raise CheckpointError(
            f"{folder}: it is a language model without labels. Name a checkpoint of a run with "
            "task.kind=classify, or leave --classify out."
        )
    return model


def refuse_classifier(model: CausalLM, *, folder: Path) -> None:
    """Raise CheckpointError for a classifier, which cannot continue a text."""
    if isinstance(model, Classifier):
        raise CheckpointError(
            f"{folder}: it is a classifier, which gives labels to texts and continues none. Add "
            "--classify, or name a language model."
        )


def read_texts(arguments: Namespace) -> Iterator[str]:
    """Yield the texts of the command line: every line of --input, else the prompts.

    Raises ConfigError for a file that cannot be read, UsageError without a text.
    """
    if arguments.input is None:
        if arguments.prompt is None:
            raise UsageError("--classify needs texts: --input FILE (- = stdin), or --prompt TEXT.")
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
            f"--input {arguments.input}: {error.strerror}. Name a file with a text on each line."
        ) from None


def _lines(file: BinaryIO, name: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--input {name}: line {number}: byte {error.start} is not UTF-8. Convert the file "
                "to UTF-8."
            ) from None


def classify(
    texts: Iterator[str], *, model: Classifier, codec: Codec, show: Callable[[str, Result], None]
) -> int:
    """Show each text's result, in order; return their number."""
    model.eval()
    count = 0
    while some := list(islice(texts, _AT_ONCE)):
        for text, result in zip(some, _results(some, model, codec), strict=True):
            show(text, result)
        count += len(some)
    return count


class Result:
    """A text's label, and the probability of every label."""

    def __init__(self, labels: Sequence[str], probabilities: Sequence[float]) -> None:
        self.scores = dict(zip(labels, probabilities, strict=True))
        self.label = max(self.scores, key=self.scores.__getitem__)

    def as_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps({"label": self.label, "scores": self.scores})


def _results(texts: Sequence[str], model: Classifier, codec: Codec) -> list[Result]:
    context = model.spec.context()
    encoded = [_encoded(text, model, codec)[:context] for text in texts]
    order = sorted(range(len(texts)), key=lambda place: len(encoded[place]))
    found: dict[int, Result] = {}
    with torch.inference_mode():
        for start in range(0, len(order), _ROWS):
            places = order[start : start + _ROWS]
            length = len(encoded[places[-1]])
            tokens = torch.full((len(places), length), model.pad_token)
            for row, place in enumerate(places):
                tokens[row, : len(encoded[place])] = torch.tensor(encoded[place])
            for place, scores in zip(
                places, model.class_logits(tokens).softmax(-1).tolist(), strict=True
            ):
                found[place] = Result(model.labels, scores)
    return [found[place] for place in range(len(texts))]


def _encoded(text: str, model: Classifier, codec: Codec) -> list[int]:
    """Return a text's tokens; an empty one is padding alone. Raises ConfigError."""
    tokens = codec.encode(text) or [model.pad_token]
    size = model.spec.vocab_size
    if max(tokens) >= size:
        raise ConfigError(
            f"a text has token {max(tokens)}, the model's vocabulary ends at {size - 1}: it was "
            f"trained with another tokenizer than {codec.name}. Copy its own beside the weights."
        )
    return tokens
