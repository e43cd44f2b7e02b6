"""Everything Rein raises on purpose: each message says where, what, and what to do.

The exit code of the command line belongs to the class. Knows nothing of stages or files.
"""


def shown(text: str, most: int = 80) -> str:
    """Text of a file or library as a part of a message: one line, cut, what cannot be printed escaped."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: most + 1])
    return line if len(line) <= most else f"{line[: most - 3]}..."


class ReinError(Exception):
    """Base of all; a message reads `where: what; do this`."""

    exit_code = 1


class ConfigError(ReinError, ValueError):
    """A recipe, a key, a value or the use of the command line is wrong."""

    exit_code = 2


class DataError(ReinError, ValueError):
    """A data file is missing, unreadable or not fit to train on."""

    exit_code = 3


class GuardStop(ReinError, RuntimeError):
    """A guard stopped or paused the run; its state is saved."""

    exit_code = 4


class RefreshAsked(GuardStop):
    """Training wants rows by the actor as it is now; its state is saved."""


class GateFailed(ReinError, RuntimeError):
    """The result did not pass the gate; nothing was exported."""

    exit_code = 5


class CheckpointError(ReinError, RuntimeError):
    """A snapshot or checkpoint cannot be read or written, or the disk is full."""

    exit_code = 6


class EngineError(ReinError, RuntimeError):
    """A generation engine failed."""

    exit_code = 7


class RankLost(EngineError):
    """A process of a run on several ranks ended."""


class UserCodeError(ReinError, RuntimeError):
    """The user's own function raised."""

    exit_code = 8


class OutOfMemory(ReinError, MemoryError):
    """The work does not fit in memory at the smallest token budget."""

    exit_code = 9


class Interrupted(ReinError, RuntimeError):
    """SIGINT or SIGTERM came; the state is saved and the message says how to go on."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class Terminated(BaseException):
    """SIGTERM where no loop defers it; no Exception, as Ctrl-C is none: no library catches it for its own."""

    exit_code = 143


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, torch or the system means that memory ran out."""
    # By name and words: torch must not be imported to look at an error.
    words = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "CUDA out of memory")
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in words))
