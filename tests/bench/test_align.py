"""Steps of post-training: what counts as the same work, and our side for real."""

import json
import math
from collections.abc import Callable

import pytest

from ingot.bench import align, tables

STEP = {
    **{"step_s": 0.1, "losses": [0.6931, 0.5], "parameters": 981_120, "updates": 1.0, "tokens": 2048},
    **{"precision": "fp32", "peak_bytes": 10**8, "versions": {"torch": "2.13.0+cpu"}},
}


def test_a_ratio_to_each_of_ours_for_each_peer() -> None:
    found = {
        "ingot": [{**STEP, "step_s": s} for s in (0.10, 0.12, 0.11)],
        "ingot fp32": [{**STEP, "step_s": s} for s in (0.20, 0.24, 0.22)],
        "trl": [{**STEP, "step_s": s} for s in (0.40, 0.48, 0.44)],
    }
    rows = align.summary(found)
    assert rows["trl"]["ratios"]["ingot"] == {"ratio": 4.0, "low": 4.0, "high": 4.0}
    assert rows["trl"]["ratios"]["ingot fp32"]["ratio"] == 2.0
    assert "ratios" not in rows["ingot"]
    shown = tables.align_rows({"dpo": rows})
    assert [row["ingot is"] for row in shown] == ["", "", "4.00x (4.00 to 4.00)"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"losses": [0.6931, 0.501]}, None),
        ({"losses": [0.6931, 0.6931]}, "loss of step 2: 0.6931 against our 0.5000"),
        ({"updates": 4.0}, "updates of a step: 4 against our 1"),
        ({"tokens": 2040}, "tokens of a step: 2,040 against our 2,048"),
        ({"parameters": 2 * 981_120}, "parameters: 1,962,240 against our 981,120"),
    ],
)
def test_other_work_is_named_and_gets_no_ratio(changes: dict, words: str | None) -> None:
    row = align.summary({"ingot": [STEP], "trl": [{**STEP, **changes}]})["trl"]
    if words is None:
        assert row["ratios"]["ingot"]["ratio"] == 1.0
    else:
        assert row["differs"].startswith(words)
        assert "ratios" not in row
        assert words in tables.align_rows({"dpo": {"trl": row}})[0]["ingot is"]


def test_command_prints_one_document(ingot: Callable) -> None:
    """All three methods on the tiny shape, alone; dpo learns, and its first loss is ln 2."""
    options = ("--against", "none", "--repetitions", 1, "--seconds", 0, "--json")
    done = ingot("bench", "align", "--shape", "tiny", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["methods"]
    assert list(found) == list(align.METHODS)
    assert [found[m]["ingot"]["updates"] for m in align.METHODS] == [1, 1, 2]
    assert [found[m]["ingot"]["tokens"] for m in align.METHODS] == [64, 64, 64]
    for name in ("ingot fp32", "ingot, reference in the step"):
        losses = found["dpo"][name]["losses"]
        assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
        assert losses[-1] < losses[0] - 0.01


def test_command_refuses_what_it_does_not_know(ingot: Callable) -> None:
    for arguments, words in (
        (("--shape", "S1"), "--shape: found 'S1', expected A1 or tiny"),
        (("--method", "kto"), "--method: found 'kto', expected one of dpo, grpo, ppo"),
        (("--against", "litgpt"), "--against: found 'litgpt'"),
    ):
        done = ingot("bench", "align", *arguments)
        assert done.returncode == 2
        assert words in done.stderr
