"""`ingot report --live`: what it serves, to whom, and when it writes the page again."""

import io
from typing import Any

import pytest
from typer.testing import CliRunner

from ingot.cli.app import app
from ingot.core.errors import UserError
from ingot.core.events import EventLog
from ingot.report.live import Handler, LiveReport, live_server

from .conftest import Run, begin, train_events


class Connection:
    """A connection in memory, since tests use no network."""

    def __init__(self, request: str):
        self.request, self.answer = request.encode(), b""

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self.request)

    def sendall(self, data: bytes) -> None:
        self.answer += data


def _get(report: LiveReport, path: str = "/", method: str = "GET", host: str = "localhost") -> tuple[int, str]:
    """Status and body of an answer."""
    connection: Any = Connection(f"{method} {path} HTTP/1.0\r\nHost: {host}\r\n\r\n")
    no_server: Any = None
    Handler(report, connection, ("here", 0), no_server)
    head, _, body = connection.answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


@pytest.fixture
def report(empty: Run) -> LiveReport:
    return LiveReport([empty.graph])


def test_the_page_follows_a_run(report: LiveReport, empty: Run) -> None:
    first = _get(report)[1]
    assert "<body data-live>" in first
    assert "Nothing has run yet" in first
    log = begin(empty, "base")
    train_events(log, 40, 10, 5.0)
    assert "10 of 40" in _get(report)[1]
    train_events(log, 40, 30, 5.0)
    log.close()
    assert "30 of 40" in _get(report)[1]
    assert "\n<body>\n" in (empty.graph.home / "report.html").read_text()  # a page that is kept does not ask


def test_it_is_written_only_when_the_run_has_changed(report: LiveReport, empty: Run) -> None:
    page = empty.graph.home / "report.html"
    report.update()
    page.write_text("as it was")
    report.update()
    assert page.read_text() == "as it was"
    EventLog(begin(empty, "base").path).close()
    report.update()
    assert page.read_text() != "as it was"


@pytest.mark.parametrize(
    ("path", "method", "host", "status"),
    [
        ("/", "GET", "127.0.0.1:8765", 200),
        ("/base/metrics.jsonl", "GET", "localhost", 404),
        ("/../../etc/passwd", "GET", "localhost", 404),
        ("/", "GET", "example.org", 403),
        ("/", "POST", "localhost", 501),
    ],
)
def test_it_serves_the_page_alone_to_this_machine_alone(
    report: LiveReport, path: str, method: str, host: str, status: int
) -> None:
    assert _get(report, path, method, host)[0] == status


def test_a_damaged_file_is_a_sentence_and_the_server_goes_on(report: LiveReport, empty: Run) -> None:
    begin(empty, "base").close()
    inputs = empty.dir("base").path / "inputs.json"
    inputs.write_text("not json\n")
    status, text = _get(report)
    assert status == 503
    assert "inputs.json" in text
    inputs.unlink()
    assert _get(report)[0] == 200


def test_it_listens_to_this_machine_alone_and_a_port_in_use_is_a_sentence(empty: Run) -> None:
    with live_server([empty.graph], port=0) as server:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(UserError, match=rf"--port {server.server_port}: .*in use, expected a free port"):
            live_server([empty.graph], server.server_port)


@pytest.mark.parametrize("option", [["--to", "page.html"], ["--json"]])
def test_a_served_page_is_not_written_elsewhere(empty: Run, option: list[str]) -> None:
    recipe = str(empty.graph.recipe.path)
    result = CliRunner().invoke(app, ["report", recipe, "--out", str(empty.root), "--live", *option])
    assert isinstance(result.exception, UserError)
    assert "leave out --to and --json" in str(result.exception)
