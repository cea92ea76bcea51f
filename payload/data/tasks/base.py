"""The interface of a task of `prepare --task`: its flags, and its way to a data folder."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from payload.core.tasks import TaskKind
from payload.formats.data_folder import DataMeta

if TYPE_CHECKING:
    from payload.data.writing.plan import Estimate
    from payload.data.writing.prepare import Outcome

AddFlag = Callable[..., Any]
"""`add_argument` of the task's own group."""


class Task(ABC):
    """One kind of training data, from its source to a data folder."""

    kind: ClassVar[TaskKind]
    summary: ClassVar[str]
    """For `--help`: what is trained."""
    flags: ClassVar[tuple[str, ...]] = ()
    """Those that `add_flags` declares, as in `--packing`; other tasks refuse them."""

    def add_flags(self, add: AddFlag) -> None:  # noqa: B027 - a task may have none
        """Declare `flags`. Each has the default None, so that other tasks notice it."""

    @abstractmethod
    def estimate(self, args: argparse.Namespace) -> tuple[str, Estimate]:
        """Return the source's label and what `prepare` would do, for `--dry-run`."""

    @abstractmethod
    def prepare(self, args: argparse.Namespace) -> Outcome:
        """Make the data folder that the command line asks for.

        Raises DataError, and UsageError for flags that do not go together.
        """

    def describe(self, meta: DataMeta) -> list[str]:
        """Return lines about a folder of this task, besides its counts of tokens."""
        return []
