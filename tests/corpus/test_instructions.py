"""Kinds of instructions on a labelled handful, counts that add up, and the report."""

import json
from pathlib import Path

import pytest

from ingot.corpus.instructions import is_refusal, kind_of
from ingot.report.html.panels import corpus
from tests.corpus.corpus_helpers import jsonl, make

LABELLED = {
    "Translate the following sentence into French: The weather is nice.": "translation",
    "How do you say 'good morning' in Spanish? Write it in Spanish.": "translation",
    "Write a Python function that reverses a list.": "code",
    "Fix the bug:\n```\nfor i in range(n) print(i)\n```": "code",
    "Summarize the article below in two sentences.": "summary",
    "What are the main points of this text?": "summary",
    "Classify the following review as positive or negative.": "classification",
    "Identify whether this email is spam.": "classification",
    "Write a short story about a dragon who likes tea.": "creative",
    "Compose a haiku about autumn.": "creative",
    "Calculate the area of a circle with radius 5.": "maths",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?": "maths",
    "What is 17 * 23?": "maths",
    "Rewrite the sentence in the passive voice: The cat chased the mouse.": "rewriting",
    "What is the capital of Peru?": "question",
    "Explain why the sky is blue.": "question",
    "Hello there!": "other",
    "你好，世界": "other",
}


@pytest.mark.parametrize("instruction", LABELLED)
def test_H4_kinds_of_instructions(instruction: str):
    assert kind_of(instruction) == LABELLED[instruction]


def test_H4_refusals_are_told_from_answers():
    refusals = [
        "I'm sorry, but I can't help with that.",
        "I cannot do this.",
        "As an AI language model, I have no body.",
    ]
    answers = ["Sure, here it is.", "The word 'sorry' is an adjective.", "I can show you how.", "AI is a field."]
    assert [*map(is_refusal, refusals + answers)] == [True] * 3 + [False] * 4


def chat(*turns: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


def test_H4_the_report_adds_up(tmp_path: Path):
    rows = [
        chat("What is 2 + 3?", "5"),
        chat("what is  2 + 3?", "It is 5."),  # the same prompt
        chat("Write a poem about rain.", "I'm sorry, I can't."),
        chat("Who are you?", "A model.", "Who made you?", "People."),
    ]
    out = tmp_path / "out"
    make(out, [{"path": str(jsonl(tmp_path / "in.jsonl", rows)), "repeat": 3}], format="chat")
    found = json.loads((out / "instructions.json").read_text())
    assert {name: kind["documents"] for name, kind in found["kinds"].items()} == {
        "creative": 1,
        "maths": 2,
        "question": 1,
    }
    counts = {"documents": 4, "multi_turn": 1, "system": 0, "refusals": 1, "repeated_prompts": 1}
    assert found["counts"] == counts
    assert found["turns"] == {"1": 3, "2": 1}
    assert "Write a poem about rain." in corpus(out)


def test_H4_the_report_counts_items_of_evaluations_and_drops_none(tmp_path: Path):
    """A copy with a word of ten changed counts, the same subject does not; copies by `repeat` count once."""
    question = "A farmer has seven red hens and buys nine brown ones; how many hens does the farmer own in the end?"
    task = jsonl(tmp_path / "mine.jsonl", [{"task": "mine"}, {"prompt": question, "answer": "16"}, {"prompt": "Why?"}])
    rows = [
        chat("Tell me about hens.", "A farmer has hens."),
        chat(question.replace("brown", "white"), "16"),
        chat("Hello.", "Here is a riddle. " + question),
    ]
    source = {"path": str(jsonl(tmp_path / "in.jsonl", rows)), "repeat": 2}
    out = tmp_path / "out"
    make(out, [source], format="chat", overlap_with=[str(task)])
    found = json.loads((out / "instructions.json").read_text())
    offset = len(json.dumps(rows[0])) + 1
    item = {"documents": 2, "path": source["path"], "offset": offset}
    assert found["overlap"] == {"documents": 2, "items": {f"{task}: line 2": item}, "too_short": 1}
    assert found["counts"]["documents"] == 3
    assert f"2 (66.7 %) kept documents contain one of {task} (1 different ones)" in corpus(out)
    make(tmp_path / "none", [source], format="chat")
    assert "not searched for" in corpus(tmp_path / "none")


def test_H4_pairs_and_prompts_have_one_too(tmp_path: Path):
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"prompt": "Summarize this.", "chosen": "a b", "rejected": "c"}])
    make(tmp_path / "pairs", pairs, format="pairs")
    prompts = jsonl(tmp_path / "prompts.jsonl", [{"prompt": "What is 1 + 1?"}])
    make(tmp_path / "prompts", prompts, format="prompts")
    kinds = [[*json.loads((tmp_path / n / "instructions.json").read_text())["kinds"]] for n in ("pairs", "prompts")]
    assert kinds == [["summary"], ["maths"]]
