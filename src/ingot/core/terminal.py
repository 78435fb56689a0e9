"""Consoles for names and texts of unknown origin, which may contain control characters."""

import contextlib
import sys
from collections.abc import Iterable
from typing import IO, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ingot.core.errors import printable


class SafeConsole(Console):
    """A console that shows control characters of names and texts as escapes, so that a terminal does not obey them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class _StandardError:
    """Standard error that ignores write errors: a closed terminal or pipe must not end a run."""

    @property
    def _stream(self) -> TextIO:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # a running bar replaces sys.stderr

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:
        return self._stream.encoding


def error_console(**options: Any) -> Console:
    """A console on standard error, for progress and messages; `options` are those of rich's console."""
    return SafeConsole(file=cast(IO[str], _StandardError()), **options)
