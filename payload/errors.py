"""The error tree. Each class carries the exit code that the command ends with."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit status means; README's table is this list."""

    OK = 0
    USAGE = 2
    CONFIG = 10
    QUOTA = 11
    NO_CAPACITY = 12
    AUTH = 13
    SSH_UNREACHABLE = 20
    SSH_AUTH = 21
    HOST_KEY = 22
    BOOTSTRAP = 30
    PREFLIGHT = 31
    TRAINING = 40
    RANK_LOST = 41
    HANG = 42
    BUDGET = 50
    TEARDOWN = 60

    @property
    def label(self) -> str:
        """The name that state.json and summary.json carry as `exit_class`."""
        return self.name.lower()


class TileforgeError(Exception):
    """A failure that the user can act on: shown as one line, without a traceback."""

    exit_code = ExitCode.TRAINING


class UsageError(TileforgeError):
    """The command line cannot be carried out as written."""

    exit_code = ExitCode.USAGE


class ConfigError(TileforgeError):
    """A setting is wrong; nothing was started."""

    exit_code = ExitCode.CONFIG


class DataError(ConfigError):
    """Input text or a data folder is missing, damaged or does not fit; nothing was trained."""


class CheckpointError(ConfigError):
    """A checkpoint is missing, damaged or belongs to another model."""


class PreflightError(TileforgeError):
    """A machine is not fit for the run: launcher missing, port taken, network closed."""

    exit_code = ExitCode.PREFLIGHT


class TrainingError(TileforgeError):
    """Training itself went wrong: a loss that is not finite, an exception in the step."""

    exit_code = ExitCode.TRAINING


class RanksDifferError(TrainingError):
    """The ranks' parameters are not identical: the run does not train one model."""


class RankLostError(TileforgeError):
    """A rank or its node died."""

    exit_code = ExitCode.RANK_LOST


class HangError(TileforgeError):
    """A rank made no progress within its limit."""

    exit_code = ExitCode.HANG


class BudgetError(TileforgeError):
    """The run's cost or lifetime limit was reached."""

    exit_code = ExitCode.BUDGET
