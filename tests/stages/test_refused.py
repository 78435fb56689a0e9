"""What people get wrong in post-training: each ends with exit code 2, one sentence, and nothing half-written."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ingot.core.artifact import StageDir
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.stages import child
from ingot.stages.job import TOKENIZER
from ingot.tokenizer.byte_bpe import load_tokenizer
from ingot.tokenizer.hf_files import export_tokenizer
from tests.stages.conftest import RUNS

pytestmark = pytest.mark.usefixtures("world")
PAIR = {"prompt": "say cat", "chosen": "the cat", "rejected": "no"}


def _rows(name: str, *rows: dict[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Settings -> what the process of a stage says on standard error, up to the first stage that ends with 2."""
    monkeypatch.setattr(child, "die_with_parent", lambda parent: None)

    def run(*changes: str, recipe: str = "grid.toml") -> str:
        graph = load_graph(Path(recipe), list(changes), RUNS)
        for node in graph.needed(["tuned"]):
            job = job_of(graph, node, quiet=True)
            capsys.readouterr()
            monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(job)))
            code = child.main()
            if code:
                assert code == 2
                assert not StageDir(Path(job["dir"])).is_done()
                assert not list(Path(job["dir"]).glob("checkpoints/0*"))
                assert not list(Path(job["dir"]).glob("*.parquet"))
                return capsys.readouterr().err
        raise AssertionError("nothing was refused")

    return run


def _of(own: str, objective: str) -> tuple[str, ...]:
    return f"stage.tuned.data={{ {own} = 1.0 }}", f"stage.tuned.objective={objective}"


PAIRS = _of("preferences", '"dpo"')
ENDLESS = """{% for m in messages %}<|{{ m.role }}|>{{ m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_pairs_with_equal_sides(refused: Any) -> None:
    rows = [{**PAIR, "rejected": " the  cat"}, {**PAIR, "prompt": "say dog", "chosen": "no"}]
    assert refused(f'stage.preferences.sources=["{_rows("equal.jsonl", *rows)}"]', *PAIRS) == (
        "preferences: sources: kept none of 2 documents (equal_sides 2); equal.jsonl, document at 0: found equal "
        "chosen and rejected answers, expected different ones; fix the rows\n"
    )


@pytest.mark.parametrize("side", ["chosen", "rejected", "prompt"])
def test_an_empty_side(refused: Any, side: str) -> None:
    rows = _rows("silent.jsonl", {**PAIR, side: " \n"})
    assert refused(f'stage.preferences.sources=["{rows}"]', *PAIRS) == (
        "preferences: sources: kept none of 1 documents (empty 1); silent.jsonl, document at 0: found an empty "
        "question or answer, expected text; fix the rows\n"
    )


def test_an_empty_completion(refused: Any) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    assert refused(f'stage.talk.sources=["{_rows("silence.jsonl", {"messages": turns})}"]') == (
        "talk: sources: kept none of 1 documents (empty 1); silence.jsonl, document at 0: found an empty question or "
        "answer, expected text; fix the rows\n"
    )


def test_where_some_rows_are_wrong_the_first_of_each_kind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    good = [{**PAIR, "prompt": f"say {i}"} for i in range(40)]
    rows = [*good, {**PAIR, "rejected": "the cat"}, {**PAIR, "chosen": "no"}, {**PAIR, "chosen": ""}]
    before = len("".join(json.dumps(row) + "\n" for row in good))
    graph = load_graph(Path("grid.toml"), [f'stage.preferences.sources=["{_rows("some.jsonl", *rows)}"]'], RUNS)
    child.run(job_of(graph, graph.nodes["preferences"], quiet=False))
    said = capsys.readouterr().err
    assert (
        f"some.jsonl, document at {before:,}: found equal chosen and rejected answers, expected different ones; "
        "dropped 2 such documents, see dropped.parquet\n" in said
    )
    assert "found an empty question or answer, expected text; dropped 1 such documents" in said


def test_a_template_without_an_end_token(refused: Any) -> None:
    """One that somebody gives, and one that comes with the files of a model, where conversations are encoded by it."""
    Path("endless.jinja").write_text(ENDLESS)
    sentence = (
        "chat template: an answer ends in '\\n', expected a special token such as <|end|>, without which a model does "
        "not learn to stop; write one after each answer in the template, or set another template "
        '("turns" or "FILE.jinja") in the tokenizer stage\n'
    )
    assert refused('stage.bpe.template="endless.jinja"') == f"bpe: endless.jinja: {sentence}"
    bpe = load_graph(Path("grid.toml"), [], RUNS).nodes["bpe"]
    export_tokenizer(load_tokenizer(RUNS / "stages" / bpe.directory / TOKENIZER), Path("files"))
    Path("files", "chat_template.jinja").write_text(ENDLESS)
    learned, given = 'from = "notes"\nvocab = 280', 'type = "file"\npath = "files"\nfrom = []'
    Path("files.toml").write_text(Path("grid.toml").read_text().replace(learned, given))
    assert refused(recipe="files.toml") == f"talk@bpe: {sentence}"


def test_a_context_that_cuts_every_answer_off(refused: Any) -> None:
    assert refused("stage.tuned.context=4") == (
        "tuned: data.talk: each of its 54 documents is longer than the context of 4, and its answer begins after that, "
        "so no target is left; use a longer context or shorten the prompts\n"
    )
    assert refused("stage.tuned.context=4", *PAIRS) == (
        "tuned: data.preferences: all 56 pairs have a side longer than the maximum of 4 tokens, and they are not "
        "truncated; set a larger context\n"
    )
    sampled = _of("questions", '{ kind = "grpo", reward = "check.py:score", max_new = 5, group = 2 }')
    assert refused("stage.tuned.context=9", *sampled) == (
        "tuned: data.questions: all 56 prompts are longer than the maximum of 4 tokens, and they are not truncated; "
        "set a larger context or a smaller objective.max_new\n"
    )


BAD = """
import math


