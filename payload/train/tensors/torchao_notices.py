"""Hides log messages of torchao's import that a user of this project cannot act on."""

from __future__ import annotations

import logging
from functools import cache

_NOTICES = {
    # About torchao's own enums.
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",
    # About torchao's libraries for other GPUs.
    "torchao": "/torchao/_C_",
    "torchao.kernel.intmm": "Detected no triton",
}
"""A part of each message to hide, by the name of its logger."""


class _Filter(logging.Filter):
    """Drops the messages that contain a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True for a message to keep."""
        return self._text not in record.getMessage()


@cache
def hide_torchao_notices() -> None:
    """Hide what torchao logs when it is imported; call this function before the import.

    Without this function, every rank would log these lines.
    """
    for name, text in _NOTICES.items():
        logging.getLogger(name).addFilter(_Filter(text))
