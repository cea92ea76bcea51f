"""The task `preference`: its flags, and its data folder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, ClassVar

from payload.core.tasks import TaskKind
from payload.data.tasks.arguments import RENDERING_FLAGS
from payload.data.tasks.base import AddFlag, Task
from payload.formats.data_folder import DataMeta

if TYPE_CHECKING:
    from payload.data.writing.plan import Estimate
    from payload.data.writing.prepare_text import PrepareResult


class PreferenceTask(Task):
    """Preference pairs: each prompt has a chosen answer and a rejected answer."""

    kind: ClassVar[TaskKind] = "preference"
    summary = "pairs of a better and a worse answer (DPO), with most options of chat"
    flags = ("--sequence-length", "--group-column", *RENDERING_FLAGS)

    def add_flags(self, add: AddFlag) -> None:
        """Declare no flags, because the task `chat` has declared the same flags."""

    def estimate(self, args: argparse.Namespace) -> tuple[str, Estimate]:
        """Return the source's label and exact sizes. This does all the work except writing."""
        from payload.data.tasks.preference_job import preference_job
        from payload.data.tasks.whole_folder_writer import estimate_whole
        from payload.data.templates.default_system import default_system_lines
        from payload.data.templates.stop_note import stop_lines
        from payload.data.writing.progress import Reporter

        job = preference_job(args)
        template, variables = job.template, job.options.variables
        for line in (*default_system_lines(template, variables), *stop_lines(template, variables)):
            Reporter(quiet=args.quiet).log(line)
        return estimate_whole(job)

    def prepare(self, args: argparse.Namespace) -> PrepareResult:
        """Make the data folder; an interrupted run starts from scratch."""
        from payload.data.tasks.preference_job import preference_job
        from payload.data.tasks.whole_folder_writer import prepare_whole
        from payload.data.templates.default_system import default_system_lines
        from payload.data.templates.stop_note import stop_lines
        from payload.data.writing.progress import Reporter

        job = preference_job(args)
        reporter = Reporter(quiet=args.quiet)
        reporter.log(f"template: {job.template.where}, {job.template.how_trained()}")
        for line in default_system_lines(job.template, job.options.variables):
            reporter.log(line)
        for line in stop_lines(job.template, job.options.variables):
            reporter.log(line)
        return prepare_whole(job.rows, job.settings, reporter, lambda _: job.make())

    def describe(self, meta: DataMeta) -> list[str]:
        """Return lines with the counts in the folder's record."""
        pairs = meta.preference
        assert pairs is not None
        return [
            f"{meta.train_documents:,} pairs for training, {meta.val_documents:,} for validation, "
            f"with at most {pairs.sequence_length} tokens a conversation; answer tokens: "
            f"{pairs.train_trained_tokens:,} and {pairs.val_trained_tokens:,}",
            f"truncated: {pairs.truncated_answers:,} answers by {pairs.truncated_tokens:,} tokens",
        ]
