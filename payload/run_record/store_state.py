"""CONTRACT: the record in which the uploader writes the state of a run's uploads."""

from __future__ import annotations

import re
from dataclasses import dataclass

from payload.core.validation.fields import MAX_SECONDS, checked
from payload.formats.checkpoint_listing import FOLDER_NAME

_TOKEN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreState:
    """The contents of storage.json; also part of state.json and summary.json."""

    address: str = checked(max_chars=2000)
    """Address of the run in the store: `storage.results` and the run id."""
    checkpoint: str | None = checked(None, pattern=FOLDER_NAME, wanted="a checkpoint's name")
    """The newest complete checkpoint in the store."""
    sent_bytes: int = checked(0, low=0)
    """Bytes uploaded since the start or resume."""
    sent_unix: float | None = checked(None, low=0, high=MAX_SECONDS)
    """Time of the last upload; None before the first upload."""
    waiting_checkpoints: int = checked(0, low=0)
    """Number of checkpoints on the head's disk that are not in the store yet."""
    waiting_bytes: int = checked(0, low=0)
    problem: str | None = None
    """One-line reason why uploads fail now; None while uploads work."""
    failing_since_unix: float | None = checked(None, low=0, high=MAX_SECONDS)
    failures: int = checked(0, low=0)
    """Number of uploads that failed after their retries."""
    lost: bool = False
    """True if the run was resumed on a different machine. This machine then uploads nothing
    more."""
    is_idle: bool = False
    """True if the run has ended and every file that can be uploaded is in the store."""
    is_drained: bool = False
    """True if every file was uploaded; a file that is damaged or too large is never uploaded."""
    token: str | None = checked(None, pattern=_TOKEN, wanted="32 hexadecimal digits")
    """The token in owner.json that shows that this machine may write to the store."""
    updated_unix: float = checked(0.0, low=0, high=MAX_SECONDS)
    schema_version: int = 1

    def words(self) -> str:
        """Return the state as one line of text."""
        newest = self.checkpoint or "no checkpoint yet"
        parts = [f"{newest} in {self.address}", f"{self.sent_bytes / 1e6:,.1f} MB sent"]
        if self.waiting_checkpoints:
            parts.append(
                f"{self.waiting_checkpoints} checkpoint(s), {self.waiting_bytes / 1e6:,.1f} MB, "
                "waiting"
            )
        return "; ".join(parts)
