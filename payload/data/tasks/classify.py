"""The task `classify`: its flags, and its data folder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, ClassVar

from payload.core.tasks import TaskKind
from payload.data.tasks.arguments import DEFAULT_LABEL_COLUMN
from payload.data.tasks.base import AddFlag, Task
from payload.formats.data_folder import DataMeta

if TYPE_CHECKING:
    from payload.data.writing.plan import Estimate
    from payload.data.writing.prepare_text import PrepareResult


class ClassifyTask(Task):
    """Text classification: the target is the label of a text."""

    kind: ClassVar[TaskKind] = "classify"
    summary = "a label for each text"
    flags = ("--label-column", "--label-map")

    def add_flags(self, add: AddFlag) -> None:
        """Add the task's `flags` to the parser."""
        add(
            "--label-column",
            metavar="NAME",
            help="key or column with the label. The label is a name or a number (default: "
            f"{DEFAULT_LABEL_COLUMN}, or another known name in upper or lower case)",
        )
        add(
            "--label-map",
            nargs="+",
            metavar="VALUES=LABEL",
            help="labels for the values in the label column, as in 1,2=negative 4,5=positive. "
            "An empty label, as in 3=, skips the rows with this value. A value that is not "
            "listed is an error",
        )

    def estimate(self, args: argparse.Namespace) -> tuple[str, Estimate]:
        """Return the source's label and exact sizes. This does all the work except writing."""
        from payload.data.tasks.classify_job import classify_job
        from payload.data.tasks.whole_folder_writer import estimate_whole

        return estimate_whole(classify_job(args))

    def prepare(self, args: argparse.Namespace) -> PrepareResult:
        """Make the data folder; an interrupted run starts from scratch."""
        from payload.data.tasks.classify_job import classify_job
        from payload.data.tasks.whole_folder_writer import prepare_whole
        from payload.data.writing.progress import Reporter

        job = classify_job(args)
        return prepare_whole(
            job.rows, job.settings, Reporter(quiet=args.quiet), lambda _: job.make()
        )

    def describe(self, meta: DataMeta) -> list[str]:
        """Return a line with the labels and their counts."""
        record = meta.classify
        assert record is not None
        counts = zip(record.labels, record.train_counts, record.val_counts, strict=True)
        listed = ", ".join(f"{name} {train:,} + {val:,}" for name, train, val in counts)
        return [f"{len(record.labels)} labels, texts for training + validation: {listed}"]
