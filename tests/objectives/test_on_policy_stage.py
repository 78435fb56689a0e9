"""ppo and grpo from a recipe: prompts, a reward model or a function of one's own, adapters, penalties, errors."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.core.events import read_events
from ingot.objectives.on_policy_settings import GRPOSettings, PPOSettings
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of, link, require_files
from ingot.report.html.page import write_report
from ingot.stages import child

TRAIN = """
kind = "train"
batch = 4
precision = "fp32"
evaluate = { every = 2, tokens = 128, sample_tokens = 4 }
loop = { log_every = 1, threads = 1 }
"""
RECIPE = f"""
[run]
name = "small"

[stage.notes]
kind = "corpus"
sources = ["notes.txt"]
quality = "none"
holdout = {{ fraction = 0.2, by = "tail" }}

[stage.preferences]
kind = "corpus"
sources = ["pairs.jsonl"]
format = "pairs"
holdout = {{ fraction = 0.2 }}

[stage.questions]
kind = "corpus"
sources = ["questions.jsonl"]
format = "prompts"
holdout = {{ fraction = 0.2 }}

[stage.bpe]
kind = "tokenizer"
from = "notes"
vocab = 280

[stage.base]
{TRAIN}
data = {{ notes = 1.0 }}
tokenizer = "bpe"
model = {{ depth = 1, width = 32, heads = 2, context = 64 }}
duration = "2 steps"

[stage.rm]
{TRAIN}
init = "base"
data = {{ preferences = 1.0 }}
duration = "2 steps"
objective = "reward"

[stage.polite]
{TRAIN}
init = "base"
data = {{ questions = 1.0 }}
duration = "3 steps"
objective = {{ kind = "ppo", reward = "rm", gold = "check.py:right", max_new = 6, kl_target = 1.0 }}

[stage.right]
{TRAIN}
init = "base"
data = {{ questions = 1.0 }}
duration = "3 steps"
objective = {{ kind = "grpo", reward = "check.py:right", gold = "rm", max_new = 6, group = 2, beta = 0.01 }}
adapter = {{ rank = 2 }}
penalties = [{{ kind = "l2sp", weight = 0.1 }}]
"""
CHECK = """
def right(prompts, completions):
    assert all(p["prompt"] == f"say {p['answer']} {p['number']}" for p in prompts)
    return [float(p["answer"] in c) - 0.1 * len(c) for p, c in zip(prompts, completions)]
"""
WORDS = ["cat", "dog", "hill", "sun", "mill"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's directory, its stages built in this process, each as its child would build it."""
    path, draw = tmp_path_factory.mktemp("reinforce"), random.Random(0)
    (path / "notes.txt").write_text("\n".join(" ".join(draw.choices(WORDS, k=12)) for _ in range(60)))
    pairs = [{"prompt": f"say {w} {i}", "chosen": f"the {w}", "rejected": "no"} for i, w in enumerate(WORDS * 6)]
    (path / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    asked = [{"prompt": f"say {w} {i}", "answer": w, "number": i} for i, w in enumerate(WORDS * 6)]
    (path / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in asked))
    (path / "check.py").write_text(CHECK)
    (path / "small.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        graph = load_graph(Path("small.toml"), [], Path("runs"))
        for node in graph.nodes.values():
            link(graph, node)
            child.run(job_of(graph, node, quiet=True))
    return path


@pytest.fixture(autouse=True)
def _there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "work" in request.fixturenames:
        monkeypatch.chdir(request.getfixturevalue("work"))


def _result(name: str) -> dict[str, Any]:
    return json.loads(Path("runs", "small", name, "result.json").read_text())


def test_a_stage_is_judged_by_the_reward_of_fresh_samples(work):
    for name in ("polite", "right"):
        result = _result(name)
        assert {"val_reward", "val_gold_reward", "best_val_reward", "val_completion_tokens"} <= set(result)
        assert "val_loss_nats" not in result
        steps = read_events(Path("runs", "small", name, "metrics.jsonl"), "step")
        assert len(steps) == 3
        for step in steps:
            assert step["first_ratio"] == pytest.approx(1, abs=1e-4)
            assert step["sampler_gap"] < 1e-4
            assert step["gold_reward"] != step["reward"]
        assert steps[0]["kl_nats"] == 0
    assert {"beta", "value_loss"} <= set(read_events(Path("runs", "small", "polite", "metrics.jsonl"), "step")[0])
    step = read_events(Path("runs", "small", "right", "metrics.jsonl"), "step")[0]
    assert any("l2sp" in name for name in step), sorted(step)


def test_reports_show_it(work):
    graph = load_graph(Path("small.toml"), [], Path("runs"))
    page = write_report(graph)
    text = Path(page).read_text()
    assert "reward" in text.lower()


def test_the_content_of_a_reward_file_is_in_the_key(work):
    before = load_graph(Path("small.toml"), [], Path("runs")).nodes
    (work / "check.py").write_text(CHECK + "# other\n")
    after = load_graph(Path("small.toml"), [], Path("runs")).nodes
    (work / "check.py").write_text(CHECK)
    assert {n for n in before if before[n].key != after[n].key} == {"polite", "right"}


def test_prompts_leave_room_for_their_completions(work):
    with pytest.raises(UserError, match=r"objective.max_new: found 64, expected less than the context of 64"):
        load_graph(Path("small.toml"), ["stage.polite.objective.max_new=64"], Path("runs"))
    graph = load_graph(Path("small.toml"), ["stage.polite.objective.max_new=60"], Path("runs"))
    with pytest.raises(UserError, match=r"longer than the maximum of 4 tokens, .* smaller objective.max_new"):
        child.run(job_of(graph, graph.nodes["polite"], quiet=True))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('stage.right.objective.reward="gone.py:right"', r"objective.reward: 'gone.py:right': no file gone.py"),
        ('stage.right.objective.gold="gone.py:right"', r"objective.gold: 'gone.py:right': no file gone.py"),
        ('stage.polite.objective.gold="base"', r"'base' is not a reward model, expected a train stage with objective"),
        (
            'stage.polite.objective.reward="base"',
            r"'base' is not a reward model, expected a train stage with objective",
        ),
    ],
)
def test_what_a_recipe_gets_wrong_is_said_before_anything_runs(work, override, message):
    with pytest.raises(UserError, match=message):
        require_files([load_graph(Path("small.toml"), [override], Path("runs"))], [])


def test_settings_that_nobody_reads_are_refused():
    for model, table, message in (
        (GRPOSettings, {"reference": "a"}, "with beta = 0, which does not use it"),
        (PPOSettings, {"beta": 0, "kl_target": 1}, "kl_target with beta = 0"),
        (PPOSettings, {"beta": 0.1, "kl_target": 1, "kl": "k2-loss"}, "kl_target with kl = 'k2-loss'"),
        (PPOSettings, {"truncated": "mask", "no_stop_reward": -1}, "no_stop_reward with truncated = 'mask'"),
    ):
        with pytest.raises(ValidationError, match=message):
            model.model_validate({"reward": "rm", **table})


def test_companions_are_what_the_settings_need():
    assert PPOSettings(reward="rm").companions() == {"reference": None, "reward": "rm"}
    assert PPOSettings(reward="own.py:f", reference="a").companions() == {"reference": "a"}
    assert GRPOSettings(reward="own.py:f").companions() == {}
    assert GRPOSettings(reward="own.py:f", gold="rm").companions() == {"gold": "rm"}
    assert GRPOSettings(reward="rm", gold="own.py:f").companions() == {"reward": "rm"}
