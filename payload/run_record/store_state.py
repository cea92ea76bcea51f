"""CONTRACT: what of a run is in its store, as the uploader writes it into the run folder."""

from __future__ import annotations

import re
from dataclasses import dataclass

from payload.core.validation.fields import MAX_SECONDS, checked
from payload.formats.checkpoint_listing import FOLDER_NAME

_TOKEN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreState:
    """storage.json; state.json and summary.json carry it, too."""

    address: str = checked(max_chars=2000)
    """The run's own: `storage.results` and its id."""
    checkpoint: str | None = checked(None, pattern=FOLDER_NAME, wanted="a checkpoint's name")
    """The newest one that is whole in the store."""
    sent_bytes: int = checked(0, low=0)
    """Since the run was started or resumed."""
    sent_unix: float | None = checked(None, low=0, high=MAX_SECONDS)
    """When something last got there; None before."""
    waiting_checkpoints: int = checked(0, low=0)
    """On the head's disk, and not yet in the store."""
    waiting_bytes: int = checked(0, low=0)
    problem: str | None = None
    """Why the store takes nothing now, in one line; None while it does."""
    failing_since_unix: float | None = checked(None, low=0, high=MAX_SECONDS)
    failures: int = checked(0, low=0)
    """Attempts that failed, each after retries of its own."""
    lost: bool = False
    """True once another place has resumed the run, so that this one uploads nothing any more."""
    is_idle: bool = False
    """True when the run has ended and all that can be sent is in the store."""
    is_drained: bool = False
    """True when that is all there was: no damaged checkpoint and no file that is too large."""
    token: str | None = checked(None, pattern=_TOKEN, wanted="32 hexadecimal digits")
    """The token that this place writes to the store's owner.json, and by which it may write."""
    updated_unix: float = checked(0.0, low=0, high=MAX_SECONDS)
    schema_version: int = 1

    def words(self) -> str:
        """Return one line for people."""
        newest = self.checkpoint or "no checkpoint yet"
        parts = [f"{newest} in {self.address}", f"{self.sent_bytes / 1e6:,.1f} MB sent"]
        if self.waiting_checkpoints:
            parts.append(
                f"{self.waiting_checkpoints} checkpoint(s), {self.waiting_bytes / 1e6:,.1f} MB, "
                "waiting"
            )
        return "; ".join(parts)
