"""A client of OpenAI-compatible endpoints, the only part of ingot that calls a model over the network.

It is used where a recipe names an endpoint. Every answer is kept in a file of the cache
(`core/artifact.py: cache_directory`), named by a hash of its request, so a killed stage asks again only for what was on
its way, and finishes to the same bytes. Keys are read from the environment and written nowhere.
"""

import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ingot.core.artifact import atomic_json, cache_directory, digest_json
from ingot.core.errors import UserError, shortened
from ingot.stages.synthesis.settings import THIS_MACHINE, EndpointSettings

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a request is sent a second time, doubled each time; and at most, also if the server asks for more."""
_RETRIED = frozenset({408, 425, 429})
"""Codes after which a request is sent again, beside the server's errors."""
_BLOCK, _MAX_BYTES = 1 << 16, 1 << 26


class Reply(NamedTuple):
    """An answer."""

    text: str
    reasoning: str
    ended: bool
    """Whether the model ended it; if not, it was cut off."""
    filtered: bool
    """Whether the endpoint withheld it or the rest of it, or the model refused in place of an answer."""
    tokens: int
    total_tokens: int
    """With those of the prompt."""


class _Again(Exception):
    """A request failed in a way that may pass.

    Args:
        why: the reason as text.
        pause: seconds that the server asks to wait.
    """

    def __init__(self, why: str, pause: float = 0.0):
        super().__init__(why)
        self.pause = pause


class _Stopped(Exception):
    """Another request failed while this one waited to be sent again."""


