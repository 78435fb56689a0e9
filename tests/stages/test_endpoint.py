"""A teacher behind an endpoint: what it writes becomes documents, and every way to fail is one sentence."""

import _socket
import io
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.core.events import Display
from ingot.corpus.documents import read_documents
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of, link
from ingot.pipeline.status import status
from ingot.plan.machine import GPUS
from ingot.report.plan import plan_rows
from ingot.stages import child
from ingot.stages.synthesis import endpoint, generate
from ingot.stages.synthesis.settings import EndpointSettings, GenerateSettings
from tests.stages.endpoint_stub import Stub, completion

RECIPE = """
[run]
name = "taught"

[stage.seeds]
kind = "corpus"
sources = ["seeds.jsonl"]
format = "prompts"
holdout = { fraction = 0.3 }

[stage.answers]
kind = "generate"
data = "seeds"
samples = 2
max_new = 20
endpoint = { url = "URL", model = "large", key = "TEACHER_KEY", tries = 3, timeout = 5 }

[stage.best]
kind = "label"
data = "answers"
by = "rule.py:low"
format = "chat"

[stage.notes]
kind = "corpus"
sources = ["notes.txt"]

[stage.pairs]
kind = "corpus"
sources = ["pairs.jsonl"]
format = "pairs"

[stage.bpe]
kind = "tokenizer"
from = "notes"
vocab = 280

[stage.rm]
kind = "train"
tokenizer = "bpe"
model = { depth = 1 }
data = { pairs = 1.0 }
objective = "reward"
duration = "2 steps"
"""
RULE = """
def low(prompts, completions):
    assert all(p["prompt"] == f"Name a thing of kind {p['number']}, please." for p in prompts)
    return [-float(c.split()[-1]) for c in completions]
"""
KEY = "secret-of-the-test"
SEEDS = 20


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with seed tasks."""
    allow_this_machine(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("TEACHER_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Name a thing of kind {i}, please.", "number": i} for i in range(SEEDS)]
    (tmp_path / "seeds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def allow_this_machine(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let sockets reach this machine, and requests be sent again without a pause."""
    patch.setattr(socket.socket, "connect", _only_here)
    patch.setattr(socket, "getaddrinfo", _address)
    patch.setenv("no_proxy", "*")
    patch.setenv("INGOT_CACHE", str(cache))
    patch.setattr(endpoint, "FIRST_PAUSE", 0.001)


def _only_here(self: socket.socket, address: Any) -> None:
    assert address[0] == "127.0.0.1", f"network call to {address}"
    _socket.socket.connect(self, address)


def _address(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
    assert host == "127.0.0.1", f"name look-up of {host}"
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]


def _graph(url: str, *overrides: str) -> Any:
    Path("recipe.toml").write_text(RECIPE.replace("URL", url))
    return load_graph(Path("recipe.toml"), list(overrides), Path("runs"))


def _build(url: str, name: str = "answers", *overrides: str) -> dict[str, Any]:
    """Make a stage and what it needs in this process; its result."""
    graph = _graph(url, *overrides)
    for node in graph.needed([name]):
        link(graph, node)
        child.run(job_of(graph, node, quiet=True))
    return json.loads(Path("runs/taught", name, "result.json").read_text())


def _documents(name: str = "answers") -> list[dict[str, Any]]:
    return [row for batch in read_documents(Path("runs/taught") / name) for row in batch.to_pylist()]


def _echo(request: dict[str, Any], number: int) -> dict[str, Any]:
    return completion(f"answer to {request['messages'][-1]['content']} {request['seed']}")


