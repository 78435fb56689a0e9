"""An evaluate stage on conversations that exceed the context of its model."""

import json
from pathlib import Path

import pytest

from ingot.core.events import Display
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.stages import child
from tests.stages.conftest import RUNS

CARD = """
[stage.long]
kind = "corpus"
sources = ["long.jsonl"]
format = "chat"
pii = false
holdout = { fraction = 0.5, by = "document" }

[stage.card]
kind = "evaluate"
models = ["base"]
data = ["long"]
exact_match = ["long"]
max_questions = 6
"""


def test_what_exceeds_the_context_is_named_and_counted(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(Display, "notify", lambda self, message: messages.append(message))
    with (world / "long.jsonl").open("w") as file:
        for n in range(40):
            question = f"say cat {n} " + "and then the red hill over the mill " * (30 * (n % 2))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": f"cat {n}"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    recipe = world / "long.toml"
    recipe.write_text((world / "grid.toml").read_text() + CARD)
    graph = load_graph(recipe, [], RUNS)
    for name in ("long", next(name for name in graph.nodes if name.startswith("long@")), "card"):
        child.run(job_of(graph, graph.nodes[name], quiet=True))
    rows = [json.loads(line) for line in (graph.stage(graph.nodes["card"]).path / "table.jsonl").open()]
    table = {row["metric"]: row for row in rows if (row["model"], row["task"]) == ("base", "long")}
    dropped = table["left_out_conversations"]["value"]
    assert dropped > 0
    assert table["left_out_tokens"]["value"] > dropped
    (message,) = [m for m in messages if "base on long" in m]
    assert table["accuracy"]["n"] == 6
    assert f"with {dropped:,} of {dropped + table['response_loss_nats']['n']:,} conversations" in message
