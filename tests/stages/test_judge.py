"""A judge stage as a recipe has it: who answers, who judges, and what stands in the table."""

import itertools
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ingot import api
from ingot.core.errors import UserError
from ingot.core.events import Display
from ingot.pipeline.graph import Graph, import_graph, load_graph
from ingot.pipeline.run import job_of, link, require_files
from ingot.stages import child
from ingot.stages.evaluation import judge
from ingot.stages.evaluation.settings import JudgeSettings
from ingot.stages.job import Input
from ingot.stages.models.load import load_frozen, load_model
from ingot.stages.models.reward_scores import RewardStage

TRAIN = """
kind = "train"
batch = 4
precision = "fp32"
evaluate = { sample = false, tokens = 64 }
loop = { threads = 1 }
"""
RECIPE = f"""
[run]
name = "verdicts"

[stage.talk]
kind = "corpus"
sources = ["talk.jsonl"]
format = "chat"
pii = false
holdout = {{ fraction = 0.3, by = "document" }}

[stage.bpe]
kind = "tokenizer"
from = "talk"
vocab = 280

[stage.base]
{TRAIN}
data = {{ talk = 1.0 }}
tokenizer = "bpe"
model = {{ depth = 1, width = 16, heads = 2, context = 48 }}
duration = "4 steps"

[stage.tuned]
{TRAIN}
init = "base"
data = {{ talk = 1.0 }}
duration = "30 steps"
optim = {{ lr = 2e-2 }}

[stage.pairs]
kind = "corpus"
sources = ["pairs.jsonl"]
format = "pairs"
pii = false
holdout = {{ fraction = 0.3, by = "document" }}

[stage.rewards]
{TRAIN}
init = "base"
data = {{ pairs = 1.0 }}
objective = "reward"
duration = "20 steps"
optim = {{ lr = 1e-2 }}

[stage.verdict]
kind = "judge"
models = ["tuned"]
against = "base"
data = "talk"
by = ["rules.py:echo", "rules.py:length", "base", "rewards"]
prompts = 12
max_new = 12
"""
RULES = """
def echo(prompts, completions):
    return [sum(c in p["prompt"] for c in a) / len(a) if a else None for p, a in zip(prompts, completions)]

def length(prompts, completions):
    return [len(a) for a in completions]

def broken(prompts, completions):
    return [1 / 0 for _ in prompts]
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp("verdicts")
    draw = random.Random(1)
    with (work / "talk.jsonl").open("w") as file, (work / "pairs.jsonl").open("w") as pairs:
        for n in range(60):
            word = "".join(draw.choices("abcd", k=4))
            pair = {"prompt": f"say {word} {n}", "chosen": word, "rejected": "".join(draw.choices("xyz ", k=9))}
            pairs.write(json.dumps(pair) + "\n")
            turns = [{"role": "user", "content": f"say {word} {n}"}, {"role": "assistant", "content": word}]
            file.write(json.dumps({"messages": turns}) + "\n")
    (work / "rules.py").write_text(RULES)
    (work / "verdicts.toml").write_text(RECIPE)
    before = Path.cwd()
    os.chdir(work)
    try:
        graph = load_graph(Path("verdicts.toml"), [], Path("runs"))
        for name in ("talk", "bpe", "talk@bpe", "base", "tuned", "pairs", "pairs@bpe", "rewards", "verdict"):
            _run(graph, name)
        yield graph
    finally:
        os.chdir(before)


def _run(graph: Graph, name: str) -> Path:
    node = graph.nodes[name]
    job = job_of(graph, node, quiet=True)
    child.run(job)
    link(graph, node)
    return Path(job["dir"])


def _table(stage: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    rows = [json.loads(line) for line in (stage / "table.jsonl").open()]
    return {(r["model"], r["task"], r["metric"]): r for r in rows}


def _answers(stage: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (stage / "answers.jsonl").open():
        row = json.loads(line)
        found.setdefault(row["model"], []).append(row)
    return found


def test_the_table_is_what_the_answers_and_scores_say(graph: Graph) -> None:
    stage = graph.stage(graph.nodes["verdict"]).path
    table, answers = _table(stage), _answers(stage)
    assert {len(rows) for rows in answers.values()} == {12}
    assert [a["prompt"] for a in answers["base"]] == [a["prompt"] for a in answers["tuned"]]
    assert all(a["prompt"].startswith("say ") for a in answers["base"])  # no special tokens in what a rule reads
    for rule in ("rules.py:echo", "rules.py:length"):
        pairs = [(a["scores"][rule], b["scores"][rule]) for a, b in zip(answers["tuned"], answers["base"], strict=True)]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        rate = np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in known])
        assert table["tuned", rule, "win_rate"]["value"] == pytest.approx(rate)
        assert table["tuned", rule, "win_rate"]["n"] == len(known)
        assert table["tuned", rule, "score_difference"]["value"] == pytest.approx(np.mean([a - b for a, b in known]))
    for model in ("base", "tuned"):
        assert table[model, "answers", "tokens"]["value"] == np.mean([a["tokens"] for a in answers[model]])
        stopped = np.mean([a["ended_by"] == "stop" for a in answers[model]])
        assert table[model, "answers", "stopped"]["value"] == pytest.approx(stopped)
    assert ("base", "rules.py:echo", "win_rate") not in table
    assert json.loads((stage / "result.json").read_text())["tuned/rules.py:echo/win_rate"] >= 0


def test_what_was_learned_wins(graph: Graph) -> None:
    """Trained to say the word again and then stop, against a model that writes anything until it is cut off."""
    table = _table(graph.stage(graph.nodes["verdict"]).path)
    assert table["tuned", "rules.py:echo", "score_difference"]["low"] > 0
    assert table["tuned", "answers", "stopped"]["low"] > table["base", "answers", "stopped"]["value"]
    assert table["tuned", "answers", "kl_nats"]["low"] > 0
    assert ("base", "answers", "kl_nats") not in table


def test_a_judge_that_is_asked_sees_both_orders(graph: Graph) -> None:
    table = _table(graph.stage(graph.nodes["verdict"]).path)
    assert 0 <= table["tuned", "base", "first_preferred"]["value"] <= 1
    assert table["tuned", "base", "first_preferred"]["n"] == 24
    assert table["tuned", "base", "win_rate"]["n"] == 12


def test_a_model_against_an_equal_one_is_a_tie_to_the_bit(graph: Graph) -> None:
    """The same weights under another stage's name: keyed sampling gives the same answers, whoever else is judged."""
    settings = ["stage.verdict.models=['twin']", "stage.verdict.by=['rules.py:length']"]
    recipe = Path("twin.toml")
    twin = RECIPE.partition("[stage.tuned]")[2].partition("[stage.pairs]")[0]
    recipe.write_text(f"{RECIPE}[stage.twin]\n{twin}")
    made = load_graph(recipe, [*settings, "stage.verdict.against='tuned'"], Path("runs"))
    assert made.nodes["twin"].key == made.nodes["tuned"].key
    table = _table(_run(made, "verdict"))
    assert table["twin", "rules.py:length", "ties"]["value"] == 1
    assert table["twin", "rules.py:length", "win_rate"]["value"] == 0.5
    assert table["twin", "answers", "kl_nats"]["value"] == pytest.approx(0, abs=1e-4)


