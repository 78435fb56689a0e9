"""Terminal input and output of `ingot generate` and `ingot chat`.

Generated text goes to standard output. Messages about it go to standard error, so that a pipe receives the text alone.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.core.allocator import keep_freed_memory
from ingot.core.artifact import atomic_write
from ingot.core.errors import UserError, nearest, os_error_message, print_message
from ingot.core.events import Display
from ingot.core.process import machine_is_busy, shorten_spin
from ingot.objectives.settings import scores_rows
from ingot.pipeline.runs import is_run, read_run
from ingot.stages.job import MODEL, read_record
from ingot.stages.models.lineage import trained_on_conversations
from ingot.tokenizer.chat import render, require_chat

if TYPE_CHECKING:
    from ingot.api import LanguageModel
    from ingot.infer.streaming import Answer

QUOTES = '"""'
COMMANDS = {
    "/reset": "forget the conversation; the system message stays",
    "/system TEXT": "set the system message; without TEXT: remove it",
    "/save FILE": "write the conversation as a line of JSON, which a corpus of format chat can read",
    "/help": "show this list",
    "/quit": "end, like Ctrl-D",
}


def load_for_generation(stage: str | Path, best: bool, precision: str, step: int | None) -> "LanguageModel":
    """Load a stage's model and set up the process (allocator, thread spinning) for generation."""
    if machine_is_busy():
        shorten_spin(os.environ)  # OpenMP reads it when torch loads
    from ingot.api import load

    keep_freed_memory()
    return load(stage, best=best, precision=precision, step=step)


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: its non-empty lines, or the `prompt` of each object of a .jsonl file.

    Raises:
        UserError: the file cannot be read, is not UTF-8 or JSON, or a line has no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may contain other separators
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
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); for prompts as plain lines name the file .txt") from None
    prompt = data.get("prompt") if isinstance(data, dict) else None
    if not isinstance(prompt, str):
        found = f"the fields {', '.join(sorted(data))}" if isinstance(data, dict) else type(data).__name__
        raise UserError(f"{where}: found {found}, expected an object whose prompt is a string")
    return prompt


