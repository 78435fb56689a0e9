"""Errors that a user can fix: the command line prints the message of a `UserError` and exits with code 2.

Any other exception is a bug in ingot and shows a traceback (exit code 1).
"""

import difflib
import errno
import warnings
from collections.abc import Iterable


class Notice(UserWarning):
    """A message to the user that is not an error; the command line prints it once."""


def notify(message: str) -> None:
    """Show a `Notice`."""
    warnings.warn(message, Notice, stacklevel=2)


class UserError(ValueError):
    """An error that the user can fix. Message: `where: found X, expected Y; do Z`, one line for each error."""


class MissingFile(UserError):
    """A file or a directory that a recipe names does not exist. Results that were made from it earlier stay valid."""


class StageFailed(Exception):
    """A stage's process failed and has printed its error.

    Args:
        code: exit code for the command line.
    """

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


_OS_MESSAGES = {
    errno.ENOSPC: "the disk is full; free space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free space and run the same command again",
    errno.EROFS: "the file system can only be read; choose a directory that can be written, with --out",
    errno.EACCES: "permission denied; change the permissions, or choose another place",
    errno.EPERM: "permission denied; change the permissions, or choose another place",
    errno.ENOTDIR: "found a file on this path, expected a directory; move the file away, or choose another place",
    errno.EISDIR: "found a directory, expected a file or a link; move it away",
    errno.EEXIST: "found a file, expected a directory or nothing; move it away, or choose another place",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.EIO: "the disk cannot be read or written; check its health",
}


def os_error_message(error: OSError, where: str = "a file") -> str | None:
    """Message for an operating system error that the user can fix; None for any other, which may be a bug.

    Args:
        error: the exception.
        where: the file that was written, used where the error has no file name.
    """
    if error.errno not in _OS_MESSAGES:
        return None
    return f"{error.filename2 or error.filename or where}: {_OS_MESSAGES[error.errno]}"


def memory_error_message(error: Exception) -> str | None:
    """Message for a failed allocation of Python, numpy or torch on any device; None for other errors."""
    kind = type(error).__name__
    if not (isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error)):
        return None
    reason = str(error).splitlines()[0] if str(error) else kind
    return (
        f"there is not enough memory ({reason}); a smaller batch, loop.micro_batch, context or model needs less, and "
        "`ingot plan` shows how much"
    )


def shortened(text: str, limit: int = 60) -> str:
    """The text, cut to `limit` characters; a cut text ends in `...`."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: `did you mean 'x'?` for the closest known name, else the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