def test_models_of_different_contexts_answer_what_all_of_them_hold(graph: Graph) -> None:
    """A KL is of answers that the model that is compared with could have written."""
    scaling = "{factor=2, low_freq_factor=1, high_freq_factor=4, original_context=48}"
    longer = [f"stage.base.model.rope_scaling={scaling}", "stage.tuned.context=96"]
    longer += ["stage.tuned.duration='1 steps'", "stage.tuned.optim.lr=1e-4"]
    longer += ["stage.verdict.max_new=90", "stage.verdict.by=['rules.py:length']"]
    for turned in ([], ["stage.verdict.against='tuned'", "stage.verdict.models=['base']"]):
        made = load_graph(Path("verdicts.toml"), [*longer, *turned], Path("runs"))
        for name in ("base", "rewards", "tuned"):
            _run(made, name)
        stage = _run(made, "verdict")
        model = "base" if turned else "tuned"
        table, answers = _table(stage), _answers(stage)
        prompts = {name: [row["prompt"] for row in found] for name, found in answers.items()}
        assert prompts["base"] == prompts["tuned"]
        most = max(row["tokens"] for row in answers["tuned"])
        assert max(row["tokens"] for row in answers["base"]) <= 48 < most
        kl = table[model, "answers", "kl_nats"]
        assert (kl["n"] < 12) == (not turned)


