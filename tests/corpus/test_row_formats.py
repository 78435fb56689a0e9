"""Rows in the shapes people have become conversations, pairs and prompts; every other row is named, none is guessed."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from ingot.core.errors import UserError
from ingot.corpus.documents import read_documents
from ingot.corpus.readers.files import BadRow
from ingot.corpus.readers.read import read
from ingot.corpus.readers.row_formats import row_parser
from tests.conftest import DATA
from tests.corpus.corpus_helpers import funnel, jsonl, make, quarantine, settings
from tests.corpus.test_readers import WRITERS, parquet

U, A, S, T = "user", "assistant", "system", "tool"


def talk(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def made(format: Any, row: Any, **fields: str) -> Any:
    return json.loads(row_parser(format, None, fields)(row).text)  # type: ignore[arg-type]


def why(format: Any, row: Any, **fields: str) -> str:
    with pytest.raises(BadRow) as caught:
        row_parser(format, None, fields)(row)  # type: ignore[arg-type]
    return str(caught.value)


def share_gpt(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": said} for speaker, said in turns]


QA = talk((U, "q"), (A, "a"))
SQA = [*talk((S, "s")), *QA]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": QA, "id": 7}, QA),
        (QA, QA),
        ({"messages": json.dumps(QA)}, QA),
        ({"messages": QA, "system": "s"}, SQA),
        ({"messages": QA, "prompt": "q", "completion": "a"}, QA),
        ({"conversations": share_gpt(("human", "q"), ("gpt", "a"))}, QA),
        ({"conversations": share_gpt(("system", "s"), ("user", "q"), ("chatgpt", "a"))}, SQA),
        ({"conversations": share_gpt(("human", "q"), ("gpt", "a")), "system": ""}, QA),
        (share_gpt(("human", "q"), ("tool", "t"), ("gpt", "a")), talk((U, "q"), (T, "t"), (A, "a"))),
        ({"instruction": "q", "input": "", "output": "a"}, QA),
        ({"instruction": "q", "output": "a"}, QA),
        ({"instruction": "q", "input": "more", "output": "a"}, talk((U, "q\n\nmore"), (A, "a"))),
        ({"prompt": "q", "completion": "a"}, QA),
        ({"prompt": "q", "response": "a"}, QA),
        ({"question": "q", "answer": "a"}, QA),
        ({"question": "q", "answer": "a", "response": ""}, QA),
        ({"system_prompt": "s", "question": "q", "response": "a"}, SQA),
        ({"prompt": talk((U, "q")), "completion": talk((A, "a"))}, QA),
        ({"instruction": "q", "context": "more", "response": "a", "category": "c"}, talk((U, "q\n\nmore"), (A, "a"))),
        ({"messages": talk(("developer", "s"), (U, "q"), (A, "a"))}, SQA),
        (
            {"messages": [QA[0], {"role": A, "content": [{"type": "text", "text": t} for t in ("a", "b")]}]},
            talk((U, "q"), (A, "ab")),
        ),
        ({"messages": [*QA[:1], {**QA[1], "weight": 0}, *QA]}, [*QA[:1], {**QA[1], "train": False}, *QA]),
        ({"messages": [QA[0], {**QA[1], "weight": 1}]}, [QA[0], {**QA[1], "train": True}]),
        (
            {"instruction": "r", "history": [["q", "a"]], "output": "b"},
            [QA[0], {**QA[1], "train": False}, *talk((U, "r"), (A, "b"))],
        ),
        (
            {"prompt": [*talk((S, "s"), (U, "r"))], "history": '[["q", "a"]]', "completion": "b"},  # as tables hold it
            [*talk((S, "s")), QA[0], {**QA[1], "train": False}, *talk((U, "r"), (A, "b"))],
        ),
        ({"instruction": "q", "input": "", "context": "more", "output": "a"}, talk((U, "q\n\nmore"), (A, "a"))),
        ({"instruction": "q", "context": ["one", "two"], "output": "a"}, talk((U, "q\n\none\n\ntwo"), (A, "a"))),
        ({"messages": [{**QA[0], "weight": 1}, QA[1]]}, QA),
    ],
)
def test_chat_in_every_shape(row, expected):
    assert made("chat", row) == expected


def test_a_field_with_another_role_does_not_stand_below_the_instruction():
    row = {"instruction": "q", "context": "a"}
    assert made("chat", row, completion="context") == QA


def test_of_a_prompt_with_history_the_completion_alone_is_learned():
    found = made("chat", {"prompt": [*QA, *talk((U, "r"))], "completion": "b"})
    assert found == [QA[0], {**QA[1], "train": False}, *talk((U, "r"), (A, "b"))]
    assert made("chat", {"messages": [QA[0], {**QA[1], "train": False}, QA[1]]})[1]["train"] is False


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"text": "a", "id": 1},
            "expected messages, conversations, or a prompt .* found 'text', 'id'; name others with fields",
        ),
        ({"prompt": "q"}, "found 'prompt'"),
        (
            {"question": "q", "answer": "a", "response": "b"},
            "both 'response' and 'answer' may be the completion",
        ),
        ({"messages": []}, r"field 'messages' is a JSON array, expected a non-empty list of messages"),
        ({"messages": "[1"}, "field 'messages': malformed JSON"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "message 1 of 'messages' has role 'bot', expected one",
        ),
        (
            {"conversations": [{"from": "gpt"}]},
            "message 1 of 'conversations' has no string \"value\", expected {from",
        ),
        ({"messages": [{"role": A, "content": None}]}, "message 1 of 'messages' has no string \"content\""),
        ({"messages": ["x"]}, "message 1 of 'messages' is a JSON string"),
        (
            {"messages": [QA[0], {"role": A, "content": None, "tool_calls": [{"name": "f"}]}]},
            "message 2 .* calls a tool .'tool_calls'",
        ),
        ({"messages": [{"role": U, "content": [{"type": "image_url"}]}]}, "has a part of type 'image_url'"),
        ({"messages": [QA[0], {**QA[1], "weight": 0.5}]}, "has weight = 0.5, expected true, false, 0 or 1"),
        ({"messages": [QA[0], {**QA[1], "train": "no"}]}, "has train = 'no', expected true, false, 0 or 1"),
        ({"instruction": "q", "input": "x", "context": "y", "output": "a"}, "both 'input' and 'context'"),
        ({"instruction": "q", "history": ["a"], "output": "b"}, "field 'history' .* expected pairs of strings"),
        ({"messages": SQA, "system": "t"}, "the messages begin with one"),
        ({"messages": QA, "system": 3}, "field 'system' is a JSON number, expected a string"),
        ({"prompt": "q", "completion": talk((U, "a"))}, "the completion begins with a user message"),
        (
            {"prompt": 3, "completion": "a"},
            "field 'prompt' is a JSON number, expected a string or a non-empty list",
        ),
        ({"instruction": "q", "input": 3, "output": "a"}, "field 'input' is a JSON number"),
        ("text", "found a JSON string, expected an object, or a list of messages"),
    ],
)
def test_chat_of_no_shape_is_named(row, reason):
    assert re.search(reason, why("chat", row)), why("chat", row)


PAIR = {"prompt": talk((U, "q")), "chosen": talk((A, "good")), "rejected": talk((A, "bad"))}
GOOD, BAD = [*talk((U, "q")), *PAIR["chosen"]], [*talk((U, "q")), *PAIR["rejected"]]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        PAIR,
        {"prompt": "q", "chosen": PAIR["chosen"], "rejected": "bad"},
        {"question": "q", "chosen": "good", "rejected": "bad", "score": 3},
        {"instruction": "q", "input": "", "output": "x", "chosen": "good", "rejected": "bad"},
        {"chosen": GOOD, "rejected": BAD},
        {"prompt": "q", "chosen": GOOD, "rejected": BAD, "messages": GOOD},
        {"prompt": "q", "chosen": PAIR["chosen"][0], "rejected": {"from": "gpt", "value": "bad"}},
    ],
)
def test_pairs_in_every_shape(row):
    assert made("pairs", row) == PAIR


def test_pairs_share_the_longest_prompt_and_keep_their_turns():
    history = talk((S, "s"), (U, "1"), (A, "2"), (U, "3"))
    found = made("pairs", {"chosen": [*history, *talk((A, "x"))], "rejected": [*history, *talk((A, "y"))]})
    assert found == {"prompt": history, "chosen": talk((A, "x")), "rejected": talk((A, "y"))}
    longer = [*history, *talk((A, "x"), (U, "4"), (A, "5"))]
    found = made("pairs", {"chosen": [*history, *talk((A, "x"))], "rejected": longer})
    assert found["rejected"] == talk((A, "x"), (U, "4"), (A, "5"))
    with_system = made("pairs", {"system": "s", "question": "q", "chosen": "a", "rejected": "b"})
    assert with_system["prompt"] == talk((S, "s"), (U, "q"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "a"}, "expected chosen and rejected, with a prompt .*; found 'prompt', 'chosen'"),
        ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}, "are not split"),
        ({"prompt": "q", "chosen": GOOD, "rejected": "bad"}, "one of chosen and rejected begins with the prompt"),
        ({"prompt": "other", "chosen": GOOD, "rejected": BAD}, "differs from the prompt of the row"),
        ({"chosen": GOOD, "rejected": talk((U, "r"), (A, "bad"))}, "without a common first message"),
        (
            {"chosen": [*GOOD, *talk((U, "1"), (A, "x"))], "rejected": [*GOOD, *talk((U, "2"), (A, "x"))]},
            "the chosen begins with a user message, expected an assistant's",
        ),
        (
            {"prompt": "q", "chosen": [*talk((A, "x"), (U, "y"))], "rejected": "z"},
            "the chosen ends with a user message",
        ),
        ({"prompt": "q", "chosen": 4, "rejected": "z"}, "field 'chosen' is a JSON number"),
        ({"prompt": "q", "question": "r", "chosen": "a", "rejected": "b"}, "both 'prompt' and 'question'"),
    ],
)
def test_pairs_of_no_shape_are_named(row, reason):
    assert re.search(reason, why("pairs", row)), why("pairs", row)


@pytest.mark.parametrize(
    ("row", "expected", "extra"),
    [
        ({"prompt": "q"}, talk((U, "q")), None),
        ({"question": "q", "answer": "42", "n": [1]}, talk((U, "q")), {"answer": "42", "n": [1]}),
        ({"messages": [*SQA, *talk((U, "r"))]}, [*SQA, *talk((U, "r"))], None),
        (talk((U, "q")), talk((U, "q")), None),
        ({"prompt": talk((U, "q")), "reward_model": {"truth": 1}}, talk((U, "q")), {"reward_model": {"truth": 1}}),
        ({"instruction": "q", "input": "i", "output": "o"}, talk((U, "q\n\ni")), {"output": "o"}),
        ({"conversations": share_gpt(("human", "q"))}, talk((U, "q")), None),
        ({"prompt": "q", "messages": QA, "x": None}, talk((U, "q")), {"messages": QA}),
    ],
)
def test_prompts_in_every_shape_keep_their_other_fields(row, expected, extra):
    document = row_parser("prompts", None, {})(row)
    assert json.loads(document.text) == expected
    assert (document.extra and json.loads(document.extra)) == extra


def test_prompts_end_with_what_is_to_be_answered():
    assert (
        why("prompts", {"messages": QA})
        == "the last message is the assistant's, expected a user's for the model to answer"
    )
    assert why("prompts", {"answer": "x"}).startswith("not a row of prompts: expected a prompt (question, instruction)")
    assert "; found 'answer'; name others with fields = { prompt = ... }" in why("prompts", {"answer": "x"})


def test_other_names_are_given_with_fields(tmp_path):
    assert (
        made("chat", {"problem": "q", "solution": "a", "messages": QA}, prompt="problem", completion="solution") == QA
    )
    assert made("pairs", {"q": "q", "good": "good", "rejected": "bad"}, prompt="q", chosen="good") == PAIR
    assert made("prompts", {"prompt": "x", "q": "q"}, prompt="q") == talk((U, "q"))
    assert "found 'a', fields.prompt = 'q'" in why("prompts", {"a": 1}, prompt="q")
    rows = [{"q": "1", "good": "a", "bad": "b"}]
    other = {
        "path": str(jsonl(tmp_path / "b.jsonl", [{"q": "2", "best": "a", "bad": "b"}])),
        "fields": {"chosen": "best"},
    }
    names = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    result = make(tmp_path / "out", [jsonl(tmp_path / "a.jsonl", rows), other], format="pairs", fields=names)
    assert result["documents"] == 2
    for table, sentence in [
        ({"format": "text", "fields": {"prompt": "q"}}, "fields.prompt: not used by format text; use `field`"),
        (
            {"format": "chat", "fields": {"chosen": "q"}},
            "not used by format chat; known: messages, system, prompt",
        ),
        ({"format": "pairs", "field": "q"}, "field: not used by format pairs"),
        ({"format": "prompts", "quality": "text"}, "expected format text"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            settings("x", **table)


def documents(out: Path) -> list[dict[str, Any]]:
    return [row for batch in read_documents(out) for row in batch.to_pylist()]


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1).map(lambda t: f"x{t}x")


@examples(max_examples=15, deadline=None)
@given(rows=st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=5))
def test_rows_in_every_kind_of_file_are_the_same_documents(rows):
    tables = {
        "chat": [{"question": q, "answer": a} for q, a, _ in rows],
        "pairs": [{"prompt": q, "chosen": a, "rejected": b} for q, a, b in rows],
        "prompts": [{"prompt": q, "answer": a} for q, a, _ in rows],
    }
    with tempfile.TemporaryDirectory() as name:
        for format, table in tables.items():
            expected = [(d.text, d.extra) for d in map(row_parser(format, None, {}), table)]  # type: ignore[arg-type]
            for file in ("a.jsonl", "a.json", "object.json", "a.csv", "a.tsv", "groups.parquet", "a.json.gz"):
                path = Path(name, file)
                path.write_bytes(WRITERS[file](table))
                bad: list[Any] = []
                found = [r for t in read(settings(path, format=format), bad.append) for r in t.to_pylist()]
                assert ([(r["text"], r["extra"]) for r in found], bad) == (expected, []), (format, file)


def test_nested_rows_of_parquet_are_those_of_json(tmp_path):
    rows = [
        {"chosen": GOOD, "rejected": BAD, "meta": {"score": 1.5, "by": "x"}},
        {"chosen": SQA, "rejected": [*SQA[:2], *talk((A, "z"))], "meta": None},
    ]
    (tmp_path / "a.parquet").write_bytes(parquet(rows))
    jsonl(tmp_path / "a.jsonl", rows)
    found = []
    for name in ("a.parquet", "a.jsonl"):
        make(tmp_path / f"out-{name}", tmp_path / name, format="pairs")
        found.append([(d["text"], d["extra"], d["cluster"]) for d in documents(tmp_path / f"out-{name}")])
    assert found[0] == found[1]
    assert json.loads(found[0][0][1]) == {"meta": {"by": "x", "score": 1.5}}


def test_pairs_through_the_funnel(tmp_path):
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "same  thing", "rejected": "same thing\n"},
        {"prompt": "q", "chosen": " ", "rejected": "b"},
        {"prompt": "", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "b", "rejected": "a"},
        {"prompt": "q", "chosen": "a"},
        {"text": "x"},
        5,
    ]
    out = tmp_path / "out"
    make(out, jsonl(tmp_path / "a.jsonl", rows), format="pairs")
    total = funnel(out)
    dropped = {reason: counts["documents"] for reason, counts in total["dropped"].items()}
    assert dropped == {"empty": 2, "equal_sides": 1, "exact_duplicate": 1}
    assert (total["in"]["documents"], total["kept"]["documents"], total["quarantined"]["documents"]) == (9, 2, 3)
    assert total["in"]["bytes"] == sum(
        counts["bytes"] for counts in (total["kept"], total["quarantined"], *total["dropped"].values())
    )
    assert [b["line"] for b in quarantine(out)] == [7, 8, 9]
    assert len({d["cluster"] for d in documents(out)}) == 1


@pytest.mark.parametrize("format", ["pairs", "prompts"])
def test_rows_of_one_prompt_are_held_out_together(tmp_path, format):
    row = {"pairs": {"chosen": "good", "rejected": "bad"}, "prompts": {}}[format]
    rows = [{"prompt": f"question {i % 300}", **row, "n": i} for i in range(900)]
    if format == "pairs":
        rows = [{**r, "chosen": f"good {r['n']}"} for r in rows]
    out = tmp_path / "out"
    make(out, jsonl(tmp_path / "a.jsonl", rows), format=format, holdout={"fraction": 0.2})
    sides: dict[str, set[str]] = {}
    for d in documents(out):
        document = json.loads(d["text"])
        prompt = document["prompt"] if format == "pairs" else document
        sides.setdefault(prompt[0]["content"], set()).add(d["split"])
    assert len(documents(out)) == 900
    assert len(sides) == 300
    assert all(len(side) == 1 for side in sides.values())
    held = sum(side == {"val"} for side in sides.values())
    assert 35 < held < 85


def test_prompts_repeat_each_other_by_the_whole_row(tmp_path):
    rows = [
        {"prompt": "q", "answer": "1"},
        {"answer": "1", "prompt": "q"},
        {"prompt": "q", "answer": "2"},
        {"prompt": " q", "answer": "1", "id": 3},
        {"prompt": "q"},
    ]
    out = tmp_path / "out"
    make(out, jsonl(tmp_path / "a.jsonl", rows), format="prompts")
    assert [d["extra"] for d in documents(out)] == [
        '{"answer": "1"}',
        '{"answer": "2"}',
        '{"answer": "1", "id": 3}',
        None,
    ]
    assert len({d["cluster"] for d in documents(out)}) == 1  # " q" is the same text, white space aside


@pytest.mark.parametrize("format", ["chat", "pairs", "prompts"])
def test_white_space_in_a_message_makes_no_other_row(tmp_path, format):
    """JSON writes a line's end as two characters and puts a quote before a blank: neither tells rows apart."""
    rows = []
    for question in ("what is\nthis?", "what is this?", " what  is this?\n"):
        row = {"prompt": question, "completion": "a", "chosen": "a", "rejected": "b"}
        names = {"chat": ("prompt", "completion"), "pairs": ("prompt", "chosen", "rejected"), "prompts": ("prompt",)}
        rows.append({name: row[name] for name in names[format]})
    out = tmp_path / "out"
    counts = make(out, jsonl(tmp_path / "a.jsonl", rows), format=format)
    assert counts["documents"] == 1
    assert r"what is\nthis?" in documents(out)[0]["text"]  # the document itself keeps its lines


