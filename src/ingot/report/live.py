"""`ingot report --live`: serves the page of a run on this machine, and writes it again when a stage has logged more.

The page asks for itself every few seconds (`templates/page.js`). Reading a run never waits for it and changes nothing
but `report.html`, so a page can be open before, during and after a run.
"""

from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import unquote

from ingot.core.artifact import DONE, RECORD
from ingot.core.errors import UserError
from ingot.core.events import METRICS
from ingot.core.recipe import REPORT
from ingot.pipeline.graph import Graph
from ingot.pipeline.sweep import label
from ingot.report.sweep import write_any_report

HOST = "127.0.0.1"


class LiveReport:
    """The pages of a run or a sweep, written again when a file of a stage has changed."""

    def __init__(self, graphs: list[Graph]):
        self.graphs = graphs
        self.pages = {"/": graphs[0].run / REPORT} | {f"/{label(g)}/{REPORT}": g.home / REPORT for g in graphs}
        """Address -> file."""
        self._lock, self._written = Lock(), ()

    def update(self) -> None:
        """Write the pages if they are older than the run's files."""
        with self._lock:  # a browser may ask twice at a time
            if (now := tuple(self._state())) != self._written:
                write_any_report(self.graphs)
                self._written = now

    def _state(self) -> Iterator[tuple[Any, ...]]:
        """What changes when a stage begins, logs, ends or stops."""
        for graph in self.graphs:
            for node in graph.nodes.values():
                out = graph.stage(node)
                for name in (RECORD, METRICS, DONE):
                    path = out.path / name
                    yield (node.key, name, path.stat().st_size if path.exists() else None)
                yield (node.key, out.is_locked())


class Handler(BaseHTTPRequestHandler):
    """Answers GET for `/`, the page of the run, and for the pages of a sweep's points; for nothing else."""

    def __init__(self, report: LiveReport, *args: Any):
        self.report = report
        super().__init__(*args)

    def do_GET(self) -> None:
        page = self.report.pages.get(unquote(self.path))
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            return self.send_error(HTTPStatus.FORBIDDEN)  # a foreign site whose name was pointed at this machine
        if page is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        try:
            self.report.update()
            html = page.read_bytes().replace(b"<body>", b"<body data-live>", 1)
        except FileNotFoundError:  # a point that has not begun has no page
            return self.send_error(HTTPStatus.NOT_FOUND)
        except UserError as error:  # a file that is being deleted, for example; the page shows it and asks again
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error).encode())
        self._answer(HTTPStatus.OK, "text/html", html)

    def _answer(self, status: HTTPStatus, content: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{content}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a page asks every few seconds."""


def live_server(graphs: list[Graph], port: int) -> ThreadingHTTPServer:
    """A server of the run's pages for this machine alone; `serve_forever` starts it.

    Args:
        port: 0 takes any free one; `server_port` names it.

    Raises:
        UserError: the port is in use or reserved.
    """
    report = LiveReport(graphs)
    report.update()
    try:
        return ThreadingHTTPServer((HOST, port), partial(Handler, report))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"--port {port}: {reason}, expected a free port; name another, or 0 for any") from None
