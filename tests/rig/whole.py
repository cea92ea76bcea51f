"""Contexts for resources outside the process, which are built completely or removed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Whole(ABC):
    """A context that builds a resource, and removes it at the end or if building fails."""

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    @abstractmethod
    def _make(self) -> None:
        """Build the resource."""

    @abstractmethod
    def _end(self) -> None:
        """Remove everything that `_make` has built so far."""