def test_the_system_text_of_a_row_heads_the_prompt_that_two_conversations_fraction():
    sides = {name: talk(("user", "q"), ("assistant", name)) for name in ("chosen", "rejected")}
    document = made("pairs", {"system": "in French", **sides})
    assert [(m["role"], m["content"]) for m in document["prompt"]] == [("system", "in French"), ("user", "q")]
    assert "one of them" in why("pairs", {"system": "x", **{n: talk(("system", "y")) + s for n, s in sides.items()}})


def test_messages_as_text_that_cannot_be_kept_are_named():
    bad = json.dumps([{"role": "user", "content": "hi"}]).replace("hi", "hi \\ud83d")
    assert "unpaired surrogate" in why("chat", {"messages": bad})
    assert "malformed JSON" in why("chat", {"messages": "[" * 100_000})
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert "nested too deeply" in why("prompts", {"prompt": "q", "further": deep})


def test_personal_data_is_masked_in_messages_and_in_further_fields(tmp_path):
    rows = [
        {"prompt": "write to me@x.org", "answer": ["you@y.org", {"ip": "8.8.8.8", "n": 5}], "more": "z"},
        {"prompt": "nothing", "answer": None},
    ]
    out = tmp_path / "out"
    result = make(out, jsonl(tmp_path / "a.jsonl", rows), format="prompts", pii=True)
    first, second = documents(out)
    assert json.loads(first["text"]) == talk((U, "write to [EMAIL]"))
    assert json.loads(first["extra"]) == {"answer": ["[EMAIL]", {"ip": "[IP]", "n": 5}], "more": "z"}
    assert second["extra"] is None
    assert (result["pii_email"], result["pii_ip"]) == (2, 1)
    make(tmp_path / "as-is", tmp_path / "a.jsonl", format="prompts")
    assert "you@y.org" in documents(tmp_path / "as-is")[0]["extra"]