def test_a_reward_model_scores_prompt_answer_and_end_in_its_own_units(graph: Graph) -> None:
    """Each answer alone and without padding gets the score that it got in the batch."""
    stage = graph.stage(graph.nodes["verdict"]).path
    rewards = graph.stage(graph.nodes["rewards"]).path
    model: Any = load_frozen(rewards, print, "cpu", torch.float32)
    table, answers, checked = _table(stage), _answers(stage), 0
    base = load_model(graph.stage(graph.nodes["base"]).path, print, device="cpu")
    settings = JudgeSettings.model_validate(
        {"models": ["a"], "against": "b", "data": "talk", "by": ["c"], "prompts": 12}
    )
    node = graph.nodes["talk@bpe"]
    prompts = judge.open_prompts(
        Input(node.name, node.key, graph.stage(node).path), base.tokenizer, base.config.context, settings, pytest.fail
    )
    for row, prompt in zip(answers["tuned"], prompts, strict=True):
        answer = base.tokenizer.encode(row["answer"]).tolist()
        end = [base.tokenizer.specials["<|end|>"]] if row["ended_by"] == "stop" else []
        if row["ended_by"] in ("stop", "length") and len(answer) + len(end) == row["tokens"]:  # spelled as usual
            orders = {*itertools.permutations(answer)} if len(answer) < 4 else {tuple(answer)}  # or "aaa" as a + aa
            rows = [[*prompt.ids.tolist(), *o, *end] for o in orders if base.tokenizer.decode(o) == row["answer"]]
            scores = [float(model.scores(torch.tensor([ids]), torch.tensor([len(ids)]))) for ids in rows]
            assert min(abs(row["scores"]["rewards"] - score) for score in scores) <= 1e-4
            checked += 1
    assert checked >= 6
    assert table["tuned", "rewards", "score_difference"]["low"] > 0  # it was taught to like the word that was asked for
    assert table["tuned", "rewards", "win_rate"]["low"] > 0.5


def test_a_loaded_reward_model_scores_conversations_as_the_judge_does(graph: Graph) -> None:
    model = api.load(graph.stage(graph.nodes["rewards"]).path, device="cpu")
    scored = [row for row in _answers(graph.stage(graph.nodes["verdict"]).path)["tuned"] if row["ended_by"] == "stop"]
    scored = [row for row in scored if len(model.loaded.tokenizer.encode(row["answer"])) + 1 == row["tokens"]]
    talks = [_talk(row["prompt"], row["answer"]) for row in scored]
    assert len(talks) >= 4
    assert model.score(talks) == pytest.approx([row["scores"]["rewards"] for row in scored], abs=1e-4)
    assert model.score(talks[0]) == pytest.approx(scored[0]["scores"]["rewards"], abs=1e-4)
    assert max(model.score(talks)) > model.score(_talk(scored[0]["prompt"], "xyz zyx"))
    with pytest.raises(UserError, match="found no reward model, expected a train stage with objective"):
        api.load(graph.stage(graph.nodes["tuned"]).path, device="cpu").score(talks)