def test_answers_become_conversations_beside_their_prompts(work: Path) -> None:
    with Stub(_echo) as stub:
        result = _build(stub.url, "answers", 'stage.answers.system="Be short."')
    asked, rows = {row["text"]: row for row in _documents("seeds")}, _documents()
    assert len(rows) == result["documents"] == result["requests"] == len(stub.requests) == 2 * SEEDS
    assert result["total_tokens"] == 15 * len(rows)
    for row in rows:
        *prompt, answer = json.loads(row["text"])
        source = asked[json.dumps(prompt, separators=(",", ":"))]
        assert answer["content"].startswith(f"answer to {prompt[0]['content']} ")
        assert {n: row[n] for n in ("split", "cluster", "extra", "path", "offset")} == {
            n: source[n] for n in ("split", "cluster", "extra", "path", "offset")
        }
        assert row["source"] == "generate:large"
    for request, headers in zip(stub.requests, stub.headers, strict=True):
        assert request["model"] == "large"
        assert request["messages"][0] == {"role": "system", "content": "Be short."}
        assert headers["Authorization"] == f"Bearer {KEY}"
    assert len({request["seed"] for request in stub.requests}) == 2 * SEEDS, "samples differ"
    kept = [file for file in work.rglob("*") if file.is_file()]
    assert not any(KEY.encode() in file.read_bytes() for file in kept), "the key is written nowhere"


def test_a_killed_stage_never_asks_twice_and_ends_with_the_same_bytes(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "BATCH_ROWS", 8)
    with Stub(_echo) as stub:
        calls, ask = [], endpoint.Endpoint.ask

        def dies(self: Any, requests: Any) -> Any:
            calls.append(1)
            if len(calls) in (2, 5, 9):  # the second, third and fourth batch of an attempt
                raise KeyboardInterrupt
            return ask(self, requests)

        monkeypatch.setattr(endpoint.Endpoint, "ask", dies)
        for _ in range(5):
            try:
                result = _build(stub.url)
                break
            except KeyboardInterrupt:
                assert not list(Path("runs/taught/answers").glob("documents-*"))
        resumed = _documents()
        assert len(calls) > 9
        assert len(stub.requests) == result["requests"] == 2 * SEEDS
        monkeypatch.setattr(endpoint.Endpoint, "ask", ask)
        again = _build(stub.url, "answers", "stage.answers.unfinished='keep'")  # another key, the same requests
        assert len(stub.requests) == 2 * SEEDS, "all come from the cache"
    assert _documents() == resumed
    assert {n: again[n] for n in again if n != "seconds"} == {n: result[n] for n in result if n != "seconds"}


def test_errors_that_pass_are_waited_for(work: Path) -> None:
    """429 once for each request, with a pause that the server names."""
    seen = set[str]()

    def answer(request: dict[str, Any], number: int) -> Any:
        name = str(request["seed"])
        if name in seen:
            return _echo(request, number)
        seen.add(name)
        return (429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}) if number % 2 else (503, b"", {})

    with Stub(answer) as stub:
        assert _build(stub.url)["documents"] == 2 * SEEDS
    assert len(stub.requests) == 4 * SEEDS


def _hangs(request: dict[str, Any], number: int) -> dict[str, Any]:
    time.sleep(0.5)
    return _echo(request, number)


