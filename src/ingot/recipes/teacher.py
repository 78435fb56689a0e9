"""A stand-in for a teacher, to try self-instruct.toml without a large model: an endpoint on this machine.

    python teacher.py            # writes seeds.jsonl, then answers at http://127.0.0.1:8000/v1 until Ctrl-C

It writes tasks about words, and answers them: one in five times wrongly, now and then without an end. It knows nothing
else. Its answers follow from the request alone.
"""

import contextlib
import json
import random
import re
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WORDS = """
apple bird boat book bread bridge chair cloud coat cow cup desk door egg field fish flag flower fork garden
glass hand hat hill horse house key lake lamp leaf letter milk moon nail night nose ocean page paper pear
pencil plate pond rain ring river road rock roof rope salt sand school sea seed ship shirt shoe snow song
spoon star stone street sugar sun table tail tree wall watch water wheel wind window wood
""".split()  # noqa: SIM905 - a list would fill a screen
TASKS: dict[str, Callable[..., str]] = {
    "Repeat the word {} twice.": lambda a: f"{a} {a}",
    "Say the words {} and {} in the other order.": lambda a, b: f"{b} {a}",
    "Say the word {} and then the word {}.": lambda a, b: f"{a} {b}",
    "Which of the words {}, {} and {} is the last one?": lambda a, b, c: c,
    "Which of the words {}, {} and {} is the first one?": lambda a, b, c: a,
}
"""Form of a task -> its answer, given the words in it."""
SEEDS, WRONG, ENDLESS = 120, 0.2, 0.05
"""Tasks of seeds.jsonl; fractions of answers that are wrong and that repeat themselves without an end."""


def task(draw: random.Random) -> str:
    """A random task."""
    form = draw.choice([*TASKS])
    return form.format(*draw.sample(WORDS, form.count("{}")))


def answer(text: str) -> str:
    """The right answer to a task."""
    for form, rule in TASKS.items():
        if match := re.fullmatch(re.escape(form).replace(r"\{\}", "([a-z]+)"), text.strip()):
            return rule(*match.groups())
    return "I do not know."


def reply(request: dict[str, Any]) -> tuple[str, str]:
    """(text, reason to finish) for a request: more of a list of tasks, or an answer."""
    text, draw = request["messages"][-1]["content"], random.Random(json.dumps(request, sort_keys=True))
    if wanted := re.search(r"tasks (\d+) to (\d+)", text):
        shown = re.findall(r"^\d+\. (.+)", text, re.MULTILINE)
        tasks = [draw.choice(shown) if draw.random() < 0.1 else task(draw) for _ in range(*map(int, wanted.groups()))]
        return "\n".join(f"{n}. {one}" for n, one in enumerate([*tasks, task(draw)], int(wanted[1]))), "stop"
    if draw.random() < ENDLESS:
        return f"{draw.choice(WORDS)} " * request["max_tokens"], "length"
    if draw.random() < WRONG:
        return " ".join(draw.sample(WORDS, 2)), "stop"
    return answer(text), "stop"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Answer a request of the chat completions interface."""
        text, finish = reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
        data = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def write_seeds(path: Path) -> None:
    """Write tasks with their right answers, which are only read to measure the student."""
    draw = random.Random(0)
    tasks = dict.fromkeys(task(draw) for _ in range(SEEDS))
    path.write_text("".join(json.dumps({"prompt": text, "answer": answer(text)}) + "\n" for text in tasks))


def main() -> None:
    """Write the seeds, and answer at a port: the first argument, or 8000; 0 takes a free one, which is printed."""
    write_seeds(Path("seeds.jsonl"))
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8000), Handler)
    print(f"wrote seeds.jsonl; answering at http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
