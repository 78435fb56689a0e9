"""Which answers of a conversation are trained on, with or without their reasoning."""

import json
from pathlib import Path

import pytest

from ingot.corpus.documents import iter_texts
from tests.corpus.corpus_helpers import funnel, jsonl, make, settings

ASK, AGAIN = {"role": "user", "content": "Two and two?"}, {"role": "user", "content": "And five?"}
FOUR = {"role": "assistant", "content": "four"}
THOUGHT = {"role": "assistant", "content": "nine", "reasoning_content": "four, so nine"}
INLINE = {"role": "assistant", "content": "<think>\nfour, so nine\n</think>\n\nnine"}
OFF = {"train": False}


def documents(out: Path, rows: list, **table: object) -> list:
    make(out, jsonl(out.with_suffix(".jsonl"), rows), **{"format": "chat", **table})
    return [json.loads(text) for text in iter_texts(out)]


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({"messages": [ASK, FOUR, AGAIN, THOUGHT]}, [ASK, FOUR | OFF, AGAIN, THOUGHT]),
        ({"messages": [ASK, FOUR, AGAIN, THOUGHT | OFF]}, [ASK, FOUR, AGAIN, THOUGHT | OFF]),
        ({"messages": [ASK, FOUR, FOUR, AGAIN]}, [ASK, FOUR | OFF, FOUR, AGAIN]),
        ({"messages": [ASK, FOUR]}, [ASK, FOUR]),
        (
            {"conversations": [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "four"}] * 2},
            [ASK, FOUR | OFF, ASK, FOUR],
        ),
        (
            {"history": [["Two and two?", "four"]], "prompt": "And five?", "completion": "four"},
            [ASK, FOUR | OFF, AGAIN, FOUR],
        ),
    ],
)
def test_only_the_last_answer_is_trained_on(tmp_path, row, kept):
    assert documents(tmp_path / "last", [row], train_on="last answer") == [kept]
    trained = [m for m in documents(tmp_path / "all", [row])[0] if m["role"] == "assistant" and m.get("train", True)]
    assert len(trained) >= 1


@pytest.mark.parametrize("answer", [THOUGHT, INLINE, {**FOUR, "content": "nine", "thinking": "four, so nine"}])
def test_reasoning_is_kept_or_dropped(tmp_path, answer):
    row = {"messages": [ASK, FOUR, AGAIN, answer]}
    [kept] = documents(tmp_path / "kept", [row])
    assert "four, so nine" in json.dumps(kept[3])
    assert documents(tmp_path / "dropped", [row], reasoning="drop") == [[ASK, FOUR, AGAIN, {**FOUR, "content": "nine"}]]


def test_reasoning_of_pairs_and_prompts_is_dropped_too(tmp_path):
    pair = {
        "prompt": [ASK, INLINE, AGAIN],
        "chosen": [THOUGHT],
        "rejected": [{**INLINE, "content": "<think>x</think>ten"}],
    }
    [kept] = documents(tmp_path / "pairs", [pair], format="pairs", reasoning="drop")
    nine = {"role": "assistant", "content": "nine"}
    assert kept == {"prompt": [ASK, nine, AGAIN], "chosen": [nine], "rejected": [{**nine, "content": "ten"}]}
    prompts = documents(tmp_path / "prompts", [{"messages": [ASK, THOUGHT, AGAIN]}], format="prompts", reasoning="drop")
    assert prompts == [[ASK, nine, AGAIN]]


def test_an_answer_that_is_all_reasoning_is_dropped_as_empty(tmp_path):
    rows = [{"messages": [ASK, {**FOUR, "content": "<think>four</think>"}]}, {"messages": [ASK, FOUR]}]
    assert documents(tmp_path / "out", rows, reasoning="drop") == [[ASK, FOUR]]
    assert funnel(tmp_path / "out")["dropped"]["empty"]["documents"] == 1


def test_what_a_user_writes_is_no_reasoning(tmp_path):
    row = {"messages": [{"role": "user", "content": "What does </think> mean?"}, FOUR]}
    assert documents(tmp_path / "out", [row], reasoning="drop") == [row["messages"]]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"format": "pairs", "train_on": "last answer"}, "train_on: not used by format pairs; remove it"),
        ({"format": "text", "train_on": "last answer"}, "train_on: not used by format text; remove it"),
        ({"format": "text", "reasoning": "drop"}, "reasoning: not used by format text; remove it"),
    ],
)
def test_settings_that_the_format_does_not_use(table, words):
    with pytest.raises(ValueError, match=words):
        settings("x.jsonl", **table)
