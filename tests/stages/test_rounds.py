"""Data made with models: a model's answers, judged by a function, a reward model or people; and rounds of all that."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import UserError
from ingot.core.events import Display
from ingot.corpus.documents import read_documents
from ingot.pipeline.graph import load_graph, load_graphs
from ingot.pipeline.run import job_of, link, require_files
from ingot.pipeline.status import status
from ingot.plan.machine import GPUS
from ingot.report.html.page import write_report
from ingot.report.plan import plan_rows
from ingot.stages import child

ROOT = Path("runs")
TRAIN = """
kind = "train"
batch = 4
precision = "fp32"
evaluate = { every = 9, tokens = 64, sample = false }
loop = { threads = 1 }
"""
RECIPE = f"""
[run]
name = "rounds"

[stage.notes]
kind = "corpus"
sources = ["notes.txt"]
quality = "none"
holdout = {{ fraction = 0.2, by = "tail" }}

[stage.questions]
kind = "corpus"
sources = ["questions.jsonl"]
format = "prompts"
holdout = {{ fraction = 0.3 }}

[stage.bpe]
kind = "tokenizer"
from = "notes"
vocab = 280

[stage.base]
{TRAIN}
data = {{ notes = 1.0 }}
tokenizer = "bpe"
model = {{ depth = 1, width = 32, heads = 2, context = 48 }}
duration = "2 steps"

[repeat]
rounds = 2
stages = ["sample", "pairs", "reward", "policy"]
start = {{ policy = "base", reward = "base" }}

[stage.sample]
kind = "generate"
model = "policy"
data = "questions"
samples = 3
max_new = 6
unfinished = "keep"

[stage.pairs]
kind = "label"
data = "sample"
by = "rule.py:short"

[stage.reward]
{TRAIN}
init = "reward"
data = {{ "pairs*" = 1.0 }}
objective = "reward"
duration = "2 steps"

[stage.policy]
{TRAIN}
init = "policy"
data = {{ questions = 1.0 }}
objective = {{ kind = "ppo", reward = "reward", reference = "base", max_new = 4, epochs = 1 }}
duration = "1 steps"
"""
RULE = """
def short(prompts, completions):
    assert all(p["prompt"] == f"say {p['word']} {p['number']}" for p in prompts)
    return [None if c.startswith("x") else -float(len(c)) for c in completions]
"""
PEOPLE = (
    """
[stage.people]
kind = "label"
data = "sample-1"
by = "better.jsonl"

[stage.best]
kind = "label"
data = "sample-1"
by = "reward-1"
format = "chat"

[stage.distilled]
"""
    + TRAIN
    + """
