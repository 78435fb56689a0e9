"""A run as `ingot run` leaves it: the text stages are made for real, training and evaluation are written by hand."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ingot.core.artifact import StageDir, atomic_json
from ingot.core.events import EventLog
from ingot.core.settings import settings_tree
from ingot.pipeline.graph import Graph, load_graph
from ingot.pipeline.run import link, run

HOSTILE = '<script>alert("owned")</script>'
SYLLABLES = ["har", "bour", "lan", "tern", "tide", "wa", "ter", "boat", "ven", "mor", "el", "sa"]
RECIPE = """
[run]
name = "small"

[stage.clean]
kind    = "corpus"
sources = ["text.jsonl"]
holdout = { fraction = 0.2 }

[stage.questions]
kind    = "corpus"
sources = ["chat.jsonl"]
format  = "chat"
holdout = { fraction = 0.2 }

[stage.bpe]
kind  = "tokenizer"
from  = "clean"
vocab = 300

[stage.base]
kind      = "train"
data      = { clean = 1.0 }
tokenizer = "bpe"
model     = { depth = 2 }
duration  = "400 steps"

[stage.chat]
kind     = "train"
init     = "base"
data     = { questions = 0.9, clean = 0.1 }
duration = "40 steps"

[stage.card]
kind   = "evaluate"
models = ["base", "chat"]
"""


LEARNED = {
    "verdict": "learned",
    "verdict_sentence": "validation loss 5.714 → 1.513 in 400 updates: learned",
}


@dataclass(frozen=True)
class Run:
    """A recipe's graph and the output root."""

    graph: Graph
    root: Path

    def dir(self, name: str) -> StageDir:
        return self.graph.stage(self.graph.nodes[name])


def write_sources(directory: Path) -> None:
    draw = random.Random(1)
    texts = [" ".join("".join(draw.choices(SYLLABLES, k=2)) for _ in range(150)) for _ in range(40)]
    rows = [{"text": text} for text in [*texts, HOSTILE, texts[0]]]
    (directory / "text.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + "{broken\n")
    chats = [
        [{"role": "user", "content": f"What is {n} and {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}]
        for n in range(40)
    ]
    (directory / "chat.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))


def graph_of(directory: Path, root: Path) -> Graph:
    recipe = directory / "small.toml"
    recipe.write_text(
        RECIPE.replace("text.jsonl", str(directory / "text.jsonl")).replace("chat.jsonl", str(directory / "chat.jsonl"))
    )
    return load_graph(recipe, [], root)


def begin(made: Run, name: str) -> EventLog:
    """The directory of a stage that has started."""
    node = made.graph.nodes[name]
    link(made.graph, node)
    inputs = {r: {"name": n.name, "key": n.key, "dir": f"stages/{n.directory}"} for r, n in node.inputs.items()}
    told = {"name": name, "kind": node.kind, "key": node.key, "version": 1, "seed": node.seed, "raw": node.raw}
    settings = {"settings": settings_tree(node.settings), "canonical": node.canonical, "inputs": inputs}
    atomic_json(made.dir(name) / "inputs.json", told | settings)
    return EventLog(made.dir(name) / "metrics.jsonl")


def end(made: Run, name: str, log: EventLog, result: dict[str, Any]) -> None:
    log.close()
    atomic_json(made.dir(name) / "result.json", {**result, "seconds": 81.24})
    made.dir(name).finish({"key": made.graph.nodes[name].key, "seconds": 81.24})


def facts(steps: int) -> dict[str, Any]:
    decay = {"parameters": 4213760, "decayed_parameters": 4211712, "undecayed_parameters": 2048}
    batch = {"steps": steps, "context": 256, "batch_rows": 64, "batch_tokens": 16384.0, "planned_tokens": steps * 16384}
    return {**decay, **batch, "vocab": 300, "ln_vocab_nats": math.log(300), "peak_lr": 1.0e-3, "warmup_steps": 8}


def train_events(log: EventLog, steps: int, until: int, start: float) -> None:
    log.write("plan", **facts(steps))
    for step in range(until + 1):
        loss = start * math.exp(-step / 300)
        if step:
            numbers = {
                "loss_nats": loss,
                "grad_norm": 0.5 + 1.0 / step,
                "lr": 1e-3,
                "tokens": 16384,
                "tokens_seen": step * 16384,
                "tok_s": 20000 + step,
                "eta_s": steps - step,
            }
            log.write("step", step=step, **numbers)
        if step % 20 == 0:
            log.write("evaluation", step=step, val_loss_nats=loss + 0.01, train_loss_nats=loss)
            log.write("sample", step=step, prompt="the old", text=f" boat {step} {HOSTILE}")
    log.flush()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Text stages and `base` and `card` are done; `chat` stopped at step 25 of 40."""
    directory = tmp_path_factory.mktemp("report")
    write_sources(directory)
    root = directory / "runs"
    made = Run(graph_of(directory, root), root)
    run(made.graph, ["clean@bpe", "questions@bpe"], lambda *_: None, quiet=True)
    log = begin(made, "base")
    train_events(log, 400, 400, math.log(300))
    final = {"val_loss_nats": 1.5114, "best_step": 400, "best_val_loss_nats": 1.5135, "tokens": 6553600}
    end(
        made,
        "base",
        log,
        facts(400) | final | LEARNED | {"bits_per_byte": 1.8421, "epochs/clean": 1.25, "peak_bytes": 700_000_000},
    )
    train_events(begin(made, "chat"), 40, 25, 1.9)
    log = begin(made, "card")
    log.write("sample", model="base", prompt="def main(", text=HOSTILE)
    (made.dir("card") / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table()))
    end(made, "card", log, {})
    return made


def table() -> Iterator[dict[str, Any]]:
    def row(model: str, task: str, metric: str, value: float, spread: float, n: int) -> dict[str, Any]:
        bounds = {"low": value - spread, "high": value + spread}
        return {"model": model, "task": task, "metric": metric, "value": value, **bounds, "n": n}

    yield from (
        row(m, "clean", "bits_per_byte", v, 0, 1)
        for m, v in (("uniform guess", 3.2), ("gzip -9", 1.97), ("xz -9", 1.64))
    )
    yield row("base", "clean", "loss_nats", 1.5114, 0.02, 29)
    yield row("base", "clean", "bits_per_byte", 1.8421, 0.03, 29)
    yield row("chat", "questions", "response_loss_nats", 2.25, 0.1, 8)


@pytest.fixture
def empty(tmp_path: Path) -> Run:
    """Nothing has run."""
    write_sources(tmp_path)
    return Run(graph_of(tmp_path, tmp_path / "runs"), tmp_path / "runs")
