"""One tiny world that tests of train stages share: a corpus of each format, a base, its Fisher, a reward model."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.stages import child

RUNS = Path("runs")
STEPS = 4
RECIPE = f"""
[run]
name = "grid"

[stage.notes]
kind = "corpus"
sources = ["notes.txt"]
quality = "none"
holdout = {{ fraction = 0.1, by = "tail" }}

[stage.talk]
kind = "corpus"
sources = ["talk.jsonl"]
format = "chat"
holdout = {{ fraction = 0.1 }}

[stage.preferences]
kind = "corpus"
sources = ["pairs.jsonl"]
format = "pairs"
holdout = {{ fraction = 0.1 }}

[stage.questions]
kind = "corpus"
sources = ["questions.jsonl"]
format = "prompts"
holdout = {{ fraction = 0.1 }}

[stage.bpe]
kind = "tokenizer"
from = "notes"
vocab = 280

[stage.base]
kind = "train"
data = {{ notes = 1.0 }}
tokenizer = "bpe"
model = {{ depth = 1, width = 16, heads = 2, context = 40 }}
batch = 4
duration = "4 steps"
precision = "fp32"
evaluate = {{ tokens = 1, sample = false }}
loop = {{ threads = 1 }}

[stage.worth]
kind = "fisher"
model = "base"
data = {{ notes = 1.0 }}
samples = 8

[stage.rm]
kind = "train"
init = "base"
data = {{ preferences = 1.0 }}
batch = 4
duration = "4 steps"
objective = "reward"
precision = "fp32"
evaluate = {{ tokens = 1, sample = false }}
loop = {{ threads = 1 }}

[stage.tuned]
kind = "train"
init = "base"
data = {{ talk = 1.0 }}
batch = 8
duration = "{STEPS} steps"
precision = "fp32"
optim = {{ lr = 1e-2, warmup = 0 }}
evaluate = {{ tokens = 1, sample = false }}
loop = {{ log_every = 1, save_every = 2, threads = 1 }}
"""
CHECK = """
import time
from pathlib import Path


def score(prompts, completions):
    return [len(c) + c.count("a") for c in completions]


def slow(prompts, completions):
    if Path("hold").exists() and Path("runs/stages/held/checkpoints/00000002").exists():
        Path("held").touch()
        time.sleep(100)
    return score(prompts, completions)
"""


@pytest.fixture(scope="session")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's directory, with all that its last stage, `tuned`, may start from; all ran in this process."""
    path, draw = tmp_path_factory.mktemp("grid"), random.Random(0)
    words = ["cat", "dog", "hill", "sun", "mill", "red", "old", "sea"]
    (path / "notes.txt").write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(60)))
    rows: dict[str, list[dict[str, Any]]] = {"talk": [], "pairs": [], "questions": []}
    for i in range(60):
        a, b = draw.sample(words, 2)
        asked, told = f"say {a} {i}", f"the {a}" if i % 2 else f"the {a} and the {b}"
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
        rows["talk"].append({"messages": turns})
        rows["pairs"].append({"prompt": asked, "chosen": told, "rejected": f"no {b}"})
        rows["questions"].append({"prompt": asked})
    for name, table in rows.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    (path / "check.py").write_text(CHECK)
    (path / "grid.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        graph = load_graph(Path("grid.toml"), [], RUNS)
        for node in graph.needed(["rm", "worth"]):
            child.run(job_of(graph, node, quiet=True))
    return path


@pytest.fixture
def world(_world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test."""
    monkeypatch.chdir(_world)
    return _world