init = "base"
data = { best = 1.0 }
duration = "1 steps"
"""
)
WORDS = ["cat", "dog", "hill", "sun", "mill"]


def _graph(recipe: str = "rounds.toml", *overrides: str) -> Any:
    return load_graph(Path(recipe), list(overrides), ROOT)


def _build(names: list[str], recipe: str = "rounds.toml", *overrides: str) -> None:
    """Make stages and what they need in this process, each as its child would."""
    graph = _graph(recipe, *overrides)
    for node in graph.needed(names):
        link(graph, node)
        child.run(job_of(graph, node, quiet=True))


def _result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "rounds" / name / "result.json").read_text())


def _documents(name: str) -> list[dict[str, Any]]:
    return [row for batch in read_documents(ROOT / "rounds" / name) for row in batch.to_pylist()]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds, made whole."""
    path, draw = tmp_path_factory.mktemp("rounds"), random.Random(0)
    (path / "notes.txt").write_text("\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(60)))
    asked = [{"prompt": f"say {w} {i}", "word": w, "number": i} for i, w in enumerate(WORDS * 6)]
    (path / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in asked))
    (path / "rule.py").write_text(RULE)
    (path / "rounds.toml").write_text(RECIPE)
    (path / "people.toml").write_text(RECIPE + PEOPLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        _build([])
    return path


@pytest.fixture(autouse=True)
def _there(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)


def test_every_round_is_made_of_the_one_before() -> None:
    graph = _graph()
    nodes = graph.nodes
    assert nodes["sample-2"].inputs["model"] is nodes["policy-1"]
    assert nodes["reward-2"].inputs["init"] is nodes["reward-1"]
    assert nodes["policy-2"].inputs["companion:reward"] is nodes["reward-2"]
    assert nodes["policy-2"].inputs["companion:reference"] is nodes["base"]
    assert {"data:pairs-1", "data:pairs-2"} <= set(nodes["reward-2"].inputs)
    assert all(status(graph, node).state == "HIT" for node in nodes.values())
    assert nodes["policy-1"].key == _graph("rounds.toml", "repeat.rounds=3").nodes["policy-1"].key


def test_answers_keep_the_place_and_the_split_of_their_prompts() -> None:
    asked = {row["text"]: row for row in _documents("questions")}
    rows, result = _documents("sample-1"), _result("sample-1")
    assert len(rows) == result["documents"] == 30 * 3 - result["empty"]
    for row in rows:
        *prompt, answer = json.loads(row["text"])
        source = asked[json.dumps(prompt, separators=(",", ":"))]
        assert answer["role"] == "assistant"
        assert (row["split"], row["cluster"], row["extra"]) == (source["split"], source["cluster"], source["extra"])
        assert row["bytes"] == len(row["text"].encode())
    texts = [row["text"] for row in rows]
    assert len(set(texts)) > len(texts) / 2, "the samples of a prompt are different ones"


def test_of_scored_answers_the_best_and_the_worst_make_a_pair() -> None:
    groups: dict[int, list[str]] = {}
    for row in _documents("sample-1"):
        answer = json.loads(row["text"])[-1]["content"]
        if not answer.startswith("x"):
            groups.setdefault(row["offset"], []).append(answer)
    pairs = {row["offset"]: json.loads(row["text"]) for row in _documents("pairs-1")}
    expected = {at: answers for at, answers in groups.items() if len({*map(len, answers)}) > 1}
    assert set(pairs) == set(expected)
    for at, pair in pairs.items():
        assert len(pair["chosen"][0]["content"]) == min(map(len, expected[at]))
        assert len(pair["rejected"][0]["content"]) == max(map(len, expected[at]))
    assert _result("pairs-1")["ties"] == len(groups) - len(expected)


def test_sampling_goes_on_after_a_kill_to_the_byte(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.stages.synthesis import generate, local_model

    whole = _documents("sample-1")
    overrides = ("repeat.rounds=1", "stage.sample.seed=1")  # the run's own, under another key
    monkeypatch.setattr(generate, "BATCH_ROWS", 12)
    calls, real = [], local_model.generate

    def dies(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(local_model, "generate", dies)
    with pytest.raises(KeyboardInterrupt):
        _build(["sample-1"], "rounds.toml", *overrides)
    _build(["sample-1"], "rounds.toml", *overrides)
    parts = -(-sum(r["split"] == "train" for r in _documents("questions")) // 4)
    parts += -(-sum(r["split"] == "val" for r in _documents("questions")) // 4)
    assert len(calls) == parts + 1, "what was done before the kill is not done again"
    assert _documents("sample-1") == whole, "the seed is the run's; batches and the kill leave no trace"
    _build(["sample-1"])


def test_people_fill_a_file_and_the_same_command_goes_on(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(Display, "notify", lambda self, message: messages.append(message))

    def state() -> tuple[str, str]:
        graph = _graph("people.toml")
        found = status(graph, graph.nodes["people"])
        return found.state, found.why

    assert state() == ("WAIT", "for human labels in better.jsonl, which is written when the answers are complete")
    with pytest.raises(
        UserError, match=r'waiting for human labels in better.jsonl: \d+ of \d+ lines have no "better" yet'
    ):
        _build(["people"], "people.toml")
    rows = [json.loads(line) for line in Path("better.jsonl").read_text().splitlines()]
    assert state()[0] == "WAIT"
    page = write_report(_graph("people.toml")).read_text()
    assert "waiting" in page, "a run that waits has a page like any other"
    for n, row in enumerate(rows):
        row["better"] = "a" if n % 3 == 0 else "b" if n % 3 == 1 else "tie"
    Path("better.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert state()[0] == "RUN"
    _build(["people"], "people.toml")
    pairs = [json.loads(row["text"]) for row in _documents("people")]
    left_over = len(_documents("sample-1")) - 2 * len(rows)
    assert left_over > 0
    assert any(f"; {left_over:,} answers that people did not compare, because" in message for message in messages)
    sides = {(p["chosen"][0]["content"], p["rejected"][0]["content"]) for p in pairs}
    wanted = {(r["a"], r["b"]) if r["better"] == "a" else (r["b"], r["a"]) for r in rows if r["better"] != "tie"}
    assert sides == wanted
    before = _graph("people.toml").nodes["people"].key
    rows[0]["better"] = "b"
    Path("better.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _graph("people.toml").nodes["people"].key != before, "who changes their mind gets other pairs"
    rows[0]["better"] = "c"
    Path("better.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r'better.jsonl, line 1: found better = \'c\', expected "a", "b" or "tie"'):
        require_files([_graph("people.toml")], [])
    Path("better.jsonl").unlink()


def test_two_sets_of_samples_do_not_share_a_file_of_answers(work: Path) -> None:
    Path("sweep.toml").write_text(Path("people.toml").read_text() + '[sweep]\n"stage.sample.temperature" = [0.5, 1]\n')
    with pytest.raises(
        UserError, match=r"stage\.people\.by: found 'better.jsonl', which another point of the sweep uses for other"
    ):
        load_graphs(Path("sweep.toml"), [], ROOT)
    Path("two.toml").write_text(Path("people.toml").read_text() + PEOPLE.split("[stage.best]")[0].replace(
        "stage.people", "stage.others").replace("sample-1", "sample-2"))  # fmt: skip
    with pytest.raises(
        UserError, match=r"stage\.others\.by: found 'better.jsonl', which stage\.people uses for other samples"
    ):
        load_graphs(Path("two.toml"), [], ROOT)
    load_graphs(Path("two.toml"), ["stage.others.by='more.jsonl'"], ROOT)


def test_completions_that_leave_no_room_for_prompts_are_refused_before_anything_runs(work: Path) -> None:
    for setting in ("stage.policy.objective.max_new=48", "stage.base.model.context=4"):
        with pytest.raises(UserError, match=r"stage\.policy-1\.objective\.max_new: found \d+, expected less than"):
            _graph("rounds.toml", setting)
    _graph("rounds.toml", "stage.policy.objective.max_new=47")


def test_plans_and_reports_show_them(work: Path) -> None:
    rows = {row["name"]: row for row in plan_rows(_graph("people.toml"), GPUS["a100"])}
    assert rows["people"]["state"] == "WAIT"
    assert rows["pairs-2"]["facts"] == {"data": "sample-2", "by": "rule.py:short", "format": "pairs"}
    assert rows["sample-2"]["facts"]["model"] == "policy-1"
    page = Path(write_report(_graph())).read_text()
    assert "mean score of the answers" in page


def test_a_reward_model_picks_what_is_learned_from(work: Path) -> None:
    _build(["distilled"], "people.toml")
    result, rows = _result("best"), _documents("best")
    assert result["documents"] == len(rows) == len({row["offset"] for row in rows})
    assert result["worst_score"] < result["score"] < result["best_score"]
    assert {row["source"] for row in rows} == {"label:reward-1"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('stage.sample.data="notes"', "'notes' has format = \"text\", but a generate stage answers prompts"),
        ('stage.pairs.data="questions"', "stage 'questions' is a corpus, expected a generate"),
        ('stage.pairs.by="base"', "'base' is not a reward model"),
        ('stage.pairs.by="gone.py:f"', "by: 'gone.py:f': no file gone.py"),
        ("stage.pairs.min_score = 1.0", "found min_score = 1, which only"),
    ],
)
def test_what_a_recipe_gets_wrong_is_said_before_anything_runs(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_files([_graph("rounds.toml", override)], [])
