"""Questions about a module of the library, from its source."""

import json
import re
from pathlib import Path

import pytest

from ingot.corpus.readers.python_questions import MADE_UP, docs_chats, docs_preferences, docs_prompts

SOURCE = """
def load(fp, /, size, *paths, cls=None, deep, hook={}, **kw): ...

class Reader:
    def close(self): ...
    def read(self, n=-1, *, late=False) -> bytes: ...
    @staticmethod
    def make(a, b=2): ...

def _private(x=1): ...
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "shelf.py"
    path.write_text(SOURCE)
    return path


def _asked(module: Path) -> dict[str, list[str]]:
    """Answer -> texts of its questions."""
    asked: dict[str, list[str]] = {}
    for text, extra in docs_prompts(module, "tools/shelf.py"):
        asked.setdefault(json.loads(extra or "")["answer"], []).append(json.loads(text)[0]["content"])
    return asked


def test_answers_are_read_out_of_the_question(module: Path) -> None:
    asked = _asked(module)
    assert set(asked) - {"only none", "needs none"} == {
        "import tools.shelf",
        "class tools.shelf.Reader",
        "needs fp, size, deep",
        "only cls, hook",
        "only n, late",
        "needs a",
        "only b",
        "by default b=2",
        *(a for a in asked if a in ("by default cls=None", "by default hook={}")),
        *(a for a in asked if a in ("by default n=-1", "by default late=False")),
    }
    assert len(asked["import tools.shelf"]) == 2  # load, Reader
    assert len(asked["class tools.shelf.Reader"]) == 3
    assert not any("_private" in text for texts in asked.values() for text in texts)


def test_a_wrong_answer_has_one_mistake_and_only_names_of_its_question(module: Path) -> None:
    answers = {question: answer for answer, questions in _asked(module).items() for question in questions}
    pairs = [json.loads(text) for text, _ in docs_preferences(module, "tools/shelf.py")]
    assert len(pairs) >= 6
    for pair in pairs:
        (prompt,), (chosen,), (rejected,) = (pair[name] for name in ("prompt", "chosen", "rejected"))
        assert chosen["content"] == answers[prompt["content"]] != rejected["content"]
        (kind, right), (same_kind, wrong) = (message["content"].split(" ", 1) for message in (chosen, rejected))
        assert kind == same_kind
        parts = [re.split(r"\.|, ", text) for text in (right, wrong)]
        assert len(set(parts[0]) - set(parts[1])) == 1, (right, wrong)
        assert set(re.findall(r"\w+", wrong)) <= set(re.findall(r"\w+", prompt["content"])) | {"none", "default"}


def test_conversations_ask_each_question_again_about_made_up_names(module: Path) -> None:
    chats = [[message["content"] for message in json.loads(text)] for text, _ in docs_chats(module, "tools/shelf.py")]
    real = [[question, answer] for answer, questions in _asked(module).items() for question in questions]
    assert sorted(chats[: len(real)]) == sorted(real)
    others = chats[len(real) :]
    assert len(others) == MADE_UP * len(real)
    assert not any("tools" in text for chat in others for text in chat)
    for question, answer in others:
        names = set(re.findall(r"\w+", answer.partition(" ")[2])) - {"none"}
        assert names <= set(re.findall(r"\w+", question)), (question, answer)