def test_lists_of_messages_in_cells_of_a_table_are_read_for_every_role():
    said = json.dumps([{"role": "assistant", "content": "good"}])
    row = {"prompt": json.dumps([{"from": "human", "value": "q"}]), "chosen": said, "rejected": "[bad]"}
    assert made("pairs", row) == {"prompt": talk((U, "q")), "chosen": talk((A, "good")), "rejected": talk((A, "[bad]"))}
    listed = '[{"a": 1}]'
    assert made("prompts", {"prompt": listed}) == talk((U, listed)), "JSON that is no message is text"


def test_a_system_message_without_text_is_none():
    said = talk((S, " "), (U, "q"), (A, "a"))
    assert made("chat", {"messages": said}) == talk((U, "q"), (A, "a"))
    assert made("chat", {"messages": said, "system": "be brief"}) == talk((S, "be brief"), (U, "q"), (A, "a"))


def test_what_is_learned_of_a_conversation_does_not_move_it_across_the_split(tmp_path):
    talks = [talk((U, f"question {n}"), (A, f"answer {n}")) for n in range(60)]
    told = [[m, {**a, "train": True}] for m, a in talks]
    hidden = [[*t, {"role": U, "content": "more"}, {"role": A, "content": "x"}] for t in talks]
    silent = [[m, {**a, "train": False}, *rest] for m, a, *rest in hidden]
    rows = [{"messages": m} for m in (*talks, *told, *hidden, *silent)]
    out = tmp_path / "out"
    make(out, jsonl(tmp_path / "a.jsonl", rows), format="chat", holdout={"fraction": 0.3})
    splits: dict[str, set[str]] = {}
    kept = documents(out)
    for d in kept:
        splits.setdefault(d["split"], set()).add(json.dumps([m["content"] for m in json.loads(d["text"])]))
    assert len(kept) == 180, "what is said and learned alike is kept once"
    assert len(splits) == 2
    assert not set.intersection(*splits.values())


