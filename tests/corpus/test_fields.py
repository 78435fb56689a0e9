"""No field of a row or a message is lost in silence: it is read, kept beside the document, or its row is named."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.corpus.build import build
from ingot.corpus.documents import read_documents
from ingot.corpus.readers import fields, read
from ingot.corpus.readers.files import BadRow
from ingot.corpus.readers.row_formats import Document, row_parser
from tests.corpus.corpus_helpers import funnel, jsonl, make, quarantine, settings

U, A, S = "user", "assistant", "system"
LONG = (
    "Ada moved to Rome in spring, and there she found work with a clockmaker who lived beside the river all his life."
)
CALL = [{"type": "function", "function": {"name": "weather", "arguments": "{}"}}]


def talk(*turns: tuple[str, str], **last: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
    messages[-1] |= last
    return messages


QA = talk((U, "q"), (A, "a"))


def parse(format: Any, row: Any, *metadata: str, **names: str) -> Document:
    return row_parser(format, "text" if format == "text" else None, names, metadata)(row)  # type: ignore[arg-type]


def document(format: Any, row: Any, *metadata: str, **names: str) -> Any:
    return json.loads(parse(format, row, *metadata, **names).text)


def reason(format: Any, row: Any, *metadata: str) -> str:
    with pytest.raises(BadRow) as caught:
        parse(format, row, *metadata)
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"prompt": "Translate.", "input": "good day", "completion": "bonjour"}, "Translate.\n\ngood day"),
        ({"question": "Where?", "context": "In Rome.", "answer": "Rome"}, "Where?\n\nIn Rome."),
        ({"prompt": "Where?", "passage": "In Rome.", "response": "Rome"}, "Where?\n\nIn Rome."),
        ({"instruction": "Sum up.", "document": LONG, "output": "Ada"}, f"Sum up.\n\n{LONG}"),
        ({"instruction": "Answer.", "query": "Where?", "response": "Rome"}, "Answer.\n\nWhere?"),
        ({"question": "Where?", "contexts": ["One.", "Two."], "answer": "Rome"}, "Where?\n\nOne.\n\nTwo."),
        ({"instruction": "", "input": "What?", "output": "That."}, "What?"),
        ({"instruction": None, "input": "What?", "output": "That."}, "What?"),
        ({"instruction": " ", "context": "What?", "output": "That."}, "What?"),
        ({"prompt": "What?", "input": "\n", "completion": "That."}, "What?"),
        ({"question": "What?", "context": None, "answer": "That."}, "What?"),
        ({"question": "", "contexts": ["", "What?", " "], "answer": "That."}, "What?"),
    ],
)
def test_an_input_stands_below_whatever_prompt_and_what_is_empty_is_left_out(row, question):
    assert document("chat", row)[0] == {"role": U, "content": question}
    rows = {k: v for k, v in row.items() if k not in ("completion", "answer", "response", "output")}
    assert document("prompts", rows) == talk((U, question))
    assert document("pairs", {**rows, "chosen": "x", "rejected": "y"})["prompt"] == talk((U, question))


def test_an_empty_system_prompt_is_none():
    for empty in ("", " \n", None):
        assert document("chat", {"system": empty, "prompt": "q", "completion": "a"})[0]["role"] == U


def test_an_input_has_the_name_that_fields_gives_it():
    row = {"question": "Where?", "leaflet": LONG, "answer": "Rome"}
    assert document("chat", row, input="leaflet")[0]["content"] == f"Where?\n\n{LONG}"
    assert (
        document("chat", {"question": "q", "why": "b", "answer": "a"}, reasoning="why")[1]["reasoning_content"] == "b"
    )


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "thought", "cot", "rationale"])
def test_the_reasoning_of_an_answer_is_kept_under_one_name(name):
    expected = talk((U, "q"), (A, "a"), reasoning_content="because")
    assert document("chat", {"messages": talk((U, "q"), (A, "a"), **{name: "because"})}) == expected
    share = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", name: "because"}]
    assert document("chat", {"conversations": share}) == expected
    row = document("chat", {"question": "q", name: "because", "answer": "a"})
    assert row == expected
    pair = document("pairs", {"prompt": "q", "chosen": talk((A, "a"), **{name: "because"}), "rejected": "b"})
    assert pair["chosen"] == talk((A, "a"), reasoning_content="because")
    assert document("chat", {"messages": talk((U, "q"), (A, "a"), **{name: ""})}) == QA


def test_reasoning_in_parts_of_a_content_is_reasoning():
    parts = [{"type": "thinking", "thinking": "because", "signature": None}, {"type": "text", "text": "a"}]
    assert document("chat", {"messages": [QA[0], {"role": A, "content": parts}]}) == talk(
        (U, "q"), (A, "a"), reasoning_content="because"
    )
    twice = talk((U, "q"), (A, "a"), reasoning="because", reasoning_content="because")
    assert document("chat", {"messages": twice})[1]["reasoning_content"] == "because"


@pytest.mark.parametrize(
    ("format", "row", "words"),
    [
        ("chat", {"messages": talk((U, "q"), (A, "a"), reasoning="x", thinking="y")}, "different reasoning"),
        ("chat", {"messages": talk((U, "q"), (A, "a"), thinking=["x"])}, "'thinking' of type array"),
        ("chat", {"messages": talk((U, "q"), thinking="x")}, "field 'thinking' of messages.1. is reasoning"),
        ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "reasoning": "x"}, "field 'reasoning' is reasoning"),
        ("chat", {"messages": QA, "deepseek_reasoning": "x"}, "field 'deepseek_reasoning' is reasoning"),
        (
            "chat",
            {"messages": talk((U, "q"), (A, "a"), reasoning_details=["x"])},
            "'reasoning_details' of .* reasoning",
        ),
    ],
)
def test_reasoning_that_has_no_place_is_named(format, row, words):
    assert re.search(words, reason(format, row))


@pytest.mark.parametrize(
    "flag", [{"loss": False}, {"train": False}, {"weight": 0}, {"trainable": 0.0}, {"loss": "false"}]
)
def test_a_message_without_loss_is_context(flag):
    draft = [*talk((U, "q"), (A, "draft"), **flag), *QA]
    found = document("chat", {"messages": draft})
    assert [m.get("train") for m in found] == [None, False, None, None]
    assert [m["content"] for m in found] == ["q", "draft", "q", "a"]


def test_loss_flags_of_a_row():
    two = [*QA, *QA]
    assert [m.get("train") for m in document("chat", {"messages": two, "loss_mask": [0, 0, 0, 1]})] == [
        None,
        False,
        None,
        None,
    ]
    assert document("chat", {"prompt": "q", "completion": "a", "train": 0})[1]["train"] is False
    assert document("chat", {"messages": QA, "loss": True}) == QA
    for format, row in [
        ("text", {"text": "x", "train": False}),
        ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "weight": 0}),
        ("prompts", {"prompt": "q", "loss": "false"}),
    ]:
        assert "says that the row is not trained on" in reason(format, row)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": talk((U, "q"), (A, "a"), loss=0.5)}, "has loss = 0.5, expected true, false, 0 or 1"),
        ({"messages": talk((U, "q"), (A, "a"), loss=True, weight=0)}, "'loss' and 'weight', which differ"),
        ({"messages": [{**QA[0], "loss": True}, QA[1]]}, "has loss = true, but only an assistant's message"),
        ({"messages": talk((U, "q"), (A, "a"), no_loss=True)}, "'no_loss' of messages.2. is a loss flag"),
        ({"messages": QA, "skip_training": False}, "'skip_training' is a loss flag"),
        ({"messages": QA, "loss_mask": [0, 1, 1]}, "'loss_mask' has 3 values for 2 messages"),
        ({"messages": QA, "weight": 0.25}, "the row has weight = 0.25"),
        ({"messages": QA, "labels": [-100, 5]}, "field 'labels' is a label"),
        ({"prompt": "q", "completion": "a", "label": False}, "field 'label' is a label"),
    ],
)
def test_a_loss_flag_that_is_not_understood_is_named(row, words):
    assert re.search(words, reason("chat", row))


def test_a_pair_honours_the_flags_of_its_answers():
    answers = [*talk((A, "draft"), train=False), *talk((U, "more"), (A, "x"), train=True)]
    found = document("pairs", {"prompt": "q", "chosen": answers, "rejected": "b"})
    assert found["chosen"] == [*talk((A, "draft"), train=False), *talk((U, "more"), (A, "x"))]
    silent = {"prompt": "q", "chosen": talk((A, "x"), loss=False), "rejected": "b"}
    assert "the chosen ends with a message that is not trained on" in reason("pairs", silent)


MEANINGFUL = [
    ("tools", CALL),
    ("functions", json.dumps(CALL)),
    ("available_tools", CALL),
    ("images", ["a.png"]),
    ("image", {"bytes": b"\x89PNG", "path": None}),
    ("image_url", "https://example.org/a.png"),
    ("audio", "a.wav"),
    ("choices", ["Rome", "Oslo"]),
    ("options", {"A": "Rome", "B": "Oslo"}),
    ("option_b", "Oslo"),
    ("D", "Oslo"),
    ("endings", ["x"]),
    ("suffix", "}"),
    ("text", "some passage"),
    ("mask", [0, 1]),
    ("article", LONG),
    ("leaflet", LONG),
    ("notes", [LONG[:60], {"more": LONG[60:]}]),
]


@pytest.mark.parametrize(("name", "value"), [m for m in MEANINGFUL if m[0] != "article"])
def test_a_field_with_meaning_and_no_role_is_named_in_every_format_of_messages(name, value):
    for format, row in [
        ("chat", {"messages": QA}),
        ("chat", {"question": "q", "answer": "a"}),
        ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b"}),
        ("prompts", {"prompt": "q"}),
    ]:
        assert repr(name) in reason(format, {**row, name: value}), format
        assert "`metadata`" in reason(format, {**row, name: value})
        kept = parse(format, {**row, name: value}, name)
        assert name in json.loads(kept.extra or "")
        assert kept.uses[name] == "metadata"
        for empty in (None, "", [], {}, [{}], "[]", {"bytes": None}):
            assert parse(format, {**row, name: empty}).text == parse(format, row).text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_calls", CALL),
        ("tool_call_id", "7"),
        ("name", "Bob"),
        ("images", ["a.png"]),
        ("context", "x"),
        ("note", LONG),
    ],
)
def test_a_field_of_a_message_with_meaning_is_named(name, value):
    for format, key in [("chat", "messages"), ("prompts", "prompt"), ("pairs", "chosen")]:
        row: dict[str, Any] = {key: [{"role": U, "content": "q", name: value}, *QA[1:]]}
        row |= {"rejected": [QA[0], {"role": A, "content": "b"}]} if format == "pairs" else {}
        if format == "prompts":
            row[key].append(QA[0])
        assert f"field {name!r} of {key}[1]" in reason(format, row)
        assert json.loads(parse(format, row, name).extra or "")[f"{key}[1].{name}"] == value


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": QA, "context": "In Rome."}, "field 'context' is the input of a prompt"),
        ({"prompt": talk((U, "q")), "input": "x", "completion": "a"}, "field 'input' is the input of a prompt"),
        ({"messages": QA, "history": [["o", "p"]]}, "field 'history' is earlier turns"),
        ({"messages": QA, "prompt": "other", "completion": "x"}, "field 'prompt' is a prompt"),
        ({"prompt": "q", "completion": "a", "responses": ["b", "c"]}, "field 'responses' is an answer"),
        ({"prompt": "q", "completion": "a", "chosen": "b"}, "field 'chosen' is a better answer"),
        ({"prompt": "q", "input": "x", "context": "y", "completion": "a"}, "both 'input' and 'context'"),
        (
            {"messages": [{"role": U, "content": [{"type": "text", "text": "q", "image": "a.png"}]}]},
            "field 'image' of messages[1].content[1] is images",
        ),
    ],
)
def test_a_field_whose_role_is_taken_is_named(row, words):
    assert words in reason("chat", row)


def test_a_field_that_repeats_the_document_is_metadata():
    alpaca = {"instruction": "Translate.", "input": "good day", "output": "bonjour"}
    rendered = "### Instruction:\nTranslate.\n\n### Input:\ngood day\n\n### Response:\nbonjour"
    assert parse("chat", {**alpaca, "text": rendered}).uses["text"] == "metadata"
    tags = "<|user|>Translate.\n\ngood day<|end|>\n<|assistant|>bonjour<|end|>"
    assert parse("chat", {**alpaca, "formatted": tags + LONG}).uses["formatted"] == "metadata"
    assert "field 'text' is a part" in reason("chat", {"messages": QA, "text": "a queue, and a long one"})
    assert parse("chat", {"messages": QA, "prompt": "q", "prompt_id": "7"}).uses["prompt"] == "metadata"
    pair = {"prompt": "q", "chosen": QA, "rejected": talk((U, "q"), (A, "b")), "messages": QA}
    assert parse("pairs", pair).uses["messages"] == "metadata"


@pytest.mark.parametrize("format", ["text", "chat", "pairs", "prompts"])
def test_metadata_is_kept_and_short_unknown_fields_are_counted(format):
    row: dict[str, Any] = {
        "text": {"text": "x"},
        "chat": {"messages": QA},
        "pairs": {"prompt": "q", "chosen": "a", "rejected": "b"},
        "prompts": {"prompt": "q"},
    }[format]
    beside = {"id": 7, "source": "web", "url": "https://x.org", "meta": {"long": LONG}, "promptId": "p", "mood": "calm"}
    found = parse(format, {**row, **beside, "n": None})
    assert json.loads(found.extra or "") == beside
    uses = {name: use for name, use in found.uses.items() if name in beside}
    assert uses == {**dict.fromkeys(beside, "metadata"), "mood": "kept"}


def test_a_text_is_complete_without_its_other_fields_but_not_without_images():
    row = {"text": "x", "summary": LONG, "label": 1, "answer": "y", "tools": CALL}
    assert set(json.loads(parse("text", row).extra or "")) == {"summary", "label", "answer", "tools"}
    assert "field 'image' is images" in reason("text", {"text": "x", "image": {"bytes": b"\x89PNG"}})


def test_prompts_keep_what_an_answer_is_checked_with():
    row = {"prompt": "q", "answer": LONG, "solution": LONG, "test_list": [LONG], "reward_model": {"truth": LONG}}
    assert set(json.loads(parse("prompts", row).extra or "")) == {*row} - {"prompt"}


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"score_chosen": 3, "score_rejected": 7}, "'score_chosen' is lower than that of the rejected answer"),
        ({"chosen_rating": "1.5", "rejected_rating": "4"}, "'chosen_rating' is lower"),
        ({"chosen-rating": 3, "rejected-rating": 7}, "'chosen-rating' is lower than that of the rejected answer"),
        ({"chosenScore": "3", "rejectedScore": "7"}, "'chosenScore' is lower than that of the rejected answer"),
        ({"scoreMargin": -0.5}, "'scoreMargin' is negative"),
        ({"margin": -0.5}, "'margin' is negative"),
        ({"label": 1}, "field 'label' is a label"),
        ({"preference": "B"}, "field 'preference' is a label"),
    ],
)
def test_labels_that_may_contradict_a_pair_are_named(beside, words):
    assert words in reason("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", **beside})


def test_scores_that_agree_with_a_pair_are_kept():
    beside = {"score_chosen": 7.0, "score_rejected": 3, "margin": 4, "chosen_length": 1, "rejected_length": 2}
    beside |= {"chosenRating": 7, "rejectedRating": 3}
    found = parse("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", **beside})
    assert json.loads(found.extra or "") == beside


@pytest.mark.parametrize(
    ("format", "row", "words"),
    [
        ("chat", {"messages": None}, "found 'messages' with the value null"),
        ("chat", {"instruction": "a", "output": None}, "found 'instruction', 'output' with the value null"),
        ("pairs", {"prompt": "q", "chosen": "a", "rejected": None}, "'rejected' with the value null"),
        ("pairs", {"prompt": None, "chosen": "a", "rejected": "b"}, "'prompt' with the value null"),
        ("prompts", {"question": None, "id": 1}, "found 'question' with the value null, 'id'"),
        ("chat", {"messages": [{"role": None, "content": "x"}]}, "message 1 of 'messages' has role null"),
        ("chat", {"messages": [{"role": U, "content": None}]}, 'no string "content", expected .*; found a JSON null'),
        ("text", {"text": None}, "field 'text' is a JSON null"),
    ],
)
def test_a_null_is_named(format, row, words):
    assert re.search(words, reason(format, row))


def test_the_funnel_says_what_became_of_every_field(tmp_path):
    rows = [
        {"messages": talk((U, "q"), (A, "a"), thinking="x"), "id": 1, "mood": "calm"},
        {"messages": talk((U, "r"), (A, "a")), "id": 2},
        {"messages": talk((U, "s"), (A, "a")), "images": ["a.png"]},
    ]
    notices: list[str] = []
    display = Display(quiet=True)
    display.notify = notices.append  # type: ignore[method-assign]
    log = EventLog(tmp_path / "metrics.jsonl")
    build(settings(jsonl(tmp_path / "a.jsonl", rows), format="chat"), tmp_path, display, log)
    log.close()
    counts = {(f["field"], f["use"]): f["rows"] for f in funnel(tmp_path)["fields"]}
    assert counts[("id", "metadata")] == 2
    assert counts[("mood", "kept")] == 1
    assert counts[("messages[].thinking", "reasoning")] == 1
    assert [q["reason"].split(",")[0] for q in quarantine(tmp_path)] == ["field 'images' is images"]
    assert sum("line 3: field 'images' is images" in n and "quarantined 1 rows and files" in n for n in notices) == 1
    assert sum("kept as metadata beside the documents (column `extra`): id" in n for n in notices) == 1
    assert sum("not part of their text: mood (1 rows)" in n for n in notices) == 1


def test_metadata_of_a_text_is_the_same_from_every_kind_of_table_and_masked(tmp_path):
    rows = [{"text": f"line {n}", "url": f"https://x.org/{n}", "by": "me@x.org"} for n in range(3)]
    rows += [{"text": "pixels", "url": "u", "by": "x", "image": "a.png"}]
    jsonl(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist([{"image": None, **r} for r in rows]), tmp_path / "a.parquet")
    found = {}
    for name in ("a.jsonl", "a.parquet"):
        result = make(tmp_path / f"out-{name}", tmp_path / name, pii=True)
        documents = [row for batch in read_documents(tmp_path / f"out-{name}") for row in batch.to_pylist()]
        found[name] = [(d["text"], {k: v for k, v in json.loads(d["metadata"]).items() if v}) for d in documents]
        assert (result["documents"], result["quarantined_documents"], result["pii_email"]) == (3, 1, 3)
        assert "field 'image' is images" in quarantine(tmp_path / f"out-{name}")[0]["reason"]
    assert found["a.jsonl"] == found["a.parquet"]
    assert found["a.jsonl"][1] == ("line 1", {"url": "https://x.org/1", "by": "[EMAIL]"})


def test_reasoning_is_cleaned_like_text_and_tells_duplicates_apart(tmp_path):
    rows = [
        {"messages": talk((U, "q"), (A, "a"), reasoning="write to\x00 me@x.org")},
        {"messages": talk((U, "q"), (A, "a"), reasoning="write to me@x.org")},
        {"messages": talk((U, "q"), (A, "a"))},
        {"messages": talk((U, "r"), (A, "a"), reasoning="\x00")},
    ]
    result = make(tmp_path / "out", jsonl(tmp_path / "a.jsonl", rows), format="chat", pii=True)
    documents = [row for batch in read_documents(tmp_path / "out") for row in batch.to_pylist()]
    answers = [json.loads(d["text"])[1] for d in documents]
    assert [answer.get("reasoning_content") for answer in answers] == ["write to [EMAIL]", None, ""]
    assert result["dropped_documents"] == 1
    assert len({d["cluster"] for d in documents[:2]}) == 1


NAMES = st.one_of(
    st.sampled_from(sorted({name for entry in fields.MEANINGS.values() for name in entry.names})),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "calm", LONG]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "k"]), inner, max_size=2),
    max_leaves=5,
)


@examples(max_examples=80, deadline=None)
@given(
    format=st.sampled_from(["text", "chat", "pairs", "prompts"]),
    extras=st.lists(st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=5),
    place=st.sampled_from(["row", "first message", "last message"]),
)
def test_every_field_is_read_kept_or_named(format, extras, place):
    rows = [_row(format, number, extra, place) for number, extra in enumerate(extras)]
    lines = [len(json.dumps(row)) for row in rows]
    with tempfile.TemporaryDirectory() as name:
        bad: list[Any] = []
        try:
            tables = list(read.read(settings(jsonl(Path(name, "a.jsonl"), rows), format=format), bad.append))
        except UserError:  # none of the rows is usable
            tables = []
    kept = {row["offset"]: row for table in tables for row in table.to_pylist()}
    lost = {record.offset: record for record in bad}
    offsets = [sum(lines[:n]) + n for n in range(len(rows))]
    assert sorted([*kept, *lost]) == offsets
    for offset, size, row, extra in zip(offsets, lines, rows, extras, strict=True):
        own = OWN[format] if place == "row" or format == "text" else ("role", "content")
        meaningful = {name: value for name, value in extra.items() if not fields.is_empty(value) and name not in own}
        if offset in lost:
            assert lost[offset].bytes == size
            assert any(re.search(rf"'{re.escape(n)}'|has {re.escape(n)} = ", lost[offset].reason) for n in meaningful)
            continue
        uses = {path.rpartition("].")[2]: use for path, use in parse(format, row).uses.items()}
        beside = {path.rpartition("].")[2]: v for path, v in json.loads(kept[offset]["extra"] or "{}").items()}
        for field, value in meaningful.items():
            if uses[field] in ("metadata", "kept"):
                assert beside[field] == value
            else:
                assert uses[field] == "loss" or all(text in kept[offset]["text"] for text in _texts(value))


OWN: dict[Any, tuple[str, ...]] = {
    "text": ("text",),
    "chat": ("messages",),
    "pairs": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
}


def _row(format: str, number: int, extra: dict[str, Any], place: str) -> dict[str, Any]:
    """A valid row of the format with further fields in the row, or in its first or last message."""
    messages = talk((U, f"question {number}"), (A, f"answer {number}"))
    if place != "row" and format != "text":
        at = 0 if place == "first message" else -1
        messages[at] = {**extra, **messages[at]}
    row: dict[str, Any] = {
        "text": {"text": f"text {number}"},
        "chat": {"messages": messages},
        "pairs": {"prompt": messages[:1], "chosen": messages[1:], "rejected": "no"},
        "prompts": {"prompt": [*messages, {"role": U, "content": "more"}]},
    }[format]
    return {**extra, **row} if place == "row" or format == "text" else row


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [text for one in (value.values() if isinstance(value, dict) else value) for text in _texts(one)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", ["trained", "learnable", "supervised", "trainable"])
def test_more_names_of_loss_flags(name):
    row = {"messages": [*talk((U, "q"), (A, "a"), **{name: False}), *QA]}
    assert [m.get("train") for m in document("chat", row)] == [None, False, None, None]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("skip", True),
        ("exclude", True),
        ("ignored", 1),
        ("train_on_turn", False),
        ("loss_here", True),
        ("masking", 1),
    ],
)
def test_flags_of_a_message_that_are_not_read_are_named(name, value):
    assert f"field '{name}' of messages[2]" in reason("chat", {"messages": talk((U, "q"), (A, "a"), **{name: value})})


@pytest.mark.parametrize("flag", [{"skip": False}, {"masked": 0}, {"excluded": "false"}, {"redacted": True}])
def test_flags_that_exclude_nothing_are_kept(flag):
    found = parse("chat", {"messages": talk((U, "q"), (A, "a"), **flag)})
    assert list(json.loads(found.extra or "")) == [f"messages[2].{name}" for name in flag]


@pytest.mark.parametrize("name", ["think", "scratchpad", "inner_monologue"])
def test_more_names_of_reasoning(name):
    messages = document("chat", {"messages": talk((U, "q"), (A, "a"), **{name: "hm"})})
    assert messages[1] == {"role": A, "content": "a", "reasoning_content": "hm"}


@pytest.mark.parametrize("name", ["thinking_content", "reasoning_text", "thinkingText"])
def test_reasoning_is_named_as_such(name):
    assert f"field '{name}' of messages[2] is reasoning" in reason(
        "chat", {"messages": talk((U, "q"), (A, "a"), **{name: "hm"})}
    )


def test_all_fields_that_would_be_lost_are_named_at_once():
    row = {"messages": QA, "context": "x", "hint": "y", "id": 1, "tools": CALL}
    words = reason("chat", row)
    assert words.startswith("field 'context' is the input of a prompt")
    assert words.endswith("; likewise 'hint', 'tools'")
    parse("chat", row, "context", "hint", "tools")


def test_fields_of_parts_are_kept_or_named_as_those_of_messages():
    part = {"type": "text", "text": "a"}
    signed = [{"type": "thinking", "thinking": "hm", "signature": "f00"}, {**part, "id": 3}]
    found = parse("chat", {"messages": talk((U, "q"), (A, signed))})  # type: ignore[arg-type]
    assert json.loads(found.text)[1] == {"role": A, "content": "a", "reasoning_content": "hm"}
    assert json.loads(found.extra or "") == {
        "messages[2].content[1].signature": "f00",
        "messages[2].content[2].id": 3,
    }
    for name, value in (("image_url", "x.png"), ("context", "y"), ("tool_calls", CALL)):
        lost = {"messages": talk((U, [{**part, name: value}]), (A, "a"))}  # type: ignore[list-item]
        assert f"field '{name}' of messages[1].content[1] is" in reason("chat", lost)


@pytest.mark.parametrize("row", [{"doc": "y"}, {"value": "y"}, {"grounding": "y"}, {"code_snippet": "y"}])
def test_more_parts_of_a_prompt(row):
    assert "is a part of the prompt" in reason("chat", {"question": "q", "answer": "a", **row})


@pytest.mark.parametrize(
    "row",
    [
        {"finish_reason": "stop", "language_code": "en"},
        {"extra_info": {"question": LONG, "index": 1}},
        {"header": {"user-agent": LONG}},
    ],
)
def test_more_metadata(row):
    found = parse("chat", {"messages": [QA[0], {**QA[1], **row}]})
    assert json.loads(found.text) == QA
    assert set(found.uses.values()) == {"messages", "metadata"}
