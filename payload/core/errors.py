"""The error tree. Each class carries the exit code that the command ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """Meaning of a command's exit status; README's table is this list."""

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


INTERRUPTED = 130
"""Exit code of a command that Ctrl-C, SIGTERM or SIGHUP ended: its work is not done. A shell gives
the same for a program that Ctrl-C killed."""


class TileforgeError(Exception):
    """A failure that the user can act on: shown as one line, without a traceback."""

    exit_code = ExitCode.TRAINING

    def __init__(self, cause: str, *, fix: str = "") -> None:
        """Take what was wrong, with the value, and what to do.

        A program that shows the two apart asks for the fields; no text is split for that. A message
        given as one has its fix within `cause`.
        """
        super().__init__(f"{cause.rstrip('.')}. {fix}" if fix else cause)
        self.cause = cause
        self.fix = fix


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


class QuotaError(TileforgeError):
    """The project's quota is smaller than what the cluster needs."""

    exit_code = ExitCode.QUOTA


class CapacityError(TileforgeError):
    """The cloud has no such machine free in the zone."""

    exit_code = ExitCode.NO_CAPACITY


class CloudAuthError(TileforgeError):
    """The cloud, or Pulumi's backend, refuses these credentials, or there are none."""

    exit_code = ExitCode.AUTH


class CloudError(TileforgeError):
    """The cloud's interface cannot be reached, or fails in a way that is not the user's."""

    exit_code = ExitCode.PREFLIGHT


class TeardownError(TileforgeError):
    """Something is left in the cloud, or it cannot be shown that nothing is."""

    exit_code = ExitCode.TEARDOWN


class SshUnreachableError(TileforgeError):
    """A node does not answer on SSH, or the connection to it broke."""

    exit_code = ExitCode.SSH_UNREACHABLE


class ConnectionLostError(SshUnreachableError):
    """The connection to a node broke. Another one may be had: the machine had answered."""


class SshAuthError(TileforgeError):
    """A node answers, and refuses the key."""

    exit_code = ExitCode.SSH_AUTH


class HostKeyError(TileforgeError):
    """A node is not shown to be the one that the inventory means; nothing was sent to it."""

    exit_code = ExitCode.HOST_KEY


class BootstrapError(TileforgeError):
    """An environment or a node could not be set up."""

    exit_code = ExitCode.BOOTSTRAP


class PreflightError(TileforgeError):
    """A machine is not fit for the run: launcher missing, port taken, network closed."""

    exit_code = ExitCode.PREFLIGHT


class AnswerError(PreflightError):
    """A node answered what it may not: damaged, or from somebody else's program."""


class TrainingError(TileforgeError):
    """Training itself went wrong: a loss that is not finite, an exception in the step."""

    exit_code = ExitCode.TRAINING


class RanksDifferError(TrainingError):
    """The ranks' parameters are not identical: the run does not train one model."""


class RankLostError(TileforgeError):
    """A rank or its node died."""

    exit_code = ExitCode.RANK_LOST


class BudgetError(TileforgeError):
    """The run's cost or lifetime limit was reached."""

    exit_code = ExitCode.BUDGET


class NodesError(TileforgeError):
    """One action failed on some nodes. Each is named; the most telling failure gives the code."""

    def __init__(self, what: str, failures: Mapping[str, TileforgeError]) -> None:
        """`failures` by node; each message begins with its node's name."""
        assert failures, "there is no error without a failure"
        lines = "".join(f"\n  {error}" for error in failures.values())
        super().__init__(f"{what} failed on {len(failures)} node(s):{lines}")
        self.failures = failures
        self.exit_code = most_telling([error.exit_code for error in failures.values()])


# A wrong host key may be an attack and stops everything; after it, what keeps us out of a node
# explains what else is wrong with it, and with those behind it.
_TELLING = (
    ExitCode.HOST_KEY,
    ExitCode.AUTH,
    ExitCode.SSH_AUTH,
    ExitCode.SSH_UNREACHABLE,
    ExitCode.BOOTSTRAP,
    ExitCode.PREFLIGHT,
)


def most_telling(codes: Sequence[ExitCode]) -> ExitCode:
    """The code that says most about why several nodes failed."""
    order = {code: place for place, code in enumerate(_TELLING)}
    return min(codes, key=lambda code: (order.get(code, len(order)), code))


def is_failure(error: BaseException) -> bool:
    """Tell what a library raises for bad input from a request to end, such as Ctrl-C.

    A panic of a library in Rust is no Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