def test_personal_data_is_masked_however_deep_and_behind_whatever_signs(tmp_path):
    deep: object = "me@x.org"
    for _ in range(600):
        deep = [deep]
    odd = {'"me@x.org": \\': 'a "me@x.org": \\', "n": [1.5, None, True], "ü": 'me@x.org \n\t\\" : me@x.org'}
    out = tmp_path / "out"
    rows = [{"prompt": "a", "deep": deep}, {"prompt": "b", "odd": odd}]
    assert make(out, jsonl(tmp_path / "a.jsonl", rows), format="prompts", pii=True)["pii_email"] == 4
    first, second = (d["extra"] for d in documents(out))
    assert first == '{"deep": ' + 600 * "[" + '"[EMAIL]"' + 600 * "]" + "}"
    assert json.loads(second)["odd"] == {
        '"me@x.org": \\': 'a "[EMAIL]": \\',
        "n": [1.5, None, True],
        "ü": '[EMAIL] \n\t\\" : [EMAIL]',
    }


def test_a_conversation_without_an_answer_is_dropped_and_counted(tmp_path):
    rows = [{"messages": QA}, {"messages": talk((U, "hi"))}, {"messages": [{**QA[1], "train": False}]}]
    make(tmp_path / "out", jsonl(tmp_path / "a.jsonl", rows), format="chat")
    assert funnel(tmp_path / "out")["dropped"]["no_answer"]["documents"] == 2