class Endpoint:
    """Asks an endpoint for answers, several at once.

    Raises:
        UserError: there is no key, or what is there is none.
    """

    def __init__(self, settings: EndpointSettings):
        if why := settings.missing_key():
            raise UserError(f"endpoint.key: waiting {why}; set it and run the same command again")
        self._settings, self._url = settings, settings.url.rstrip("/") + "/chat/completions"
        self._key = os.environ[settings.key].strip() if settings.key else None
        if self._key and not (self._key.isascii() and self._key.isprintable() and " " not in self._key):
            raise UserError(  # without the value
                f"endpoint.key: {settings.key} holds a line break, a blank or another character that no key has, "
                "expected one word of ASCII; set it again"
            )
        here = urlsplit(settings.url).hostname in THIS_MACHINE  # a proxy is another machine
        self._opener = urllib.request.build_opener(_NoRedirect, *([urllib.request.ProxyHandler({})] if here else []))
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self.requests = self.total_tokens = 0
        """Of all answers so far, those of the cache included."""

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """The answers to some requests, in order.

        Args:
            requests: the fields of each beside `model`.

        Raises:
            UserError: the endpoint cannot be reached, refuses a request, answers something else than a chat completion,
                or the limit of tokens is reached. Answers that have arrived are in the cache.
        """
        with ThreadPoolExecutor(self._settings.parallel) as pool:
            futures = [pool.submit(self._reply, {"model": self._settings.model, **request}) for request in requests]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # what is on its way is paid for: wait until it is in the cache
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                self._stopped.clear()
        for future in futures:
            if not future.cancelled() and (error := future.exception()) and not isinstance(error, _Stopped):
                raise error
        return [future.result() for future in futures]

    def _reply(self, request: Mapping[str, Any]) -> Reply:
        """The answer to a request, from the cache if it is there."""
        path = _cache_file(self._url, request)
        answer = _read(path)
        if answer is None:
            with self._lock:
                if self.total_tokens >= self._settings.max_tokens:
                    raise UserError(
                        f"endpoint.max_tokens: found {self.total_tokens:,} tokens after {self.requests:,} answers, "
                        f"expected at most {self._settings.max_tokens:,}; raise it and run the same command again, "
                        "which keeps the answers"
                    )
            answer = self._answer(json.dumps(request, ensure_ascii=False).encode())
            atomic_json(path, answer)
        reply = _parsed(answer)
        with self._lock:
            self.requests += 1
            self.total_tokens += reply.total_tokens
        return reply

    def _answer(self, body: bytes) -> Mapping[str, Any]:
        """Send a request until it is answered."""
        settings, why = self._settings, ""
        for attempt in range(settings.tries):
            try:
                return self._checked(self._send(body))
            except _Again as error:
                why = str(error)
                pause = max(error.pause, FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1))
                if attempt + 1 < settings.tries and self._stopped.wait(min(LONGEST_PAUSE, pause)):
                    raise _Stopped from None
        tries = f"{settings.tries} {'try' if settings.tries == 1 else 'tries'}"
        raise UserError(
            f"endpoint: {settings.url} {why} after {tries}; run the same command again later, which keeps "
            "the answers so far, or lower endpoint.parallel"
        )

    def _send(self, body: bytes) -> bytes:
        """Send a request once.

        Raises:
            _Again: no answer, or one that may be another the next time.
            UserError: a refusal.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "ingot"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = self._settings.timeout
        deadline = time.monotonic() + timeout
        try:
            request = urllib.request.Request(self._url, body, headers, method="POST")
            with self._opener.open(request, timeout=timeout) as response:
                return _read_until(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise _Again(f"gave no complete answer within {timeout:g} s") from None
            name = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise _Again(f"could not be reached ({name})") from None

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        """The exception for an answer with an HTTP error."""
        code, said = error.code, self._message(error)
        if code in _RETRIED or code >= 500:
            pause = error.headers.get("Retry-After", "")
            return _Again(f"answered {code}{said}", float(pause) if pause.isdecimal() else 0.0)
        settings = self._settings
        if code in (401, 403):
            how = f"set a valid one in {settings.key}" if settings.key else "name its variable with endpoint.key"
            found = "refused the key" if settings.key else "refused a request without a key"
            return UserError(f"endpoint: {settings.url} {found} ({code}{said}); {how}")
        return UserError(
            f"endpoint: {settings.url} answered {code}{said}, expected a chat completion; check endpoint.url, which "
            f"most often ends in /v1, endpoint.model ('{settings.model}'), and the settings of the request"
        )

    def _message(self, error: urllib.error.HTTPError) -> str:
        """The server's own words about an error, without the key."""
        try:
            text = error.read(_BLOCK).decode(errors="replace")
        except (OSError, HTTPException):
            return ""
        try:
            table = json.loads(text)
            inner = table.get("error", table)
            text = inner if isinstance(inner, str) else inner["message"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        text = shortened(self._without_key(" ".join(str(text).split())), 200)
        return f": {text}" if text else ""

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _checked(self, data: bytes) -> Mapping[str, Any]:
        """An answer as a table.

        Raises:
            UserError: it is no chat completion.
        """
        try:
            answer = json.loads(data)
            _parsed(answer)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            said = self._without_key(data[:_BLOCK].decode(errors="replace"))
            found = shortened(repr(said[:200]), 100) if data.strip() else "nothing"
            raise UserError(
                f"endpoint: {self._settings.url} answered {found}, expected a chat completion as JSON, with "
                "choices[0].message.content; check endpoint.url, which most often ends in /v1"
            ) from None
        return answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another address than the recipe's is an error: it would get the key."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _cache_file(url: str, request: Mapping[str, Any]) -> Path:
    """Where the answer to a request is kept."""
    name = digest_json([url, request])
    return cache_directory() / "endpoint" / name[:2] / f"{name}.json"


def _read(path: Path) -> Mapping[str, Any] | None:
    """A kept answer; None without one, or if the file is damaged."""
    try:
        answer = json.loads(path.read_bytes())
        _parsed(answer)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    return answer


def _read_until(response: Any, deadline: float) -> bytes:
    """The body of a response, complete before the deadline."""
    blocks, size = [], 0
    while block := response.read1(_BLOCK):
        blocks.append(block)
        size += len(block)
        if time.monotonic() > deadline:
            raise TimeoutError
        if size > _MAX_BYTES:
            break  # what is cut off is no JSON
    if response.length and size <= _MAX_BYTES:  # `read1` does not say so by itself
        raise IncompleteRead(b"", response.length)
    return b"".join(blocks)


def _parsed(answer: Any) -> Reply:
    """The fields of a chat completion. Without counts of tokens, four bytes count as one."""
    choice = answer["choices"][0]
    message = choice["message"]
    text, reasoning = message.get("content") or "", message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(text, str) or not isinstance(reasoning, str) or not {"content", "refusal"} & message.keys():
        raise TypeError
    usage = answer.get("usage") or {}
    tokens = _count(usage.get("completion_tokens")) or -(-len((text + reasoning).encode()) // 4)
    reason = choice.get("finish_reason")
    filtered = reason == "content_filter" or bool(message.get("refusal"))
    return Reply(text, reasoning, reason != "length", filtered, tokens, max(tokens, _count(usage.get("total_tokens"))))


def _count(tokens: Any) -> int:
    """A server's count; 0 if it is no number above 0, which would undo the limit of tokens."""
    return max(0, tokens) if type(tokens) is int else 0
