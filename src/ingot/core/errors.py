"""The one exception that is the user's to mend: the command line prints its sentence and exits with code 2.

Everything else that escapes is a bug of ours and shows a traceback (exit code 1).
"""

import difflib
import errno
import warnings
from collections.abc import Iterable


class Notice(UserWarning):
    """One line for the user that is not an error; the command line prints it once."""


def notify(message: str) -> None:
    """Show a `Notice`."""
    warnings.warn(message, Notice, stacklevel=2)


class UserError(ValueError):
    """What was found, where, what was expected and what to do, in one sentence (several lines for several errors)."""


class MissingFile(UserError):
    """A file or a directory that a recipe names is not there: what was made from it before still holds."""


class StageFailed(Exception):
    """A stage's process ended badly and has said why; carries the exit code to pass on."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


_REFUSED = {
    errno.ENOSPC: "the disk is full; free space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free space and run the same command again",
    errno.EROFS: "the file system can only be read; choose a directory that can be written, with --out",
    errno.EACCES: "permission denied; change the permissions, or choose another place",
    errno.EPERM: "permission denied; change the permissions, or choose another place",
    errno.ENOTDIR: "found a file on this path, expected a directory; move the file away, or choose another place",
    errno.EISDIR: "found a directory, expected a file or a link; move it away",
    errno.EEXIST: "found a file, expected a directory or nothing; move it away, or choose another place",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.EIO: "the disk cannot be read or written; look at its health",
}


def refused(error: OSError, where: str = "a file") -> str | None:
    """The sentence for what the machine refuses, which is the user's to mend; None where the error may be ours.

    Args:
        where: what was being written, where the error doesn't say.
    """
    if error.errno not in _REFUSED:
        return None
    return f"{error.filename2 or error.filename or where}: {_REFUSED[error.errno]}"


def no_memory(error: Exception) -> str | None:
    """The sentence for an allocation that failed, by Python, numpy or torch on any device; None for other errors."""
    kind = type(error).__name__
    if not (isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error)):
        return None
    what = str(error).splitlines()[0] if str(error) else kind
    return (
        f"there is not enough memory ({what}); a smaller batch, loop.micro_batch, context or model needs less, and "
        "`ingot plan` says how much"
    )


def shortened(text: str, most: int = 60) -> str:
    """At most so many characters, the last ones given for `...` where there were more."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest known name, else the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