def test_tail_keeps_pairs_whole(tmp_path):
    rows = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(10)]
    out = tmp_path / "out"
    result = make(out, jsonl(tmp_path / "a.jsonl", rows), format="pairs", holdout={"fraction": 0.25, "by": "tail"})
    assert (result["train_documents"], result["val_documents"], result["cut_documents"]) == (7, 3, 0)
    assert all(set(json.loads(d["text"])) == {"prompt", "chosen", "rejected"} for d in documents(out))


def test_the_library_as_code_has_no_rows(tmp_path):
    for format in ("pairs", "prompts"):
        with pytest.raises(UserError, match=f'but format = "{format}"; use a file of rows'):
            make(tmp_path / "out", "python:stdlib", format=format)


@pytest.mark.skipif(not DATA.exists(), reason="the public data sets are not on this machine")
def test_real_pairs_conversations_and_prompts_to_the_row(tmp_path):
    pairs = DATA / "instructions/instruction-data-with-preference.json"
    result = make(tmp_path / "pairs", pairs, format="pairs")
    total = funnel(tmp_path / "pairs")
    assert {r: c["documents"] for r, c in total["dropped"].items()} == {"equal_sides": 6}
    assert (result["input_documents"], result["documents"], result["quarantined_documents"]) == (1100, 1094, 0)
    first = documents(tmp_path / "pairs")[0]
    assert json.loads(first["text"])["prompt"][0]["content"].endswith("given.\n\nfreind --> friend")
    assert list(json.loads(first["extra"])) == ["output"]
    result = make(tmp_path / "chat", DATA / "instructions/instruction-data.json", format="chat", dedup={"exact": False})
    assert (result["input_documents"], result["documents"]) == (1100, 1100)
    result = make(tmp_path / "prompts", DATA / "gsm8k/test.jsonl", format="prompts")
    assert (result["input_documents"], result["documents"]) == (1319, 1319)
    first = documents(tmp_path / "prompts")[0]
    assert json.loads(first["extra"])["answer"].endswith("#### 18")
