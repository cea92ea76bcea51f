"""Interface of a task of `prepare --task`: its flags, and how it makes a data folder."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from payload.core.tasks import TaskKind
from payload.formats.data_folder import DataMeta

if TYPE_CHECKING:
    from payload.data.writing.plan import Estimate
    from payload.data.writing.prepare_text import PrepareResult

AddFlag = Callable[..., Any]
"""The method `add_argument` of the task's argument group."""


class Task(ABC):
    """Preparation of one kind of training data, from its source to a data folder."""

    kind: ClassVar[TaskKind]
    summary: ClassVar[str]
    """Description of the model's prediction, for `--help`."""
    flags: ClassVar[tuple[str, ...]] = ()
    """The flags that `add_flags` declares, such as `--packing`. Other tasks reject these flags."""

    def add_flags(self, add: AddFlag) -> None:  # noqa: B027 - optional
        """Add the task's `flags` to the parser.

        Each flag has the default None, so that other tasks can detect that the flag was given.
        """

    @abstractmethod
    def estimate(self, args: argparse.Namespace) -> tuple[str, Estimate]:
        """Return the source's label and the estimated sizes, for `--dry-run`."""

    @abstractmethod
    def prepare(self, args: argparse.Namespace) -> PrepareResult:
        """Make the data folder that the command line describes.

        Raises DataError, and UsageError for flags that do not fit together.
        """

    def describe(self, meta: DataMeta) -> list[str]:
        """Return lines about a folder of this task.

        The lines are printed after the token counts.
        """
        return []
