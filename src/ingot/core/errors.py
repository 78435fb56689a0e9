"""The one exception that is the user's to mend: the command line prints its sentence and exits with code 2.

Everything else that escapes is a bug of ours and shows a traceback (exit code 1).
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """What was found, where, what was expected and what to do, in one sentence (several lines for several errors)."""


class StageFailed(Exception):
    """A stage's process ended badly and has said why; carries the exit code to pass on."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, else the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
