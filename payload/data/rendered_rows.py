"""Renders the first rows of detected data, to count tokens and to show a row as it is trained."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from payload.core.errors import DataError
from payload.data.detect import DetectedData
from payload.data.rows.conversation import Conversation
from payload.data.rows.conversations import (
    BadConversationError,
    UntrainedRowError,
    conversation_of,
)
from payload.data.rows.preferences import preference_of
from payload.data.rows.rows import Row
from payload.data.rows.tool_faults import fault_lines, tool_faults
from payload.data.show import Sample, parts_of
from payload.data.tasks.arguments import sample_options
from payload.data.tasks.trained_tokens import in_spans
from payload.data.templates.default_system import default_system_lines
from payload.data.templates.empty_answers import empty_answers
from payload.data.templates.turns import RenderedSample, render_samples


class RenderedRows:
    """Renders the first rows of a file of conversations or pairs to training samples."""

    def __init__(self, found: DetectedData, args: argparse.Namespace) -> None:
        """Render with the options in `args`: tokenizer, chat_template and the sample options.

        Raises DataError for a missing tokenizer or template.
        """
        from payload.data.tasks.chat_job import load_tokenizer_and_template

        self._found = found
        self._skip_bad = args.skip_bad
        self._tokenizer, self._template = load_tokenizer_and_template(args)
        self._options = sample_options(args)

    def fault_lines(self) -> list[str]:
        """Return lines about faults in the tool calls of the rows, and about empty answers."""
        found = []
        for row in self._found.rows:
            with suppress(UntrainedRowError, BadConversationError):
                each = [
                    *(tool_faults(c.messages, c.tools) for c in self._conversations(row)),
                    *(
                        empty_answers(c.messages, c.trained, self._options)
                        for c in self._conversations(row)
                    ),
                ]
                found += [(fault, row.where) for fault in dict.fromkeys(chain(*each))]
        return fault_lines(found)

    def template_lines(self) -> list[str]:
        """Return a line with the system message that the template adds to rows, or no line."""
        if self._found.task == "chat" and all(map(_has_system, self._found.rows)):
            return []
        return default_system_lines(self._template, self._options.variables)

    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each sample. Raises DataError for a bad row."""
        texts = [
            sample.text
            for row in self._found.rows
            for sample in max(self._samples(row), key=_size, default=[])
        ]
        return tuple(len(each.ids) for each in self._tokenizer.encodings(texts))

    def example(self, number: int = 0) -> list[Sample]:
        """Return the samples of row `number`, or of the first later row that has samples.

        Raises DataError.
        """
        for row in self._found.rows[number:]:
            found = [sample for samples in self._samples(row) for sample in samples]
            if found:
                return [
                    self._shown(each, name=f"{row.where}, sample {index} of {len(found)}")
                    for index, each in enumerate(found, 1)
                ]
        return []

    def _shown(self, rendered: RenderedSample, *, name: str) -> Sample:
        (encoded,) = self._tokenizer.encodings([rendered.text])
        trained = in_spans(encoded.offsets, rendered.spans)
        return Sample(
            name=name,
            parts=parts_of(rendered.text, rendered.spans),
            num_tokens=len(trained),
            num_trained=int(trained.sum()),
        )

    def _samples(self, row: Row) -> Iterator[list[RenderedSample]]:
        """Yield the samples of the row's conversation, or of both conversations of a pair."""
        try:
            for conversation in self._conversations(row):
                yield render_samples(self._template, conversation, self._options)
        except UntrainedRowError:
            return
        except (BadConversationError, DataError) as error:
            if not self._skip_bad:
                raise DataError(
                    f"{row.where}: {error} Correct the row, or skip such rows with --skip-bad."
                ) from None

    def _conversations(self, row: Row) -> Sequence[Conversation]:
        if self._found.task != "preference":
            return [conversation_of(row.values)]
        pair = preference_of(row.values)
        base = Conversation(
            messages=(),
            trained=(),
            tools=pair.tools,
            documents=pair.documents,
            variables=pair.variables,
        )
        return [
            replace(
                base,
                messages=(*pair.prompt, *answer),
                trained=(
                    *[False] * len(pair.prompt),
                    *(message["role"] == "assistant" for message in answer),
                ),
            )
            for answer in (pair.chosen, pair.rejected)
        ]


def _has_system(row: Row) -> bool:
    try:
        return conversation_of(row.values).messages[0]["role"] in ("system", "developer")
    except (UntrainedRowError, BadConversationError):
        return True


def text_lengths(found: DetectedData, *, tokenizer: str) -> tuple[int, ...]:
    """Return how many tokens each of the first labelled texts has. Raises DataError."""
    from payload.data.tasks.classify_job import tokenize
    from payload.data.tokenizers import load_tokenizer

    assert found.text_column is not None
    texts = [row.values.get(found.text_column) for row in found.rows]
    content = [each.encode("utf-8", "replace") for each in texts if isinstance(each, str)]
    return tuple(len(tokens) for tokens in tokenize(load_tokenizer(tokenizer), content))


def _size(samples: list[RenderedSample]) -> int:
    return sum(len(each.text) for each in samples)
