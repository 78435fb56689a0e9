"""Charts of what objectives log: their words, both sides of a pair in one chart, and an order."""

import contextlib
import re

from ingot.core.events import EventLog
from ingot.report.html.measures import measures
from ingot.report.html.panels_model import train

PAIRS = [
    {"step": s, "time": 0.0, "loss_nats": 0.5, "lr": 1.0, "tokens": 9}
    | {
        "rewards/chosen": 0.1 * s,
        "rewards/rejected": -0.2 * s,
        "mine_nats": 1.0 * s,
        "rewards/accuracy": 0.5,
        "why": "x",
    }
    for s in (1, 2, 3)
]
HELD_OUT = [{"step": s, "val_rewards/chosen": 0.0, "val_rewards/rejected": 1.0, "val_mine_nats": 2.0} for s in (0, 3)]


def titles(charts):
    return [re.search("<figcaption>(.*?)</figcaption>", chart).group(1) for chart in map(str, charts)]


def test_a_chart_of_each_number_that_has_none_yet_in_order_with_words():
    charts = measures(PAIRS, HELD_OUT, 0.0)
    assert titles(charts) == ["Reward accuracy", "Implicit reward", "Mine, nats"]
    assert "fraction" in charts[0]
    assert "beta times log-ratio" in charts[1]


def test_both_sides_of_a_pair_share_a_chart():
    (_, sides, mine) = measures(PAIRS, HELD_OUT, 0.0)
    legend = re.findall(r"</i>([^<]*)</span>", str(sides))
    assert legend == ["chosen", "chosen, validation", "rejected", "rejected, validation"]
    assert re.findall(r"</i>([^<]*)</span>", str(mine)) == ["train", "validation"]
    (alone,) = measures([{"step": 1, "logps/chosen": -2.0}], [], 0.0)
    assert titles([alone]) == ["Log-probability of completions"]


def test_a_loss_of_pairs_has_no_perplexity(tmp_path):
    with contextlib.closing(EventLog(tmp_path / "metrics.jsonl")) as log:
        log.write("evaluation", step=0, val_loss_nats=0.6931, train_loss_nats=0.6931, **{"val_rewards/accuracy": 0.5})
        log.write("step", step=1, loss_nats=0.6, grad_norm=1.0, lr=1e-3, tok_s=10)
        log.write("evaluation", step=1, val_loss_nats=0.2, train_loss_nats=0.1, **{"val_rewards/accuracy": 0.959})
    page = str(train(tmp_path))
    assert "erplexity" not in page
    assert "nats per token" not in page
    assert re.findall(r"<td class=n>([\d.]+ %)", page) == ["50.0 %", "95.9 %"]
