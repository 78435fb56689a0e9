"""Steps of post-training: what counts as the same work, and our side for real."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.inputs import write_ids

from benchmarks import align, ours_align, shapes, tables
from ingot.core.settings import settings_tree

STEP = {
    **{"step_s": 0.1, "losses": [0.6931, 0.5], "parameters": 981_120, "updates": 1.0, "learned": 2048},
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
        ({"learned": 2040}, "learned tokens of an update: 2,040 against our 2,048"),
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


@pytest.mark.parametrize("method", align.METHODS)
def test_our_steps_for_real(method: str, tmp_path: Path, monkeypatch) -> None:
    """On the tiny shape: so many updates and tokens as are told; dpo starts at ln 2, and learns."""
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nobody else takes turns
    shape = shapes.named("tiny")
    config = settings_tree(shape.config())
    job = {
        **{"shape": {**config, "rows": shape.rows, "checked": shape.checked}, "config": config, "method": method},
        **{"directory": str(tmp_path), **write_ids(shape, tmp_path), **align.SIZES["tiny"]},
        **{"precision": "fp32", "seconds": 0.0, "least": 1, "loop": {"backend": "torch", "threads": 1}},
    }
    for annotated in (True, False):
        found = ours_align.align({**job, "annotated": annotated})
        assert (found["updates"], found["learned"]) == (2 if method == "ppo" else 1, 64)
        assert found["parameters"] == shape.config().parameters
        if method == "dpo":
            assert found["losses"][0] == pytest.approx(math.log(2), abs=1e-6)
            assert found["losses"][-1] < found["losses"][0] - 0.01


@pytest.mark.long
def test_command_prints_one_document(bench: Callable) -> None:
    options = ("--against", "none", "--repetitions", 1, "--seconds", 0, "--json")
    done = bench("align", "--shape", "tiny", "--method", "grpo", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["rollouts"], found["group"]) == (8, 4)
    assert found["methods"]["grpo"]["ingot"]["step_ms"] > 0
    assert list(found["methods"]["grpo"]) == ["ingot", "ingot fp32"]


@pytest.mark.slow
def test_command_refuses_what_it_does_not_know(bench: Callable) -> None:
    for arguments, words in (
        (("--shape", "S1"), "--shape: found 'S1', expected A1 or tiny"),
        (("--method", "kto"), "--method: found 'kto', expected one of dpo, grpo, ppo"),
        (("--against", "litgpt"), "--against: found 'litgpt'"),
    ):
        done = bench("align", *arguments)
        assert done.returncode == 2
        assert words in done.stderr