def raises(prompts, completions):
    return [1 / (len(c) - len(c)) for c in completions]


def nan(prompts, completions):
    return [math.nan for _ in completions]


def short(prompts, completions):
    return [0.0]


def leaves(prompts, completions):
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            "raises",
            r"raised ZeroDivisionError: .* at prompt 'say \w+ \d+' with completion '.*'; fix it, or return None for a "
            r"completion that cannot be scored",
        ),
        (
            "nan",
            r"returned nan at prompt 'say \w+ \d+' with completion '.*', expected a finite number, or None for a "
            r"completion that cannot be scored; fix it",
        ),
        ("leaves", r"raised SystemExit: 3 at prompt .*; fix it, or return None for a completion that cannot be scored"),
        ("short", r"returned 1 scores for \d+ completions, expected one for each; fix its return value"),
    ],
)
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_reward_function_that_fails(refused: Any, kind: str, function: str, sentence: str) -> None:
    Path("bad.py").write_text(BAD)
    found = refused(*_of("questions", f'{{ kind = "{kind}", reward = "bad.py:{function}", max_new = 5 }}'))
    assert re.fullmatch(rf"tuned: objective\.reward: 'bad\.py:{function}' {sentence}\n", found), found


FOREIGN = """
[stage.other]
kind = "tokenizer"
from = "notes"
vocab = 290

[stage.strange]
kind = "train"
data = { preferences = 1.0 }
tokenizer = "other"
model = { depth = 1, width = 16, heads = 1 }
duration = "2 steps"
objective = "reward"
"""


def test_a_reward_model_with_another_tokenizer(ingot: Any) -> None:
    """Said before anything runs."""
    Path("foreign.toml").write_text(Path("grid.toml").read_text() + FOREIGN)
    changes = _of("questions", '{ kind = "ppo", reward = "strange" }')
    found = ingot("run", "foreign.toml", *(part for change in changes for part in ("--set", change)), cwd=Path.cwd())
    assert found.returncode == 2
    assert found.stderr == (
        "error: stage.tuned: its reward 'strange' has the tokenizer 'other', expected 'bpe', the tokenizer of this "
        "stage; train one of the two again\n"
    )
