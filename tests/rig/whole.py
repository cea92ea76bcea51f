"""Contexts for what is built outside of the process: there as a whole, or removed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Whole(ABC):
    """A context: made when it begins; removed when it ends, or when making it failed midway."""

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
        """Build it."""

    @abstractmethod
    def _end(self) -> None:
        """Remove all that `_make` has built so far."""
