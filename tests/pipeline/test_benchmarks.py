"""The experiments that figures come from are legal recipes; running them is for a quiet machine."""

import runpy
from pathlib import Path

import pytest

from ingot.pipeline.graph import load_graphs

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "compare_settings.py"))
VALUES = {"precision": 2, "optimizer": 8, "schedule": 3, "smoothing": 2, "z_loss": 2}


@pytest.mark.parametrize("experiment", SCRIPT["EXPERIMENTS"])
def test_experiments_are_sweeps_over_the_shipped_recipe(experiment: str, tmp_path: Path) -> None:
    sets = SCRIPT["overrides"](experiment, tmp_path / "input.txt", 20)
    graphs = load_graphs(SCRIPT["RECIPE"], sets, tmp_path, without_files=True)
    assert len(graphs) == 3 * VALUES[experiment]
    assert len({g.nodes["base"].key for g in graphs}) == len(graphs)
    assert len({g.nodes["text"].key for g in graphs}) == 1
