"""What `ingot generate` and `ingot chat` read and write at the terminal: prompts, answers, a conversation.

Text goes to standard output; what is said about it (why it was cut, what was dropped) to standard error, so that a pipe
gets the text alone.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.core.allocator import keep_freed_memory
from ingot.core.artifact import atomic_write
from ingot.core.errors import UserError, nearest, refused
from ingot.core.process import busy, sleep_early
from ingot.stages.models.lineage import conversed
from ingot.tokenizer.chat import render, require_chat

if TYPE_CHECKING:
    from ingot.api import LanguageModel
    from ingot.infer.streaming import Answer

QUOTES = '"""'
COMMANDS = {
    "/reset": "forget the conversation; the system message stays",
    "/system TEXT": "instructions that come before the conversation; without TEXT: none",
    "/save FILE": "write the conversation as a line of JSON, as a corpus of format chat reads it",
    "/help": "this list",
    "/quit": "end, as Ctrl-D does",
}


def loaded(stage: str | Path, best: bool, precision: str) -> "LanguageModel":
    """The model of a stage, in a process that is ours alone."""
    if busy():
        sleep_early(os.environ)  # before torch is loaded
    from ingot.api import load

    keep_freed_memory()
    return load(stage, best=best, precision=precision)


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: one a line, blank lines apart; where the name ends in .jsonl, the `prompt` of each object.

    Raises:
        UserError: no such file, not UTF-8, not JSON, no prompt in a line, or no prompt at all.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold other ends of a line
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a file of prompts, one a line") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; expected text, one prompt a line") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"{path}: found no prompt, expected one a line")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt(line, f"{path}, line {number}") for number, line in numbered]


def _prompt(line: str, where: str) -> str:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error}); for prompts as plain lines name the file .txt") from None
    prompt = data.get("prompt") if isinstance(data, dict) else None
    if not isinstance(prompt, str):
        found = f"the fields {', '.join(sorted(data))}" if isinstance(data, dict) else type(data).__name__
        raise UserError(f"{where}: found {found}, expected an object whose prompt is a string")
    return prompt


def records(prompts: Sequence[str], samples: int, answers: Iterable["Answer"]) -> Iterator[dict[str, Any]]:
    """What --json and --jsonl say of each answer, in the order of `LanguageModel.complete`."""
    for number, answer in enumerate(answers):
        yield {
            "prompt": prompts[number // samples],
            "sample": number % samples,
            "text": answer.text,
            "stop_reason": answer.completion.stop_reason,
            "tokens": len(answer.completion.ids),
            "logp_nats": float(answer.completion.logps.sum(dtype=float)),
        }


def note_cut(stop_reason: str, tokens: int) -> None:
    """Say on standard error that a text did not end by itself."""
    why = {
        "length": f"cut after {tokens} tokens; --max-new allows more",
        "context": f"cut after {tokens} tokens; the model's context is full",
    }
    if stop_reason in why:
        print(f"[{why[stop_reason]}]", file=sys.stderr)


def require_conversations(stage: Path) -> None:
    """Raise a UserError for a train stage that, with all it started from, never saw a conversation."""
    if conversed(stage) is False:
        raise UserError(
            f"{stage}: learned from running text only, so it goes on from text and answers nobody; use `ingot "
            "generate`, or train a stage on a corpus of format chat"
        )


class Dialogue:
    """A conversation at the terminal: its messages, and how much of it the model's context still holds.

    Args:
        model: one trained on conversations.
        system: instructions that come first; empty for none.
        max_new: longest answer in tokens; at most half of the context is kept free for it.
        options: what `LanguageModel.stream` takes besides.

    Raises:
        UserError: the model's tokenizer has no chat format.
    """

    def __init__(self, model: "LanguageModel", system: str = "", max_new: int = 512, **options: Any):
        from ingot.infer.streaming import room_for_prompt

        require_chat(model.loaded.tokenizer)
        self.model, self.options = model, {**options, "max_new": max_new}
        self.limit = room_for_prompt(model.loaded.config.context, max_new)
        self.messages: list[dict[str, str]] = []
        self.first = 0
        """Messages before this one no longer fit and are not shown to the model."""
        self.saved: Path | None = None
        self.system = system

    def run(self) -> None:
        """Read and answer until the input ends."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history for `input`)
        while (text := _ask()) is not None and text != "/quit":
            try:
                if text.startswith("/"):
                    self.command(text)
                elif text:
                    self.turn(text)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                print("\n[stopped]", file=sys.stderr)

    def command(self, text: str) -> None:
        """One of `COMMANDS`."""
        name, _, argument = text.partition(" ")
        argument = argument.strip()
        if name == "/reset":
            self.messages, self.first = [], 0
        elif name == "/system":
            self.system = argument
        elif name == "/save":
            self._save(argument)
        elif name == "/help":
            print("\n".join(f"  {command:13} {what}" for command, what in COMMANDS.items()))
            print(f"  Ctrl-C stops an answer. Lines between two lines of {QUOTES} are one message.")
        else:
            raise UserError(f"{name}: no such command; {nearest(name, [c.split()[0] for c in COMMANDS])}")

    def turn(self, text: str) -> None:
        """Answer one message; a stopped answer counts as far as it came, a failed one leaves no trace."""
        messages, parts = [*self.messages, {"role": "user", "content": text}], []
        first = self._fit(messages)
        if first > self.first:
            print(f"[the context is full: the oldest {first} messages are no longer seen]", file=sys.stderr)
        try:
            stream = self.model.stream(self._shown(messages, first), step=len(messages), **self.options)
            print("it>  ", end="", flush=True)
            for piece in stream:
                parts.append(piece)
                print(piece, end="", flush=True)
            print()
            note_cut(stream.answer.completion.stop_reason, len(stream.answer.completion.ids))
        except KeyboardInterrupt:
            if not parts:
                raise
            print("\n[stopped]", file=sys.stderr)
        self.messages, self.first = [*messages, {"role": "assistant", "content": "".join(parts)}], first

    def _shown(self, messages: list[dict[str, str]], first: int) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *messages[first:]]

    def _fit(self, messages: list[dict[str, str]]) -> int:
        """First message to show, so that an answer has room: whole turns go, the newest message stays."""
        for first in range(self.first, len(messages), 2):
            ids, _ = render(self._shown(messages, first), self.model.loaded.tokenizer, generation_prompt=True)
            if len(ids) <= self.limit:
                return first
        return len(messages) - 1

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save: expected a file, as in /save talk.jsonl")
        if not self.messages:
            raise UserError("/save: found no message to save")
        if (path := Path(name)) != self.saved and path.exists():
            raise UserError(f"{path}: exists already; choose another name")
        try:
            atomic_write(path, json.dumps({"messages": self._shown(self.messages, 0)}, ensure_ascii=False) + "\n")
        except OSError as error:  # the conversation goes on
            raise UserError(refused(error) or f"{path}: {error.strerror}; choose another name") from None
        self.saved = path
        print(f"wrote {path}")


def _ask() -> str | None:
    """The user's next message; None at the end of the input. Ctrl-C starts the line anew."""
    try:
        line = input("you> ").strip()
        if not line.startswith(QUOTES):
            return line
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(input("...> "))
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print("\n[/quit or Ctrl-D ends]", file=sys.stderr)
        return ""
