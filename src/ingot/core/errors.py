"""Errors that a user can fix: the command line prints the message of a `UserError` and exits with code 2.

Any other exception is a bug in ingot and shows a traceback (exit code 1).
"""

import contextlib
import difflib
import errno
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any


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
        message: the stage and the reason.
    """

    def __init__(self, code: int, message: str = ""):
        super().__init__(message or code)
        self.code = code


_OS_MESSAGES = {
    errno.ENOSPC: "the disk is full; free space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free space and run the same command again",
    errno.EROFS: "the file system can only be read; choose a place that can be written",
    errno.EACCES: "permission denied; change the permissions, or choose another place",
    errno.EPERM: "permission denied; change the permissions, or choose another place",
    errno.ENOTDIR: "found a file on this path, expected a directory; move the file away, or choose another place",
    errno.EISDIR: "found a directory, expected a file or a link; move it away",
    errno.EEXIST: "found a file, expected a directory or nothing; move it away, or choose another place",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.EIO: "the disk cannot be read or written; check its health",
    errno.EFBIG: "the file would be larger than the file system or `ulimit -f` allows; choose another place",
    errno.ELOOP: "the links on this path lead in a circle; remove one of them",
    errno.EMFILE: "this process has too many open files; raise the limit (`ulimit -n`) and run the same command again",
    errno.ENFILE: "the machine has too many open files; close other programs and run the same command again",
    errno.ESTALE: "the network file system has lost this file; mount it again and run the same command again",
    errno.EBUSY: "another program is using it; close that and run the same command again",
    errno.ETXTBSY: "another program is using it; close that and run the same command again",
    errno.ENXIO: "found a special file without a device, expected a regular file; choose another place",
    errno.ENODEV: "the device is not there; mount it, or choose another place",
    errno.ETIMEDOUT: "the file system does not answer; check its connection",
    errno.EHOSTDOWN: "the file system does not answer; check its connection",
    errno.ENOTCONN: "the file system is not connected; mount it again",
    errno.ENOLCK: "the file system has no locks; choose another place",
    errno.ENOSYS: "the file system does not support this; choose another place",
    errno.EOPNOTSUPP: "the file system does not support this; choose another place",
    errno.EXDEV: "the two places are on different file systems; choose places on one",
    errno.EMLINK: "the file system allows no more links; choose another place",
}

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EINVAL)
"""Error numbers of a file system without locks, without links, or without a way to write a directory to the disk."""
_IN_TEXT = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EFBIG, errno.EMFILE)
"""Errors that are also recognised by their text, in messages without a number."""
_NUMBER = re.compile(r"os error (\d+)|errno:? (\d+)", re.IGNORECASE)
"""The error number in messages of Rust (safetensors, tokenizers) and C++ (Arrow)."""


def system_error(error: BaseException) -> int | None:
    """Number of the operating system's error behind an exception of Python or of a library; None for any other."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if match := _NUMBER.search(str(error)):
        return int(match[1] or match[2])
    return next((number for number in _IN_TEXT if os.strerror(number) in str(error)), None)


@contextlib.contextmanager
def name_file(path: object) -> Iterator[None]:
    """Raise errors of the operating system as OSError with a file name, which libraries and full disks leave out.

    Args:
        path: the file that is read or written.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        number = system_error(error)
        if number is None or (isinstance(error, OSError) and error.filename is not None):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def os_error_message(error: BaseException, where: str = "a file") -> str | None:
    """Message for an operating system error that the user can fix; None for any other, which may be a bug.

    Args:
        error: the exception, of Python or of a library.
        where: the file that was written, used where the error has no file name.
    """
    number = system_error(error)
    if number not in _OS_MESSAGES:
        return None
    named = (error.filename2 or error.filename) if isinstance(error, OSError) else None
    return f"{named or where}: {_OS_MESSAGES[number]}"


_default_showwarning = warnings.showwarning


def show_warning(message: Warning | str, category: type[Warning], *location: Any) -> None:
    """Print a `Notice` as one line, without its location in the code; for `warnings.showwarning`."""
    if issubclass(category, Notice):
        print_message(f"note: {message}")
    else:
        _default_showwarning(message, category, *location)


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


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters other than tab and line feed, separators of lines, and marks that reorder a line."""


def printable(text: str) -> str:
    """The text with control characters as escapes such as \\u001b, which JSON reads too."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def print_message(text: str) -> None:
    """Print to standard error, with control characters as escapes. A closed terminal or pipe is no error."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(printable(text), file=sys.stderr, flush=True)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: `did you mean 'x'?` for the closest known name, else the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
