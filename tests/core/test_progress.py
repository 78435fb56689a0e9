"""The progress display: totals and time left, on a terminal and in a pipe."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from ingot.core.events import Bar, Display


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of the display by so many seconds."""
    now = [100.0]
    monkeypatch.setattr("ingot.core.events.time.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_pipe_gets_plain_lines_with_total_and_time_left(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first piece of work takes a minute longer (it compiles), the others take 0.1 s a row."""
    display = Display()
    with display.bar("evaluate base on clean", 1517, "rows") as bar:
        clock(60)
        bar.advance(17)
        for loss in ("2.5", "2.4"):
            clock(20)
            bar.advance(200, loss=loss)
        clock(110)
        bar.advance(1100)
    with display.bar("reading", unit="bytes") as bar:
        clock(6)
        bar.advance(2_500_000)
    with display.bar("too short to mention", 3, "rows") as bar:
        bar.advance(3)
    assert capsys.readouterr().err.splitlines() == [
        "  evaluate base on clean: 17 of 1,517 rows in 60 s",
        "  evaluate base on clean: 217 of 1,517 rows, 2 min 10 s left  loss 2.5",
        "  evaluate base on clean: 417 of 1,517 rows, 1 min 50 s left  loss 2.4",
        "  evaluate base on clean: 1,517 of 1,517 rows in 3 min 30 s  loss 2.4",
        "  reading: 2.5 MB in 6 s",
    ]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_line_fits_the_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False, color_system=None)
    bar = Bar("train a-stage-with-a-long-name [b]", 60, "steps", console)
    bar.show(12, 75.0, loss="2.5730", **{"validation loss": "2.5541", "tok/s": "17,081"}, phase="[c]")
    assert bar._rich is not None
    text = Console(width=width, file=io.StringIO(), color_system=None)
    text.print(bar._rich.get_renderable())
    bar.close()
    shown = text.file.getvalue().rstrip("\n")
    assert "\n" not in shown
    assert len(shown) <= width
    assert "12 of 60 steps" in shown
    if width == 120:
        assert "75 s left  loss 2.5730  validation loss 2.5541  tok/s 17,081" in shown
