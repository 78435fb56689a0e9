"""The panel of a judge stage, and what training against a reward adds to a train stage's."""

import json

import pytest

from ingot.core.artifact import atomic_json
from ingot.report.html.panels import panel
from ingot.report.html.panels_judge import alarms

HOSTILE = "<script>alert(1)</script>"


def _row(model, task, metric, value, spread=0.0, n=50):
    bounds = {"low": value - spread, "high": value + spread}
    return {"model": model, "task": task, "metric": metric, "value": value, **bounds, "n": n}


@pytest.fixture
def stage(tmp_path):
    settings = {"models": ["dpo", "ppo"], "against": "chat", "by": ["proxy", "gold.py:score"]}
    atomic_json(tmp_path / "inputs.json", {"name": "verdict", "kind": "judge", "settings": settings})
    rows = [_row("dpo", "proxy", "win_rate", 0.73, 0.06), _row("ppo", "proxy", "win_rate", 0.91, 0.04)]
    for model, proxy, gold, tokens in (("chat", 0.0, 0.5, 20.0), ("dpo", 1.0, 0.9, 22.0), ("ppo", 2.0, 0.2, 60.0)):
        rows += [_row(model, "proxy", "score", proxy), _row(model, "gold.py:score", "score", gold)]
        rows += [_row(model, "answers", "tokens", tokens, 1.0)]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    answer = {"model": "dpo", "prompt": "why?", "answer": HOSTILE, "tokens": 3, "ended_by": "stop"}
    (tmp_path / "answers.jsonl").write_text(json.dumps({**answer, "scores": {"proxy": 1.25}}) + "\n")
    return tmp_path


def test_rates_intervals_and_alarms_are_shown(stage):
    page = str(panel("judge", stage))
    assert "Against chat, judged by proxy" in page
    assert "73.0 %" in page
    assert "67.0 % to 79.0 %, n = 50" in page
    assert "Statistics of the answers" in page
    assert "dpo, proxy 1.25" in page
    assert HOSTILE not in page
    assert page.index("<td>chat") < page.index("<td>dpo") < page.index("<td>ppo")
    assert page.count("badge warn") == 2  # ppo: gold falls while the proxy climbs, and answers are three times as long
    assert "answers are 3 times as long" in page
    assert "the gold reward falls (from 0.9 to 0.2)" in page


def test_without_a_table_it_says_so(tmp_path):
    atomic_json(tmp_path / "inputs.json", {"name": "verdict", "kind": "judge", "settings": {}})
    assert "No verdict yet" in str(panel("judge", tmp_path))


def test_training_against_a_reward_is_watched():
    steps = [
        {"step": s, "reward": 0.1 * s, "completion_tokens": 20 + s, "kl_nats": 0.01 * s, "loss_nats": 1.0}
        for s in range(60)
    ]
    assert [alarm.name for alarm in alarms(steps)] == ["tokens"]
    plain = [{"step": s, "loss_nats": 1.0} for s in range(60)]
    assert alarms(plain) == []
