"""The request to start or resume a run, and the part of it that planning needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from payload.config.run_config import RunConfig
from payload.core.dtype import Dtype
from payload.core.errors import ConfigError, TileforgeError
from payload.core.files import write_whole
from payload.core.printable_text import shown
from payload.launch.plan_record import auto_batch_size
from payload.orchestrate.runs.resolved_plan import ResolvedPlacement, ResolvedPlan
from payload.orchestrate.runs.run_index import create_run, room_for
from payload.run_record.approved_settings import record_approved, settings_to_approve
from payload.run_record.run_files import RunPaths
from payload.run_record.run_identity import ensure_identity, new_identity
from payload.run_record.run_lock import start_lock
from payload.run_record.run_repair import known_dtype, move_blockers_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A run to plan: its settings, and the relevant records of an earlier attempt."""

    config: RunConfig
    vocab_size: int | None
    """Vocabulary size of the data; None if it is unknown."""
    resumes: bool = False
    auto_size: int | None = None
    """The micro-batch that the last plan chose for `auto`. If the ranks can still share the batch
    evenly, this micro-batch is kept, so that a resume computes the same bits."""
    kept_dtype: Dtype | None = None
    """The dtype of the newest checkpoint, which a resume keeps under `auto`."""
    mean_tokens: float | None = None
    """Mean number of tokens in a sample, for data that do not exist yet; None if all sequences are
    full."""

    @classmethod
    def of_run(
        cls, paths: RunPaths, config: RunConfig, *, vocab_size: int | None, resumes: bool = False
    ) -> PlanRequest:
        """Return the request, with the records in the run's folder."""
        return cls(
            config=config,
            vocab_size=vocab_size,
            resumes=resumes,
            auto_size=auto_batch_size(paths.plan),
            kept_dtype=known_dtype(paths),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A run that a command starts or resumes at a site."""

    paths: RunPaths
    """The local run folder, which does not exist yet for a new run; see `folder`."""
    config: RunConfig
    vocab_size: int
    resumes: bool
    detach: bool
    """True if the run must outlive the command."""
    grace_s: float
    env: Mapping[str, str]
    talk: Console
    held: ExitStack
    """Locks and ports of the run, released when other commands may start the run again."""
    identity: str = field(default_factory=new_identity)
    """The identity for a run that has no identity yet."""
    named: Mapping[str, str] | None = None
    """Settings with effects outside the run, such as the store, that the user approved. None if the
    user approved all such settings of the config."""
    placed: ResolvedPlacement | None = None
    """Result of `Site.check`; None if the nodes are unknown before the start."""

    confirm: Callable[[ResolvedPlan], None] = lambda _planned: None
    """Called with the plan of a new run before the run starts; may raise TileforgeError."""

    def to_plan(self) -> PlanRequest:
        """Return the request to plan the run, with the records in its local folder."""
        return PlanRequest.of_run(
            self.paths, self.config, vocab_size=self.vocab_size, resumes=self.resumes
        )

    @contextmanager
    def folder(self) -> Iterator[RunPaths]:
        """Create the run's folder and write run.toml; the block writes the other files.

        After a TileforgeError in the block, the folder of a new run is removed, and run.toml of a
        resumed run is restored. Raises ConfigError and PreflightError.
        """
        paths, is_created = self.paths, False
        _require_text(paths.root.absolute())
        with room_for(paths):
            if not self.resumes:
                create_run(paths.root.parent, paths.run_id)
                is_created = True
                self.held.enter_context(start_lock(paths))
            for sentence in move_blockers_aside(paths):
                self.talk.print(f"warning: {sentence}")
            paths.logs.mkdir(exist_ok=True)
            ensure_identity(
                paths,
                is_new=is_created,
                fresh=self.identity,
                say=lambda line: self.talk.print(line),
            )
            before = None if is_created else _text_of(paths.config)
            record_approved(
                paths, settings_to_approve(self.config) if self.named is None else self.named
            )
            write_whole(paths.config, self.config.to_toml())
        try:
            with room_for(paths):
                yield paths
        except TileforgeError:
            if is_created:
                shutil.rmtree(paths.root, ignore_errors=True)  # the run never began
            elif before is not None:
                with suppress(OSError):  # the error reports the full disk
                    write_whole(paths.config, before)  # discard the refused settings
            raise


def _require_text(path: Path) -> None:
    """Raise ConfigError for a path that is not UTF-8, because the run's records contain it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{shown(str(path))}: not UTF-8. Choose another folder with --runs-dir."
        ) from None


def _text_of(path: Path) -> str | None:
    """Return the text of a file, or None if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