def _talk(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def test_what_a_reward_model_cannot_hold_has_no_score(graph: Graph) -> None:
    node = graph.nodes["rewards"]
    job: Any = SimpleNamespace(display=SimpleNamespace(notify=print))
    rewards = RewardStage(Input(node.name, node.key, graph.stage(node).path), job, "cpu")
    rows = [np.arange(1, length) for length in (5, rewards.context + 2, 9)]
    done: list[int] = []
    scores = rewards(rows, done.append)
    assert np.isnan(scores).tolist() == [False, True, False]
    assert sum(done) == 3
    alone = [float(rewards([row])[0]) for row in rows]
    assert scores == pytest.approx(alone, abs=1e-5, nan_ok=True)


def test_edits_of_a_rule_and_what_does_not_fit(graph: Graph) -> None:
    def key(*changes: str) -> str:
        graph = load_graph(Path("verdicts.toml"), list(changes), Path("runs"))
        require_files([graph], ["verdict"])
        return graph.nodes["verdict"].key

    before, rules = key(), Path("rules.py")
    rules.write_text(RULES + "\n# edited\n")
    assert key() != before
    rules.write_text(RULES)
    assert key() == before
    assert key("stage.verdict.device='cpu'") == before
    for change, sentence in (
        ("stage.verdict.by=['other.py:echo']", r"by: 'other\.py:echo': no file other\.py"),
        ("stage.verdict.by=['rules.py:echos']", r"rules\.py has no function 'echos'; did you mean 'echo'"),
        ("stage.verdict.by=['nobody']", "stage.verdict.by: no stage 'nobody'"),
        ("stage.verdict.data='texts'", "no stage 'texts'"),
        ("stage.verdict.models=['base']", "found 'base' against itself"),
        ("stage.verdict.models=['tuned', 'tuned']", "found a name twice in models"),
    ):
        with pytest.raises(UserError, match=sentence):
            key(change)
    made = load_graph(Path("verdicts.toml"), ["stage.verdict.by=['rules.py:broken']"], Path("runs"))
    with pytest.raises(UserError, match="ZeroDivisionError"):
        _run(made, "verdict")


def test_prompts_that_fill_the_context_are_counted(graph: Graph) -> None:
    table = {"models": ["a"], "against": "b", "data": "talk", "by": ["c"]}
    settings, node, messages = JudgeSettings.model_validate(table), graph.nodes["talk@bpe"], list[str]()
    tokenizer = load_model(graph.stage(graph.nodes["base"]).path, print, device="cpu").tokenizer
    stage = Input(node.name, node.key, graph.stage(node).path)
    every = judge.open_prompts(stage, tokenizer, 48, settings, pytest.fail)
    context = max(len(prompt.ids) for prompt in every)
    some = judge.open_prompts(stage, tokenizer, context, settings, messages.append)
    (message,) = messages
    assert message.startswith(f"talk: {len(every) - len(some)} of {len(every)} held-out prompts are left out")


def test_an_imported_reward_model_is_refused_as_a_judge_and_its_import_names_the_lost_head(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(Display, "notify", lambda self, message: messages.append(message))
    made = import_graph("runs/verdicts/rewards", Path("runs"), name="trunk")
    for name in ("trunk.tokenizer", "trunk"):
        _run(made, name)
    assert any("the reward head of runs/verdicts/rewards is left out" in message for message in messages), messages
    trunk = str(made.stage(made.nodes["trunk"]).path)
    recipe = Path("imported.toml")
    recipe.write_text(f'{RECIPE}\n[stage.again]\nkind = "import"\npath = "runs/verdicts/rewards"\n')
    for name in ("runs/verdicts/rewards", "again", trunk):
        with pytest.raises(UserError, match=r"stage\.verdict\.by: '.*' is an import of a reward model, .* name it$"):
            load_graph(recipe, [f"stage.verdict.by=['{name}']"], Path("runs"))
    distill = f"stage.tuned.objective={{kind='distill', teacher='{trunk}'}}"
    with pytest.raises(UserError, match="is a reward model, expected one that predicts text"):
        load_graph(recipe, [distill, "stage.tuned.optim.lr=1e-3"], Path("runs"))
    assert load_graph(recipe, ["stage.verdict.by=['runs/verdicts/tuned']"], Path("runs"))
