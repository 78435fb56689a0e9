"""A stub of an OpenAI-compatible endpoint on this machine, which answers as a test says."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: str, **message: Any) -> dict[str, Any]:
    """A chat completion with some text; `finish` is its reason to finish."""
    finish = message.pop("finish", "stop")
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    return {"choices": [{"message": {"content": text, **message}, "finish_reason": finish}], "usage": usage}


class Stub:
    """A server in a thread.

    Args:
        answer: (request, its number) to a table, bytes, or (code, table, headers).
    """

    def __init__(self, answer: Callable[[dict[str, Any], int], Any]):
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.at_once = self.most_at_once = 0
        stub, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    stub.requests.append(body)
                    stub.headers.append(self.headers)
                    number = len(stub.requests)
                    stub.at_once += 1
                    stub.most_at_once = max(stub.most_at_once, stub.at_once)
                try:
                    found = answer(body, number)
                finally:
                    with lock:
                        stub.at_once -= 1
                code, content, headers = found if isinstance(found, tuple) else (200, found, {})
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                try:
                    self.send_response(code)
                    for name, value in {"Content-Length": len(data), **headers}.items():
                        self.send_header(name, str(value))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client has gone

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> "Stub":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
