"""The experiments that figures come from are legal recipes; running them is for a quiet machine."""

import json
import os
import runpy
from pathlib import Path

import pytest
import torch

from ingot.core.statistics import paired_difference
from ingot.pipeline.graph import load_graphs

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "compare_settings.py"))
ALIGN = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "align_instructions.py"))
VALUES = {"precision": 2, "optimizer": 8, "schedule": 3, "smoothing": 2, "z_loss": 2}


@pytest.mark.parametrize("experiment", SCRIPT["EXPERIMENTS"])
def test_experiments_are_sweeps_over_the_shipped_recipe(experiment: str, tmp_path: Path) -> None:
    sets = SCRIPT["overrides"](experiment, tmp_path / "input.txt", 20)
    graphs = load_graphs(SCRIPT["RECIPE"], sets, tmp_path)
    assert len(graphs) == 3 * VALUES[experiment]
    assert len({g.nodes["base"].key for g in graphs}) == len(graphs)
    assert len({g.nodes["text"].key for g in graphs}) == 1


def test_the_check_of_align_instructions_is_the_recipe_and_arms_that_its_gates_read(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text((ALIGN["RECIPES"] / f"{ALIGN['NAME']}.toml").read_text() + ALIGN["ARMS"])
    (graph,) = load_graphs(recipe, [], tmp_path / "runs")
    settings = {name: node.settings.model_dump() for name, node in graph.nodes.items()}
    for arm, of, differs in (
        ("lora", "chat", {"adapter", "optim"}),
        ("lora_dpo", "dpo", {"adapter", "optim"}),
        ("backward", "dpo", {"data"}),
        ("reward_1", "reward", {"data"}),
        ("reward_4", "reward", {"data"}),
        ("coin", "reward", {"data"}),
        ("arms", "verdict", {"models", "by"}),
    ):
        assert {n for n, value in settings[arm].items() if value != settings[of][n]} == differs, arm
    for stage in ("verdict", "arms"):
        assert ALIGN["PREFERRED"] in settings[stage]["by"]


def test_every_row_is_held_out_by_one_fold() -> None:
    rows = [{"instruction": str(n)} for n in range(1100)]
    ends = [row["instruction"] for fold in [*ALIGN["folds"](rows), rows] for row in fold[-220:]]
    assert sorted(ends) == sorted(row["instruction"] for row in rows)
    assert all(sorted(fold, key=str) == sorted(rows, key=str) for fold in ALIGN["folds"](rows))


def test_a_coin_exchanges_half_of_the_sides_and_leaves_the_held_out_rows() -> None:
    rows = [{"instruction": str(n), "chosen": "a", "rejected": "b"} for n in range(1100)]
    tossed = ALIGN["toss"](rows)
    assert tossed[882:] == rows[882:]
    exchanged = sum(row["chosen"] == "b" and row["rejected"] == "a" for row in tossed)
    assert 380 < exchanged < 500
    assert [row["instruction"] for row in tossed] == [row["instruction"] for row in rows]


@pytest.mark.long
def test_the_fast_path_learns_what_fp32_learns(shakespeare: Path, tmp_path: Path, ingot) -> None:
    """bf16 against fp32, both by our own functions or both compiled: 500 steps of 32 rows, paired seeds; the upper
    bound of the difference < 0.01 nats.

    That the bound can be missed: the two seeds of one arm are further apart than that.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("the fast path of a CPU without bf16 instructions is fp32 itself")
    cpu_train = pytest.importorskip("ingot.kernels.cpu_train")
    built = cpu_train.available(torch.bfloat16)
    sets = ["stage.base.batch=32", "sweep.seeds=[1, 2, 3]", *([] if built else ["stage.base.loop.backend=compiled"])]
    sets = [*SCRIPT["overrides"]("precision", shakespeare, 500), "stage.base.evaluate.every=500", *sets]
    result = ingot(
        *("run", SCRIPT["RECIPE"], "--only", "base", *(word for s in sets for word in ("--set", s))),
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},  # all cores
    )
    assert result.returncode == 0, result.stderr[-3000:]
    run = tmp_path / "runs" / "precision-500"
    losses: dict[str, dict[int, float]] = {"fp32": {}, "bf16": {}}
    for point in json.loads((run / "sweep.json").read_text())["points"]:
        of, seed = point["values"]["stage.base.precision"], point["values"]["run.seed"]
        stage = run / point["label"] / "base"
        losses[of][seed] = json.loads((stage / "result.json").read_text())["val_loss_nats"]
        computed = json.loads((stage / "execution.json").read_text())["backend"]
        assert computed == ("cpu" if built else "compiled")
    difference = paired_difference(losses["fp32"], losses["bf16"])
    assert difference is not None
    assert difference.high is not None
    assert difference.high < 0.01, losses
    assert max(losses["fp32"].values()) - min(losses["fp32"].values()) > 0.01
