"""The task `chat`: renders conversations by the chat template and packs them into blocks."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from payload.core.tasks import TaskKind
from payload.data.tasks.arguments import (
    ON_LONG,
    PACKINGS,
    RENDERING_FLAGS,
    SEQUENCE_LENGTH,
    THOUGHTS,
    TRAIN_ON,
    positive_int,
    template_variable,
)
from payload.data.tasks.base import AddFlag, Task
from payload.formats.data_folder import DataMeta

if TYPE_CHECKING:
    from payload.data.writing.plan import Estimate
    from payload.data.writing.prepare_text import PrepareResult


class ChatTask(Task):
    """Instruction tuning: the loss covers the assistant's tokens in every turn."""

    kind: ClassVar[TaskKind] = "chat"
    summary = "the assistant's tokens of conversations"
    flags = (
        *("--sequence-length", "--packing", "--on-long", "--group-column"),
        *RENDERING_FLAGS,
    )

    def add_flags(self, add: AddFlag) -> None:
        """Add the task's `flags` to the parser."""
        add(
            "--sequence-length",
            type=positive_int,
            metavar="TOKENS",
            help=f"block length; training uses the same length (default: {SEQUENCE_LENGTH})",
        )
        add(
            "--packing",
            choices=PACKINGS,
            metavar="HOW",
            help="`best-fit` packs whole conversations into blocks. `none` puts each "
            "conversation into its own block and fills the block with padding (default: "
            f"{PACKINGS[0]})",
        )
        add(
            "--chat-template",
            type=Path,
            metavar="FILE",
            help="Jinja file to use instead of the tokenizer's template. trl:NAME uses the "
            "template NAME of the package trl",
        )
        add(
            "--template-var",
            type=template_variable,
            action="append",
            metavar="NAME=VALUE",
            help="set a variable of the template, such as enable_thinking=false; can be "
            "repeated. VALUE is parsed as JSON. If VALUE is not valid JSON, it is used as text",
        )
        add(
            "--thoughts",
            choices=THOUGHTS,
            metavar="HOW",
            help="how to treat the assistant's thoughts (reasoning) in the rows. `keep` trains "
            "the thoughts. `drop` removes the thoughts. `empty` and `refuse` work like `keep`, "
            "except for a row that lacks a thought although the prompt ends with an open tag "
            "such as `<think>`. For such a row, `empty` trains the closing tag and the answer, "
            f"and `refuse` rejects the row (default: {THOUGHTS[0]})",
        )
        add(
            "--train-on",
            choices=TRAIN_ON,
            metavar="TURNS",
            help="`all` trains every turn of the assistant. `last` trains only the assistant's "
            f"last turn (default: {TRAIN_ON[0]})",
        )
        add(
            "--on-long",
            choices=ON_LONG,
            metavar="HOW",
            help="how to treat a conversation that is longer than a block: `truncate` or "
            "`drop` the conversation, `refuse` it with an error, or `split` it into several "
            f"blocks (default: {ON_LONG[0]})",
        )
        add(
            "--group-column",
            metavar="NAME",
            help="keep all conversations with the same value in this column in one split, "
            "either training or validation (default: split each conversation separately)",
        )

    def estimate(self, args: argparse.Namespace) -> tuple[str, Estimate]:
        """Return the source's label and exact sizes. This does all the work except writing."""
        from payload.data.tasks.chat_job import chat_job
        from payload.data.tasks.whole_folder_writer import estimate_whole
        from payload.data.templates.default_system import default_system_lines
        from payload.data.templates.stop_note import stop_lines
        from payload.data.writing.progress import Reporter

        job = chat_job(args)
        template, variables = job.reader.template, job.reader.options.variables
        for line in (*default_system_lines(template, variables), *stop_lines(template, variables)):
            Reporter(quiet=args.quiet).log(line)
        return estimate_whole(job)

    def prepare(self, args: argparse.Namespace) -> PrepareResult:
        """Make the data folder, or resume making it."""
        from payload.data.tasks.chat_job import chat_job
        from payload.data.tasks.whole_folder_writer import prepare_whole
        from payload.data.templates.default_system import default_system_lines
        from payload.data.templates.stop_note import stop_lines
        from payload.data.templates.thoughts_kind import how_thoughts
        from payload.data.writing.progress import Reporter

        job = chat_job(args)
        reporter = Reporter(quiet=args.quiet)
        template = job.reader.template
        reporter.log(f"template: {template.where}, {template.how_trained()}")
        options = job.reader.options
        reporter.log(how_thoughts(template, options.variables, options.thoughts))
        for line in default_system_lines(template, options.variables):
            reporter.log(line)
        for line in stop_lines(template, options.variables):
            reporter.log(line)
        make = partial(job.resumable, reporter=reporter)
        return prepare_whole(job.rows, job.settings, reporter, make)

    def describe(self, meta: DataMeta) -> list[str]:
        """Return lines with the counts in the folder's record."""
        chat = meta.chat
        assert chat is not None
        padding = chat.train_padding_tokens / meta.train_tokens
        lines = [
            f"blocks of {chat.sequence_length} tokens, packing {chat.packing}: {padding:.1%} "
            f"padding; trained tokens: {chat.train_trained_tokens:,} for training, "
            f"{chat.val_trained_tokens:,} for validation",
            f"truncated: {chat.truncated_conversations:,} conversations by "
            f"{chat.truncated_tokens:,} tokens; dropped without a trained token: "
            f"{chat.dropped_conversations:,}",
        ]
        if chat.on_long != "truncate":
            lines.append(
                f"longer than a block (--on-long {chat.on_long}): "
                f"{chat.long_dropped_conversations:,} conversations left out, "
                f"{chat.split_conversations:,} split"
            )
        if chat.added_samples:
            lines.append(
                "the template renders earlier turns differently when later turns follow: "
                f"{chat.added_samples:,} further samples with {chat.added_tokens:,} tokens"
            )
        if chat.literal_samples:
            lines.append(
                f"special tokens in the rows' text, encoded as text: {chat.literal_samples:,} rows"
            )
        if chat.unescaped_samples:
            lines.append(
                "special tokens in the rows' text that could not be encoded as text: "
                f"{chat.unescaped_samples:,} rows"
            )
        return lines
