"""Held-out questions of a corpus as a task: which are asked, and how long an answer may be."""

import json
from pathlib import Path

import pytest

from ingot.evaluate.abilities import Subject, run_task
from ingot.model.config import ModelSettings
from ingot.model.transformer import build
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.stages import child
from ingot.stages.evaluation.exact_match import question_task, with_room
from ingot.stages.job import Input
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.settings import SPECIALS

RECIPE = """
[run]
name = "questions"

[stage.asked]
kind = "corpus"
sources = ["asked.jsonl"]
format = "FORMAT"
pii = false
holdout = { fraction = 0.5, by = "document" }
"""
SYSTEM = "Answer with one word."
LONG = "and " * 30 + "so on"


def _corpus(work: Path, kind: str, rows: list[dict]) -> Input:
    (work / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "questions.toml").write_text(RECIPE.replace("FORMAT", kind))
    graph = load_graph(Path("questions.toml"), [], Path("runs"))
    child.run(job_of(graph, graph.nodes["asked"], quiet=True))
    node = graph.nodes["asked"]
    return Input(node.name, node.key, graph.stage(node).path)


def _talk(n: int) -> dict:
    """Every third conversation has a system message, every third a long answer, every third two questions in a row."""
    user, answer = {"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"word {n}"}
    long = {"role": "assistant", "content": f"{LONG} {n}"}
    turns = [[{"role": "system", "content": SYSTEM}, user, answer], [user, long], [user, user, answer]][n % 3]
    return {"messages": turns}


def _subject(context: int) -> Subject:
    tokenizer = ByteBPE([bytes([b]) for b in range(256)], r"\s+|\S+")
    shape = ModelSettings(depth=1, width=16, heads=2, context=context).resolve(256 + len(SPECIALS))
    return Subject(build(shape, 0), tokenizer, chats=True)


def test_system_messages_are_asked_long_answers_fit_and_the_rest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    messages: list[str] = []
    task = question_task(_corpus(tmp_path, "chat", [_talk(n) for n in range(60)]), 200, messages.append)
    assert {item.system for item in task.items} == {"", SYSTEM}
    (left_out,) = messages
    held_out = int(left_out.split(" of ")[1].split()[0])
    assert f"exact_match: {held_out - len(task.items)} of {held_out} held-out documents of asked" in left_out
    subject = _subject(context=512)
    longest = max(len(subject.answer(item.targets[0], True)) for item in task.items)
    assert longest > 64
    assert with_room(task, subject, messages.append).head.max_new == longest + 1
    assert len(messages) == 1
    small = with_room(task, _subject(context=128), messages.append)
    assert small.head.max_new < longest
    number = sum(len(subject.answer(item.targets[0], True)) > small.head.max_new for item in task.items)
    assert f"{number} of {len(task.items)} answers of asked are longer" in messages[-1]
    run_task(_subject(context=128), small)


def test_a_system_message_is_rendered_before_the_question() -> None:
    subject = _subject(context=128)
    text = bytes(i for i in subject.prompt("why", True, SYSTEM) if i < 256).decode()
    assert text.index(SYSTEM) < text.index("why")
    assert subject.prompt("why", True) == subject.prompt("why", True, "") != subject.prompt("why", True, SYSTEM)
    assert subject.prompt("why", False, SYSTEM) == subject.prompt(f"{SYSTEM}\n\nwhy", False)


def test_an_answer_may_be_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"1 + {n} =", "answer": 1 + n if n % 2 else str(1 + n)} for n in range(40)]
    task = question_task(_corpus(tmp_path, "prompts", rows), 200, pytest.fail)
    numbers = {int(item.prompt.split()[2]) for item in task.items}
    assert {n % 2 for n in numbers} == {0, 1}
    assert all(int(item.targets[0]) == 1 + int(item.prompt.split()[2]) for item in task.items)