REFUSED = {"error": {"message": f"wrong key {KEY}"}}
FAILURES = {
    "no JSON": (
        lambda r, n: b"<html>hello</html>",
        "answered '<html>hello</html>', expected a chat completion as JSON",
    ),
    "nothing": (lambda r, n: b"", "answered nothing, expected a chat completion as JSON"),
    "another shape": (lambda r, n: {"choices": []}, r"answered '{\"choices\": \[\]}', expected a chat"),
    "no text": (lambda r, n: completion(["a"]), "expected a chat completion"),  # type: ignore[arg-type]
    "slow": (_hangs, r"gave no complete answer within 0.1 s after 3 tries; run the same command again later"),
    "too many": (lambda r, n: (429, {"error": "slow down"}, {}), "answered 429: slow down after 3 tries; run"),
    "no access": (
        lambda r, n: (401, REFUSED, {}),
        r"refused the key \(401: wrong key \*\*\*\); set a valid one",
    ),
    "a key where the words are cut": (
        lambda r, n: (401, {"error": {"message": "x" * 190 + f" {KEY}"}}, {}),
        r"refused the key \(401: x+ \*\*\*\)",
    ),
    "no model": (lambda r, n: (404, {"error": {"message": "no model large"}}, {}), "answered 404: no model large, exp"),
    "elsewhere": (lambda r, n: (307, b"", {"Location": "http://127.0.0.1:1/"}), "answered 307, expected a chat compl"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_every_failure_is_one_sentence_and_leaves_nothing_half_written(work: Path, case: str) -> None:
    answer, message = FAILURES[case]
    slow = ["stage.answers.endpoint.timeout=0.1", "stage.answers.prompts=2"] if case == "slow" else []
    with Stub(answer) as stub:
        with pytest.raises(UserError, match=message) as caught:
            _build(stub.url, "answers", *slow)
        graph = _graph(stub.url, *slow)
        assert status(graph, graph.nodes["answers"]).state == "FAILED"
    assert "\n" not in str(caught.value)
    assert KEY not in str(caught.value)
    assert not list(Path("runs/taught/answers").glob("documents-*"))
    assert not list(work.glob("cache/**/*.json")), "no failure is kept"


def test_a_refused_connection_ends_the_command_with_2(work: Path, ingot) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _graph(f"http://127.0.0.1:{port}/v1")
    done = ingot("run", "recipe.toml", "--only", "answers", "--set", "stage.answers.endpoint.tries=1", cwd=work)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "endpoint" in line]
    assert f"answers: endpoint: http://127.0.0.1:{port}/v1 could not be reached (Connection refused) after 1" in line


def test_limits_hold(work: Path) -> None:
    with Stub(_echo) as stub:
        with pytest.raises(UserError, match=r"endpoint.max_requests: found 40 answers to ask for, expected at most 39"):
            _build(stub.url, "answers", "stage.answers.endpoint.max_requests=39")
        assert not stub.requests
        one = "stage.answers.endpoint.parallel=1"
        with pytest.raises(UserError, match=r"endpoint.max_tokens: found 150 tokens after 10 answers, expected"):
            _build(stub.url, "answers", "stage.answers.endpoint.max_tokens=150", one)
        assert len(stub.requests) == 10
        assert stub.most_at_once == 1
        assert _build(stub.url)["requests"] == len(stub.requests) == 40


def test_requests_are_sent_at_once_up_to_the_limit(work: Path) -> None:
    with Stub(lambda r, n: (time.sleep(0.05), _echo(r, n))[1]) as stub:
        _build(stub.url, "answers", "stage.answers.endpoint.parallel=4")
    assert 1 < stub.most_at_once <= 4


def test_without_a_key_plan_waits_and_the_stage_is_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY")
    with Stub(_echo) as stub:
        row = next(r for r in plan_rows(_graph(stub.url), GPUS["a100"]) if r["name"] == "answers")
        assert row["state"] == "WAIT"
        assert row["why"] == f"for the key of {stub.url} in the environment variable TEACHER_KEY"
        assert row["facts"]["calls"] == f"calls {stub.url} (large)"
        with pytest.raises(UserError, match=r"endpoint.key: waiting for the key of .*; set it and run"):
            _build(stub.url)
        assert not stub.requests
        monkeypatch.setenv("TEACHER_KEY", KEY)
        _build(stub.url)
        monkeypatch.delenv("TEACHER_KEY")
        assert status(_graph(stub.url), _graph(stub.url).nodes["answers"]).state == "HIT"


@pytest.mark.parametrize("key", ["two\nlines", "two words", "kéy→"])
def test_what_is_no_key_is_refused_without_showing_it(work: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TEACHER_KEY", key)
    with Stub(_echo) as stub:
        with pytest.raises(UserError, match=r"endpoint.key: TEACHER_KEY holds .*, expected one word") as caught:
            _build(stub.url)
        assert not stub.requests
    assert key not in str(caught.value)


def test_an_answer_that_ends_too_early_is_no_answer() -> None:
    class Response(io.BytesIO):
        length = 7  # bytes that the header announces beyond those that came

    with pytest.raises(IncompleteRead):
        endpoint._read_until(Response(b'{"choices": []'), time.monotonic() + 60)


@pytest.mark.parametrize("usage", [{"completion_tokens": -9, "total_tokens": -1000}, {"total_tokens": True}, {}])
def test_counts_of_a_server_cannot_undo_the_limit_of_tokens(usage: dict[str, Any]) -> None:
    reply = endpoint._parsed({**completion("twelve bytes"), "usage": usage})
    assert (reply.tokens, reply.total_tokens) == (3, 3)


def test_reasoning_is_kept_or_dropped(work: Path) -> None:
    def answer(request: dict[str, Any], number: int) -> dict[str, Any]:
        return completion("42", reasoning_content="six times seven")

    with Stub(answer) as stub:
        _build(stub.url)
        expected = {"role": "assistant", "content": "42", "reasoning_content": "six times seven"}
        assert all(json.loads(row["text"])[-1] == expected for row in _documents())
        _build(stub.url, "answers", "stage.answers.reasoning='drop'")
        assert all(json.loads(row["text"])[-1] == {"role": "assistant", "content": "42"} for row in _documents())


def test_answers_that_are_cut_off_filtered_or_empty_are_counted_and_dropped(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself: what a filter withheld is not cut off, and stays out where that is kept."""

    def answer(request: dict[str, Any], number: int) -> dict[str, Any]:
        kind = request["seed"] % 5
        if kind == 4:
            return completion("", refusal="I cannot do that.")
        finish = ("stop", "length", "content_filter", "stop")[kind]
        return completion("" if kind == 3 else f"text {number}", finish=finish)

    messages: list[str] = []
    monkeypatch.setattr(Display, "notify", lambda self, message: messages.append(message))
    with Stub(answer) as stub:
        result = _build(stub.url)
        kinds = Counter(request["seed"] % 5 for request in stub.requests)
        assert min(kinds.values()) > 0
        assert result["documents"] == kinds[0]
        found = {name: result[name] for name in ("answers", "unfinished", "filtered", "empty")}
        assert found == {"answers": 40, "unfinished": kinds[1], "filtered": kinds[2] + kinds[4], "empty": kinds[3]}
        assert messages[-1] == (
            f"{kinds[0]} documents from 40 answers to 20 prompts; {kinds[1]} cut off, {kinds[2] + kinds[4]} filtered "
            f"by the endpoint or refused, {kinds[3]} empty"
        )
        assert _build(stub.url, "answers", "stage.answers.unfinished='keep'")["documents"] == kinds[0] + kinds[1]


@pytest.mark.parametrize(("text", "finish"), [("<think>2+2</think>\n", "stop"), ("<think>\n2+2 is", "length")])
def test_an_answer_of_nothing_but_dropped_reasoning_is_empty(work: Path, text: str, finish: str) -> None:
    with Stub(lambda request, number: completion(text if number % 2 else "4", finish=finish)) as stub:
        sets = ("stage.answers.reasoning='drop'", "stage.answers.unfinished='keep'")
        result = _build(stub.url, "answers", *sets)
    assert 0 < result["empty"] < 40
    assert result["documents"] == 40 - result["empty"]
    assert {json.loads(row["text"])[-1]["content"] for row in _documents()} == {"4"}


def test_no_proxy_reads_what_is_sent_to_this_machine(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stub(_echo) as stub, Stub(_echo) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        _build(stub.url)
        assert stub.requests
        assert not proxy.requests


def test_counts_of_a_single_prompt_are_numbers(work: Path) -> None:
    with Stub(_echo) as stub:
        result = _build(stub.url, "answers", "stage.answers.prompts=1", "stage.seeds.holdout={ fraction = 0.05 }")
    assert {name: result[name] for name in ("prompts", "too_long")} == {"prompts": 1, "too_long": 0}
    assert type(result["too_long"]) is int


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (
            completion("x", finish="content_filter"),
            r"\(40 filtered .*\); change the prompts or system, or name another",
        ),
        (completion("x", finish="length"), r"\(40 cut off\); raise max_new, or keep what is cut off"),
        (completion(""), r"\(40 empty\); train the model for longer, or name another one"),
    ],
)
def test_what_to_do_without_a_usable_answer_depends_on_why(work: Path, reply: dict[str, Any], sentence: str) -> None:
    with Stub(lambda request, number: reply) as stub, pytest.raises(UserError, match=sentence):
        _build(stub.url)


def test_answers_are_labelled_without_a_tokenizer_and_by_a_reward_model_with_its_own(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rule.py").write_text(RULE)
    messages: list[str] = []
    monkeypatch.setattr(Display, "notify", lambda self, message: messages.append(message))
    with Stub(_echo) as stub:
        assert _build(stub.url, "best")["documents"] == SEEDS
        assert messages[-1] == "20 conversations from 40 answers to 20 prompts"
        inputs = _graph(stub.url, "stage.best.by='rm'").nodes["best"].inputs
    last = [int(json.loads(row["text"])[-1]["content"].split()[-1]) for row in _documents("best")]
    both = [int(json.loads(row["text"])[-1]["content"].split()[-1]) for row in _documents()]
    assert last == [min(pair) for pair in zip(both[::2], both[1::2], strict=True)]
    assert (inputs["tokenizer"].name, inputs["reward"].name) == ("bpe", "rm")


def test_a_label_stage_says_what_it_left_out(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rule.py").write_text("def low(prompts, completions): return [None, 1.0, 1.0, 2.0] * (len(completions) // 4)")
    messages: list[str] = []
    monkeypatch.setattr(Display, "notify", lambda self, message: messages.append(message))
    with Stub(_echo) as stub:
        result = _build(stub.url, "best", "stage.best.format='pairs'")
    assert (result["documents"], result["ties"], result["unscored"]) == (10, 10, 10)
    assert messages[-1] == (
        "10 pairs from 40 answers to 20 prompts; 10 prompts with equal scores; 10 answers without a score"
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"url": "example.com", "model": "m"}, "found url = 'example.com', expected one such as https://"),
        ({"url": "https://u:p@example.com/v1", "model": "m"}, "expected one such as https://"),
        ({"url": "http://127.0.0.1:port/v1", "model": "m"}, "expected one such as https://"),
        ({"url": "http://127.0.0.1:99999/v1", "model": "m"}, "expected one such as https://"),
        ({"url": "http://no such host/v1", "model": "m"}, "expected one such as https://"),
        ({"url": "http://münchen..invalid/v1", "model": "m"}, "expected one such as https://"),
        ({"url": "http://example.com/v1", "model": "m", "key": "K"}, "which would send it unencrypted; use https"),
        (
            {"url": "https://example.com/v1", "model": "m", "key": "sk-abc-123"},
            "never write the key itself in a recipe",
        ),
    ],
)
def test_an_endpoint_that_is_not_one_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        EndpointSettings.model_validate(table)
    assert "sk-abc" not in str(caught.value.errors()[0]["msg"])


def test_a_stage_has_one_model_and_only_settings_that_it_reads() -> None:
    for table, message in (
        ({}, "found neither model nor endpoint"),
        ({"model": "m", "endpoint": {"url": "https://a/v1", "model": "m"}}, "found both model and endpoint"),
        ({"model": "m", "temperature": 0}, "found samples = 4 with temperature = 0, which writes the same text each"),
        ({"model": "m", "new": 3}, 'found new = 3 with format = "chat"'),
        ({"model": "m", "format": "prompts", "reasoning": "drop"}, 'found reasoning = drop with format = "prompts"'),
    ):
        with pytest.raises(ValidationError, match=message):
            GenerateSettings.model_validate({"data": "a", **table})


@pytest.fixture(autouse=True)
def _no_output(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert KEY not in "".join(capsys.readouterr())