def records(prompts: Sequence[str], samples: int, answers: Iterable["Answer"]) -> Iterator[dict[str, Any]]:
    """The objects that --json and --jsonl print, in the order of `LanguageModel.complete`."""
    for number, answer in enumerate(answers):
        yield {
            "prompt": prompts[number // samples],
            "sample": number % samples,
            "text": answer.text,
            "stop_reason": answer.completion.stop_reason,
            "tokens": len(answer.completion.ids),
            "logp_nats": float(answer.completion.logps.sum(dtype=float)),
        }


def with_sources(
    answers: Iterable[dict[str, Any]], stage: Path, words: int, all_places: bool
) -> Iterator[dict[str, Any]]:
    """The records of answers with `sources`: the parts of their text that are in the training data, with their places.

    Args:
        answers: from `records`.
        stage: the stage that generated them.
        words: words of the shortest part.
        all_places: describe all places of each part, without progress; else the first one.
    """
    from ingot.stages.training.search import TrainingSearch

    search = TrainingSearch(stage, Display(quiet=all_places))
    for answer in answers:
        yield {**answer, "sources": search.found_parts(answer["text"], words, None if all_places else 1)}


def print_record(record: Mapping[str, Any]) -> None:
    """Print a prompt with its answer; with `sources` the parts from the training data are marked, and listed below."""
    from ingot.report.places import marked, part_lines
    from ingot.report.terminal import console

    sources = record.get("sources", [])
    text = marked(record["text"], [(part["first"], part["last"]) for part in sources])
    print(f"{record['prompt']}{text}", flush=True)
    for line in part_lines(sources):
        console().print(line, soft_wrap=True)


def report_truncation(stop_reason: str, tokens: int) -> None:
    """Print to standard error why a text was cut off; nothing where the model ended it."""
    messages = {
        "length": f"cut after {tokens} tokens; --max-new allows more",
        "context": f"cut after {tokens} tokens; the model's context is full",
    }
    if stop_reason in messages:
        print_message(f"[{messages[stop_reason]}]")


def chat_stage(path: Path) -> Path:
    """The stage to chat with: the one at the path, or the last one of the run there that was trained on conversations.

    Raises:
        UserError: no finished stage of the run was.
    """
    if not is_run(path):
        return path
    trained = [path / name for name, out in read_run(path).stages.items() if out.is_done() and (out / MODEL).exists()]
    for stage in reversed(trained):
        if trained_on_conversations(stage) and not scores_rows(read_record(stage)["settings"]):
            return stage
    advice = f"; `ingot generate {trained[-1]}` continues text" if trained else ""
    raise UserError(
        f"{path}: found no stage that is done and was trained on conversations, expected one to chat with{advice}"
    )


def require_conversations(stage: Path) -> None:
    """Check that a model, or one that it was started from, was trained on conversations.

    Raises:
        UserError: it was trained on plain text only.
    """
    if trained_on_conversations(stage) is False:
        raise UserError(
            f"{stage}: trained on plain text only, expected a model trained on conversations; use `ingot generate`, "
            "or train a stage on a corpus of format chat"
        )


class Dialogue:
    """A conversation at the terminal.

    Args:
        model: a model that was trained on conversations.
        system: system message; empty for none.
        max_new: longest answer in tokens; at most half of the context is reserved for it.
        options: further options of `LanguageModel.stream`.

    Raises:
        UserError: the model's tokenizer has no chat template.
    """

    def __init__(self, model: "LanguageModel", system: str = "", max_new: int = 512, **options: Any):
        from ingot.infer.streaming import max_prompt_length

        require_chat(model.loaded.tokenizer)
        self.model, self.options = model, {**options, "max_new": max_new}
        self.max_prompt = max_prompt_length(model.loaded.config.context, max_new)
        self.messages: list[dict[str, str]] = []
        self.first = 0
        """Index of the first message that fits into the context; earlier ones are left out of the prompt."""
        self.saved: Path | None = None
        self.system = system

    def run(self) -> None:
        """Answer messages until the input ends."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history for `input`)
        while (text := _read_message()) is not None and text != "/quit":
            try:
                if text.startswith("/"):
                    self.command(text)
                elif text:
                    self.answer(text)
            except UserError as error:
                print_message(f"error: {error}")
            except KeyboardInterrupt:
                print_message("\n[stopped]")

    def command(self, text: str) -> None:
        """Execute one of `COMMANDS`."""
        name, _, argument = text.partition(" ")
        argument = argument.strip()
        if name == "/reset":
            self.messages, self.first = [], 0
        elif name == "/system":
            self.system = argument
        elif name == "/save":
            self._save(argument)
        elif name == "/help":
            print("\n".join(f"  {command:13} {description}" for command, description in COMMANDS.items()))
            print(f"  Ctrl-C stops an answer. Text between {QUOTES} and {QUOTES} may have several lines.")
        else:
            raise UserError(f"{name}: no such command; {nearest(name, [c.split()[0] for c in COMMANDS])}")

    def answer(self, text: str) -> None:
        """Answer one message.

        An answer that Ctrl-C stops stays in the conversation as far as it was generated. After an error the
        conversation is unchanged.
        """
        messages, pieces = [*self.messages, {"role": "user", "content": text}], []
        first = self._fit(messages)
        if first > self.first:
            print_message(f"[the context is full: the model no longer sees the oldest {first} messages]")
        try:
            stream = self.model.stream(self._visible(messages, first), step=len(messages), **self.options)
            print("it>  ", end="", flush=True)
            for piece in stream:
                pieces.append(piece)
                print(piece, end="", flush=True)
            print()
            report_truncation(stream.answer.completion.stop_reason, len(stream.answer.completion.ids))
        except KeyboardInterrupt:
            if not pieces:
                raise
            print_message("\n[stopped]")
        self.messages, self.first = [*messages, {"role": "assistant", "content": "".join(pieces)}], first

    def _visible(self, messages: list[dict[str, str]], first: int) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *messages[first:]]

    def _fit(self, messages: list[dict[str, str]]) -> int:
        """Index of the first message of a prompt that leaves room for an answer.

        Complete turns (a message and its answer) are dropped, oldest first. The newest message always stays.
        """
        for first in range(self.first, len(messages), 2):
            ids, _ = render(self._visible(messages, first), self.model.loaded.tokenizer, generation_prompt=True)
            if len(ids) <= self.max_prompt:
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
            atomic_write(path, json.dumps({"messages": self._visible(self.messages, 0)}, ensure_ascii=False) + "\n")
        except OSError as error:  # must not end the conversation
            raise UserError(os_error_message(error) or f"{path}: {error.strerror}; choose another name") from None
        self.saved = path
        print(f"wrote {path}")


def _read_message() -> str | None:
    """The user's next message; None at the end of the input. Ctrl-C discards the line."""
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
        print_message("\n[/quit or Ctrl-D ends]")
        return ""
