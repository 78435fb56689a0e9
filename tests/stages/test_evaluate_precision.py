"""An evaluate stage in the precision of training."""

import json
from pathlib import Path

import pytest

from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.stages import child
from tests.stages.conftest import RUNS

CARD = '[stage.card]\nkind = "evaluate"\nmodels = ["base"]\nprompts = ["the cat"]\nsample_tokens = 4\n'


def test_bf16_measures_almost_what_fp32_does_and_keeps_the_yardsticks(world: Path) -> None:
    recipe = world / "card.toml"
    recipe.write_text((world / "grid.toml").read_text() + CARD)
    results = {}
    for precision in ("fp32", "bf16"):
        graph = load_graph(recipe, [f"stage.card.precision={precision}"], RUNS)
        child.run(job_of(graph, graph.nodes["card"], quiet=True))
        results[precision] = json.loads((graph.stage(graph.nodes["card"]).path / "result.json").read_text())
    exact, rounded = (results[precision]["base/notes/bits_per_byte"] for precision in ("fp32", "bf16"))
    assert rounded == pytest.approx(exact, rel=1e-3)
    assert rounded != exact
    guess = "uniform guess/notes/bits_per_byte"
    assert results["fp32"][guess] == results["bf16"][guess]
