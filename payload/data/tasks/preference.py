"""Preference pairs: the command line of `prepare --task preference`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, ClassVar

from payload.core.tasks import TaskKind
from payload.data.tasks.base import AddFlag, Task
from payload.formats.data_folder import DataMeta

if TYPE_CHECKING:
    from payload.data.writing.plan import Estimate
    from payload.data.writing.prepare import Outcome


class PreferenceTask(Task):
    """A better and a worse answer to each prompt."""

    kind: ClassVar[TaskKind] = "preference"
    summary = "pairs of a better and a worse answer (DPO), with the options of chat"
    flags = ("--sequence-length", "--chat-template", "--group-column")

    def add_flags(self, add: AddFlag) -> None:
        """Declare nothing: the task `chat` has the same flags."""

    def estimate(self, args: argparse.Namespace) -> tuple[str, Estimate]:
        """Return the source's label and what a run would do: all but writing is done for it."""
        from payload.data.tasks.preference_job import preference_job
        from payload.data.tasks.whole_folder_writer import estimate_whole

        return estimate_whole(preference_job(args))

    def prepare(self, args: argparse.Namespace) -> Outcome:
        """Make the data folder; a run that was stopped begins again."""
        from payload.data.tasks.preference_job import preference_job
        from payload.data.tasks.whole_folder_writer import prepare_whole
        from payload.data.writing.progress import Reporter

        job = preference_job(args)
        reporter = Reporter(quiet=args.quiet)
        reporter.say(f"template: {job.template.where}, {job.template.how_trained()}")
        return prepare_whole(job.rows, job.settings, reporter, job.make)

    def describe(self, meta: DataMeta) -> list[str]:
        """Return the record's counts."""
        pairs = meta.preference
        assert pairs is not None
        return [
            f"{meta.train_documents:,} pairs for training, {meta.val_documents:,} for validation, "
            f"of conversations of at most {pairs.sequence_length} tokens; answers' tokens: "
            f"{pairs.train_trained_tokens:,} and {pairs.val_trained_tokens:,}",
            f"truncated: {pairs.truncated_answers:,} answers by {pairs.truncated_tokens:,} tokens",
        ]
