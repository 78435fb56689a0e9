"""The forgetting matrix in numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest

from ingot.evaluate.forgetting import LATER, OLD, ChainStage, Scores, summary

CHAIN = [ChainStage("one", ("a",)), ChainStage("two", ("b",)), ChainStage("three", ("c",))]


def _scores(matrix: dict[tuple[str, str], float], documents: int = 50, noise: float = 0.3) -> dict[Any, Scores]:
    """Losses with that mean; documents differ much, and each the same way for every model."""
    hard = np.random.default_rng(3).normal(size=documents)
    hard -= hard.mean()
    return {
        key: Scores((loss + noise * hard) * 10, np.full(documents, 10), "_nats", chance=-3.0)
        for key, loss in matrix.items()
    }


LOSSES = {
    ("one", "a"): 1.0, ("one", "b"): 2.8, ("one", "c"): 2.9,
    ("two", "a"): 1.5, ("two", "b"): 1.1, ("two", "c"): 2.5,
    ("three", "a"): 2.0, ("three", "b"): 1.2, ("three", "c"): 0.9,
}  # fmt: skip


def _by(rows: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["task"], r["metric"]): r for r in rows}


def test_2_7_forgetting_and_transfer_are_their_definitions() -> None:
    found = _by(summary(CHAIN, _scores(LOSSES)))
    values = {key: row["value"] for key, row in found.items()}
    assert values == pytest.approx(
        {
            ("a", "forgetting_nats"): 2.0 - 1.0,  # the best before was stage one's
            ("b", "forgetting_nats"): 1.2 - 1.1,
            (OLD, "backward_transfer_nats"): -((2.0 - 1.0) + (1.2 - 1.1)) / 2,
            (LATER, "forward_transfer_nats"): ((3.0 - 2.8) + (3.0 - 2.5)) / 2,
        }
    )
    assert {row["model"] for row in found.values()} == {"three"}


def test_2_7_intervals_are_over_documents_and_paired() -> None:
    """What is hard about a document cancels in a difference, and not in a level."""
    found = _by(summary(CHAIN, _scores(LOSSES)))
    change, level = found["a", "forgetting_nats"], found[LATER, "forward_transfer_nats"]
    assert change["high"] - change["low"] < 1e-9
    assert 0.03 < level["high"] - level["low"] < 0.3
    assert level["low"] < level["value"] < level["high"]


def test_2_7_the_best_earlier_stage_counts_not_the_one_that_learned_it() -> None:
    """b got better in stage three and was lost in stage four: forgetting is from its best, transfer from its own."""
    chain = [*CHAIN, ChainStage("four", ())]
    losses = LOSSES | {("three", "b"): 0.7, ("four", "a"): 1.0, ("four", "b"): 1.3, ("four", "c"): 0.8}
    found = _by(summary(chain, _scores(losses)))
    assert found["b", "forgetting_nats"]["value"] == pytest.approx(1.3 - 0.7)
    assert found["a", "forgetting_nats"]["value"] == pytest.approx(0)
    assert found["c", "forgetting_nats"]["value"] == pytest.approx(0.8 - 0.9)  # backward transfer that helped
    backward = ((1.0 - 1.0) + (1.1 - 1.3) + (0.9 - 0.8)) / 3
    assert found[OLD, "backward_transfer_nats"]["value"] == pytest.approx(backward)


def test_2_7_shares_count_the_other_way() -> None:
    """An ability's score is a share of items that were right: its loss is a loss of that share."""
    right = {"one": [1, 1, 1, 0], "two": [0, 0, 1, 0]}
    scores = {(name, "sums"): Scores(np.array(items), np.ones(4), "") for name, items in right.items()}
    (row,) = summary([ChainStage("one", ()), ChainStage("two", ())], scores)
    assert (row["metric"], row["value"], row["n"]) == ("forgetting", 0.5, 4)


def test_a_task_that_a_stage_was_not_scored_on_is_left_out() -> None:
    losses = {key: value for key, value in LOSSES.items() if key != ("two", "a")}
    assert "a" not in {task for task, _ in _by(summary(CHAIN, _scores(losses)))}
