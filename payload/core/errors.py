"""The error classes. Each class has the exit code of a command that fails with the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the commands; docs/reference/exit_codes.md lists them."""

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
        """Return the value of `exit_class` in state.json and summary.json."""
        return self.name.lower()


INTERRUPTED = 130
"""Exit code of a command that Ctrl-C, SIGTERM or SIGHUP interrupted. A shell reports the same code
for a program that Ctrl-C killed."""


class TileforgeError(Exception):
    """A failure that the user can fix: it is shown on one line, without a traceback."""

    exit_code = ExitCode.TRAINING

    def __init__(self, cause: str, *, fix: str = "") -> None:
        """Set the `cause`, which names the problem and the value, and the `fix`.

        `cause` and `fix` stay available as fields, for programs that show them separately. The fix
        can also be a part of `cause`.
        """
        super().__init__(f"{cause.rstrip('.')}. {fix}" if fix else cause)
        self.cause = cause
        self.fix = fix


class UsageError(TileforgeError):
    """The command line is invalid."""

    exit_code = ExitCode.USAGE


class ConfigError(TileforgeError):
    """A setting is invalid; nothing was started."""

    exit_code = ExitCode.CONFIG


class DataError(ConfigError):
    """Input text or a data folder is missing, damaged or unsuitable; nothing was trained."""


class CheckpointError(ConfigError):
    """A checkpoint is missing, damaged or belongs to another model."""


class QuotaError(TileforgeError):
    """The project's quota is too small for the cluster."""

    exit_code = ExitCode.QUOTA


class CapacityError(TileforgeError):
    """The zone has no free machine of this type."""

    exit_code = ExitCode.NO_CAPACITY


class CloudAuthError(TileforgeError):
    """The credentials are missing, or the cloud or Pulumi's backend rejects them."""

    exit_code = ExitCode.AUTH


class CloudError(TileforgeError):
    """The cloud's API cannot be reached, or fails for a reason that the user did not cause."""

    exit_code = ExitCode.PREFLIGHT


class TeardownError(TileforgeError):
    """Resources remain in the cloud, or their removal could not be verified."""

    exit_code = ExitCode.TEARDOWN


class SshUnreachableError(TileforgeError):
    """A node does not respond on SSH, or the connection to the node broke."""

    exit_code = ExitCode.SSH_UNREACHABLE


class ConnectionLostError(SshUnreachableError):
    """An established connection to a node broke; a new connection may succeed."""


class SshAuthError(TileforgeError):
    """A node answers and rejects the key."""

    exit_code = ExitCode.SSH_AUTH


class HostKeyError(TileforgeError):
    """A node's host key differs from the host key in the inventory.

    Nothing was sent to the node.
    """

    exit_code = ExitCode.HOST_KEY


class BootstrapError(TileforgeError):
    """An environment or a node could not be set up."""

    exit_code = ExitCode.BOOTSTRAP


class PreflightError(TileforgeError):
    """A machine is not fit for the run: launcher missing, port taken, network closed."""

    exit_code = ExitCode.PREFLIGHT


class AnswerError(PreflightError):
    """A node's response is damaged or has an unexpected format."""


class TrainingError(TileforgeError):
    """Training failed: a loss that is not finite, or an exception in a step."""

    exit_code = ExitCode.TRAINING


class RanksDifferError(TrainingError):
    """The ranks' parameters are not identical: the run does not train one model."""


class RankLostError(TileforgeError):
    """A rank or its node was lost."""

    exit_code = ExitCode.RANK_LOST


class BudgetError(TileforgeError):
    """The run's cost or lifetime limit was reached."""

    exit_code = ExitCode.BUDGET


class NodesError(TileforgeError):
    """One action failed on some nodes.

    The error lists all failures. The most specific failure sets the exit code.
    """

    def __init__(self, what: str, failures: Mapping[str, TileforgeError]) -> None:
        """Set the failures by node; each message begins with the name of the node."""
        assert failures, "at least one failure is required"
        lines = "".join(f"\n  {error}" for error in failures.values())
        super().__init__(f"{what} failed on {len(failures)} node(s):{lines}")
        self.failures = failures
        self.exit_code = most_telling([error.exit_code for error in failures.values()])


# First a wrong host key, which can be an attack. Then failures to reach a node or to log in, as
# they explain later failures on that node and on the nodes behind it.
_TELLING = (
    ExitCode.HOST_KEY,
    ExitCode.AUTH,
    ExitCode.SSH_AUTH,
    ExitCode.SSH_UNREACHABLE,
    ExitCode.BOOTSTRAP,
    ExitCode.PREFLIGHT,
)


def most_telling(codes: Sequence[ExitCode]) -> ExitCode:
    """Return the code that best explains why several nodes failed."""
    order = {code: place for place, code in enumerate(_TELLING)}
    return min(codes, key=lambda code: (order.get(code, len(order)), code))


def is_failure(error: BaseException) -> bool:
    """Return True for an error, False for a request to stop, such as Ctrl-C.

    The panic of a Rust library counts as an error, although it is not an Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
