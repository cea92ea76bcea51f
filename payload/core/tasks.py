"""CONTRACT: what a run trains a model for, as `prepare --task` and run.toml's [task] name it."""

from __future__ import annotations

from typing import Literal, get_args

TaskKind = Literal["text", "chat", "classify", "preference"]
"""`text`: the next token of plain text. `chat`: the assistant's tokens of conversations.
`classify`: a label for each text. `preference`: the better one of two answers (DPO)."""
TASK_KINDS: tuple[TaskKind, ...] = get_args(TaskKind)
