"""`ingot inspect tokenizer`: the facts, the cut, the merges with their reasons, the trade-off; and the panel."""

import json

import pytest

from ingot.core.artifact import atomic_json
from ingot.core.errors import UserError
from ingot.report.html.panels import panel
from ingot.report.inspect.tokenizer import SENTENCE, merges, print_tokenizer, tokenizer
from ingot.tokenizer.byte_bpe import Char


def test_facts_and_pieces(finished, capsys):
    data = tokenizer(finished.dir("bpe").path, text="water <|end|>")
    assert (data["stage"], data["type"], data["vocab"], data["template"]) == ("bpe", "byte-bpe", 300, "turns")
    assert "".join(piece["text"] for piece in data["pieces"]) == "water <|end|>"
    assert data["report"]["bytes_per_token"] > 1
    json.dumps(data)
    print_tokenizer(data)
    out = capsys.readouterr().out
    assert "bpe: byte-bpe, 300 ids, 16 special tokens; encodes any text" in out
    assert f"{len(data['pieces'])} tokens" in out
    assert "script Latin" in out


@pytest.mark.parametrize(("alphabet", "words"), [("abc", "encodes exactly, but its own"), (None, "encodes any")])
def test_characters_encode_no_others(tmp_path, capsys, alphabet, words):
    Char(alphabet).save(tmp_path / "tokenizer.json")
    atomic_json(tmp_path / "inputs.json", {"name": "letters", "kind": "tokenizer", "settings": {}, "inputs": {}})
    print_tokenizer(tokenizer(tmp_path))
    assert f"special tokens; {words}" in capsys.readouterr().out


def test_any_stage_with_a_tokenizer_will_do(finished):
    path = finished.dir("clean").path
    with pytest.raises(UserError, match=r"a corpus stage without a tokenizer.json, expected a tokenizer stage"):
        tokenizer(path)
    with pytest.raises(UserError, match="no stage, expected one such as runs/NAME/bpe, or --steps, or --tradeoff"):
        tokenizer(None)


def test_A3_merges_are_told_step_by_step(capsys):
    data = tokenizer(None, steps=True)
    told = data["steps"]
    assert len(told["symbols"]) == 11
    assert [step["symbol"] for step in told["merges"][:4]] == ["lo", "er", "er_", "low"]
    assert told["merges"][0]["pairs"]["l o"] == told["merges"][0]["count"] == 7
    print_tokenizer(data)
    out = capsys.readouterr().out
    assert "1  l + o -> lo  7 times; tied with e r, o w, r _: its symbols occur less often apart" in out
    assert "lo w e s t _" in out


def test_steps_of_a_stage_are_those_of_its_own_tokenizer(finished, capsys):
    """The text alone would merge x and q first, its most frequent pair; the stage's tokenizer has never seen them."""
    data = tokenizer(finished.dir("bpe").path, text="xqxqxq water", steps=True)
    assert "steps" not in data
    pairs = [merge["pair"] for merge in data["applied"]["merges"]]
    assert pairs
    assert ["x", "q"] not in pairs
    assert merges("xqxqxq water")["merges"][0]["pair"] == ["x", "q"]
    tokens = data["applied"]["merges"][-1]["tokens"]
    shown = tokenizer(finished.dir("bpe").path, text="xqxqxq water")["pieces"]
    assert ["".join(token) for token in tokens] == [piece["text"] for piece in shown]
    print_tokenizer(data)
    assert f"by {len(pairs)} of the tokenizer's merges" in capsys.readouterr().out


def test_A5_a_wordpiece_merges_by_score():
    told = merges(
        " ".join(["er"] * 100 + ["e"] * 400 + ["r"] * 100 + ["qu"] * 50 + ["q"] * 10 + ["u"] * 250), "wordpiece"
    )
    assert told["merges"][0]["pair"] == ["q", "u"]
    assert round(told["merges"][0]["score"], 5) == 0.00278
    assert told["merges"][1]["score"] == 0.001


def test_A7_tradeoff(finished, capsys):
    alone = tokenizer(None, sizes=True)["tradeoff"]
    assert (alone["characters"], alone["words"], alone["sentence"]) == (43, 9, SENTENCE)
    assert [row["vocab"] for row in alone["rows"]] == [32_000, 50_257, 100_000, 128_000]
    data = tokenizer(finished.dir("bpe").path, sizes=True, width=64, layers=4)
    row = data["tradeoff"]["rows"][0]
    assert (row["vocab"], row["bytes"]) == (300, 300 * 64 * 4)
    assert row["bytes_per_token"] == pytest.approx(data["report"]["bytes_per_token"], rel=0.01)
    assert 9 <= row["tokens"] <= 43
    print_tokenizer(data)
    assert "43 characters, 9 words" in capsys.readouterr().out


def test_the_panel_shows_tables_and_charts_where_there_is_something_to_compare(finished, tmp_path):
    html = str(panel("tokenizer", finished.dir("bpe").path))
    assert "tokens per word" in html
    assert "<svg" not in html  # one vocabulary is no curve
    row = {"bytes": 10, "tokens": 5, "bytes_per_token": 2.0, "tokens_per_word": 1.0}
    report = {
        "vocab": 2048,
        "by_script": {"Latin": row, "Han": row},
        "tradeoff": [{"vocab": 512, "bytes_per_token": 2.0}, {"vocab": 2048, "bytes_per_token": 3.0}],
        "unknown_fraction": 0.125,
        "longest_tokens": ["<b>"],
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    html = str(panel("tokenizer", tmp_path))
    assert "Compression by vocabulary size" in html
    assert html.count("<svg") == 1
    assert "<td>Han" in html
    assert "12.50 %" in html
    assert "<b>" not in html
    (tmp_path / "report.json").unlink()
    assert "No numbers yet" in str(panel("tokenizer", tmp_path))


def test_command_line_prints_one_json_document(ingot):
    done = ingot("inspect", "tokenizer", "--steps", "--text", "aab aab", "--json")
    assert json.loads(done.stdout)["steps"]["merges"][0]["count"] == 2
    assert ingot("inspect", "tokenizer").returncode == 2
