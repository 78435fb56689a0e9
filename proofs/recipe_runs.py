"""Runs the shipped recipes for `proofs/recipes.py`, and measures what their claims are about.

Each function runs a recipe for a seed and returns numbers of one of its arms; most arms called "before" read the same
run at its start.
"""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import ingot
from ingot.core.events import read_events
from ingot.corpus.documents import read_documents
from ingot.pipeline.graph import load_graph, load_graphs
from ingot.plan.machine import GPUS
from ingot.recipes import teacher
from ingot.report.plan import plan_rows
from ingot.report.scaling import scaling_of
from proofs.proof import Numbers

RECIPES = Path(ingot.__file__).parent / "recipes"
BASE = "runs/stdlib/base"
"""The model that recipes with `init` start from: the demo's, seed 1."""
PORT = 8123
"""Where the stand-in for a teacher answers."""


@dataclass(frozen=True)
class Workplace:
    """The directory of all runs, and the folder of data."""

    work: Path
    data: Path

    def ingot(self, *words: str | Path) -> None:
        """Run a command, which writes to `log`.

        Raises:
            RuntimeError: the command failed.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        for file in RECIPES.glob("*.py"):
            shutil.copyfile(file, self.work / file.name)  # recipes call their functions
        with (self.work / "log").open("a") as log:
            command = [sys.executable, "-m", "ingot", *map(str, words)]
            done = subprocess.run(command, cwd=self.work, stdout=log, stderr=log)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}; see {log.name}")

    def write(self, script: str, file: str) -> None:
        """Let a script of the recipes write its files, of which `file` is one, unless it has."""
        if not (self.work / file).exists():
            self.work.mkdir(parents=True, exist_ok=True)
            subprocess.run([sys.executable, RECIPES / script], cwd=self.work, check=True, stdout=sys.stderr)

    def run(self, recipe: str, seed: int, *overrides: str, only: str = "", name: str = "") -> Path:
        """Run a recipe, or one stage and what it needs; the directory of its run."""
        name = name or f"{recipe}-{seed}"
        sets = [w for o in (f"run.seed={seed}", f'run.name="{name}"', *overrides) for w in ("--set", o)]
        self.ingot("run", RECIPES / f"{recipe}.toml", *sets, *(["--only", only] if only else []))
        return self.work / "runs" / name

    def base(self) -> str:
        """The model that recipes with `init` start from, as the value of a setting."""
        self.run("stdlib", 1, only="base", name="stdlib")
        return f'"{BASE}"'

    def source(self, *names: str) -> str:
        """Files of the data, as the value of `sources`."""
        return json.dumps([str((self.data / name).resolve()) for name in names])


def _ends(stage: Path, metric: str) -> tuple[float, float]:
    """A metric of the first and of the last evaluation of a train stage."""
    values = [event[metric] for event in read_events(stage / "metrics.jsonl", "evaluation")]
    return values[0], values[-1]


def _side(arm: str, ends: tuple[float, float]) -> float:
    """The end; for the control "before", the start."""
    return ends[0] if arm == "before" else ends[1]


def grpo_arithmetic(place: Workplace, seed: int, arm: str) -> Numbers:
    place.write("arithmetic.py", "asked.jsonl")
    run = place.run("grpo-arithmetic", seed, only="solver")
    ends = _ends(run / "solver", "val_reward")
    return {"warm start": ends[0], "held-out reward": _side(arm, ends)}


def stdlib(place: Workplace, seed: int, arm: str) -> Numbers:
    run = place.run("stdlib", seed, name="stdlib" if seed == 1 else f"stdlib-{seed}")
    cells = [json.loads(line) for line in (run / "card" / "table.jsonl").read_text().splitlines()]
    right = {c["model"]: c["value"] for c in cells if (c["task"], c["metric"]) == ("prompts", "accuracy")}
    return {model: right["base" if arm == "before" else model] for model in ("chat", "dpo", "ppo")}


def distilled(recipe: str, rates: Sequence[float], place: Workplace, seed: int, arm: str) -> Numbers:
    """How far the distilled student ends below the one trained alone, with the best of some learning rates for it."""
    sets = ["stage.distilled.objective.alpha=1.0"] if arm == "labels alone" else []
    if "shakespeare" in recipe:
        sets.append(f"stage.text.sources={place.source('tinyshakespeare/input.txt')}")
    run = place.run(recipe, seed, *sets, only="card", name=f"{recipe}-{arm.replace(' ', '-')}-{seed}")
    losses = [_ends(run / "alone", "val_loss_nats")[1]]
    for rate in rates:
        name = f"{recipe}-alone-{rate:g}-{seed}"
        other = place.run(recipe, seed, *sets, f"stage.alone.optim.lr={rate}", only="alone", name=name)
        losses.append(_ends(other / "alone", "val_loss_nats")[1])
    return {"below alone": min(losses) - _ends(run / "distilled", "val_loss_nats")[1]}


def distill_ways(place: Workplace, seed: int, arm: str) -> Numbers:
    """How far each student ends below the student of the same size that learns from labels alone."""
    run = place.run("distill-ways", seed)

    def loss(stage: str) -> float:
        return _side(arm, _ends(run / stage, "val_loss_nats"))

    alone = dict.fromkeys(("predictions", "features", "relations", "everything", "samples"), "alone")
    controls = {**alone, "layers": "wide", "layers_predictions": "wide"}
    return {f"{name} below": loss(control) - loss(name) for name, control in controls.items()}


def assistant_chain(place: Workplace, seed: int, arm: str) -> Numbers:
    """How much nearer each hop is to the teacher, in KL(teacher, model), than the same models of labels alone."""
    students = "assistant", "student", "direct"
    labels = [f"stage.{name}.objective.alpha=1.0" for name in students]
    found = {}
    for name, sets in (("labels alone", labels), ("trained", [])):
        run = place.run("assistant-chain", seed, *sets, only="card", name=f"chain-{name.replace(' ', '-')}-{seed}")
        cells = [json.loads(line) for line in (run / "card" / "table.jsonl").read_text().splitlines()]
        found[name] = {(c["model"], c["metric"]): c["value"] for c in cells}
    numbers = {f"agreement of {n}": found[arm][n, "agreement_with_teacher"] for n in students}
    kl = {name: [table[n, "kl_from_teacher_nats"] for n in students] for name, table in found.items()}
    nearer = [before - after for before, after in zip(kl["labels alone"], kl[arm], strict=True)]
    return numbers | {f"{name} nearer": x for name, x in zip(students, nearer, strict=True)}


def shakespeare_char(place: Workplace, seed: int, arm: str) -> Numbers:
    text = f"stage.text.sources={place.source('tinyshakespeare/input.txt')}"
    run = place.run("shakespeare-char", seed, text, only="base")
    return {"held-out loss": _side(arm, _ends(run / "base", "val_loss_nats"))}


def finetune_hf(place: Workplace, seed: int, arm: str) -> Numbers:
    place.base()
    model = place.work / "model"
    if not model.exists():
        place.ingot("export", BASE, model, "--to", "hf")
    talk = f"stage.talk.sources={place.source('instructions/instruction-data.json')}"
    sets = [talk, 'stage.start.path="hf:model"', "stage.chat.context=256", "stage.card.context=256"]
    sets += ["stage.chat.batch=32"] if arm == "32 rows an update" else []
    run = place.run("finetune-hf", seed, *sets, only="chat", name=f"finetune-hf-{arm.replace(' ', '-')}-{seed}")
    before, after = _ends(run / "chat", "val_loss_nats")
    return {"updates": _result(run / "chat")["steps"], "fall of the held-out loss": before - after}


def gsm8k_sft(place: Workplace, seed: int, arm: str) -> Numbers:
    sets = [f"stage.start.path={place.base()}", "stage.solver.context=256"]
    for stage, file in (("problems", "train"), ("test", "test")):
        sets.append(f"stage.{stage}.sources={place.source(f'gsm8k/{file}.jsonl')}")
    run = place.run(
        "gsm8k-sft", seed, *sets, 'stage.solver.duration="300 steps"', "stage.solver.batch=4", only="solver"
    )
    ends = _ends(run / "solver", "val_loss_nats")
    return {"fall of the held-out loss": ends[0] - _side(arm, ends)}


def align_instructions(place: Workplace, seed: int, arm: str) -> Numbers:
    base = place.base()
    rows = place.data / "instructions" / "instruction-data-with-preference.json"
    shutil.copyfile(rows, place.work / "instructions.json")
    run = place.run("align-instructions", seed, f"stage.base.path={base}")
    cells = [json.loads(line) for line in (run / "verdict" / "table.jsonl").read_text().splitlines()]
    marked = {c["model"]: c["value"] for c in cells if (c["task"], c["metric"]) == ("manners.py:preferred", "score")}
    chat = _ends(run / "chat", "val_loss_nats")
    return {
        "fall of the answers' loss": chat[0] - _side(arm, chat),
        "reward accuracy": _side(
            arm, (_ends(run / "reward", "val_accuracy")[0], _result(run / "reward")["val_accuracy"])
        ),
        "dpo, more marked": 0.0 if arm == "before" else marked["dpo"] - marked["chat"],
        "ppo, more marked": 0.0 if arm == "before" else marked["ppo"] - marked["chat"],
    }


def self_instruct(place: Workplace, seed: int, arm: str) -> Numbers:
    """How often the teacher, the majority and the student are right, by the rules of the stand-in for a teacher."""
    base = place.base()
    teacher.write_seeds(place.work / "seeds.jsonl")
    server = subprocess.Popen([sys.executable, RECIPES / "teacher.py", str(PORT)], cwd=place.work, stdout=sys.stderr)
    try:
        endpoint = f'{{ url = "http://127.0.0.1:{PORT}/v1", model = "teacher" }}'
        asked = [f"stage.{stage}.endpoint={endpoint}" for stage in ("tasks", "answers")]
        run = place.run("self-instruct", seed, f"stage.base.path={base}", *asked)
    finally:
        server.terminate()
    right = {
        stage: statistics.mean(map(_right_answer, _conversations(run / stage))) for stage in ("answers", "lessons")
    }
    cells = [json.loads(line) for line in (run / "card" / "table.jsonl").read_text().splitlines()]
    seeds = {c["model"]: c["value"] for c in cells if (c["task"], c["metric"]) == ("seeds", "accuracy")}
    return {
        "right by majority, gain": 0.0 if arm == "before" else right["lessons"] - right["answers"],
        "held-out seeds right": seeds["base" if arm == "before" else "student"],
    }


def _conversations(stage: Path) -> list[list[dict[str, str]]]:
    return [json.loads(text) for batch in read_documents(stage, None, ["text"]) for text in batch["text"].to_pylist()]


def _right_answer(conversation: list[dict[str, str]]) -> bool:
    return teacher.answer(conversation[0]["content"]) == conversation[1]["content"].strip()


def curriculum(place: Workplace, seed: int, arm: str) -> Numbers:
    """How much closer to the documentation the first phase is than the last, and what the model learns."""
    run = place.run("curriculum", seed, only="base")
    rows = pa.Table.from_batches(read_documents(run / "phased", None, ["score_surprise", "phase"])).to_pylist()
    surprise = {name: [r["score_surprise"] for r in rows if r["phase"] == name] for name in ("foundation", "synthesis")}
    first, last = (statistics.mean(values) for values in surprise.values())
    ends = _ends(run / "base", "val_loss_nats")
    return {
        "bits a byte, last phase above first": last - first,
        "fall of the held-out loss": ends[0] - _side(arm, ends),
    }


def scaling(place: Workplace, seed: int, arm: str) -> Numbers:
    """How far the predicted loss of the held-out model is off; the control predicts the best loss of the series."""
    run = place.run("scaling", seed)
    graphs = load_graphs(RECIPES / "scaling.toml", [f"run.seed={seed}", f'run.name="{run.name}"'], run.parent)
    found = scaling_of(graphs)
    large = found.held_out["large"]
    law = found.fit.law.loss(large.parameters, large.tokens)
    predicted = law if arm == "fitted" else min(r.loss for r in found.runs)
    return {"runs": len(found.runs), "off by": abs(predicted / large.loss - 1)}


def ablations(place: Workplace, seed: int, arm: str) -> Numbers:
    """How far above `base` its variants end, and squared gradient norms of 16 rows beside what 4 and 64 rows tell."""
    place.write("noise.py", "noise.txt")
    run = place.run("ablations", seed)

    def above(stage: str, other: str = "base") -> float:
        return _side(arm, _ends(run / stage, "val_loss_nats")) - _side(arm, _ends(run / other, "val_loss_nats"))

    variants = "sgd", "no_warmup", "linear", "adam_l2", "poisoned", "poisoned_unclipped", "batch_4", "batch_64"
    numbers = {f"{name}, above base": above(name) for name in variants}
    numbers["sgd_unclipped, above sgd"] = above("sgd_unclipped", "sgd")
    numbers["sgd_poisoned, above sgd"] = above("sgd_poisoned", "sgd")
    events = {rows: read_events(run / f"gradients_{rows}" / "metrics.jsonl", "step") for rows in (4, 16, 64)}
    squares = {rows: statistics.mean(e["grad_norm"] ** 2 for e in found) for rows, found in events.items()}
    noise = (squares[4] - squares[64]) / (1 / 4 - 1 / 64)
    signal = squares[64] - noise / 64
    expected = signal + noise / 16 if arm != "before" else squares[64]
    return numbers | {"noise scale, rows": noise / signal, "16 rows off by": abs(expected / squares[16] - 1)}


def planned(name: str, place: Workplace, seed: int, arm: str) -> Numbers:
    """Parameters of a recipe's model, from its plan."""
    graph = load_graph(RECIPES / f"{name}.toml", [], place.work / "runs")
    rows = {row["name"]: row for row in plan_rows(graph, GPUS["a100"])}
    return {"parameters": rows["base"]["forecast"]["parameters"]["total"]}


def tried(name: str, place: Workplace, seed: int, arm: str) -> Numbers:
    """The plan, and 8 steps of two rows with a small vocabulary."""
    small = {
        "text.sources": place.source("tinyshakespeare"),
        "bpe.vocab": 2048,
        "base.batch": 2,
        "base.duration": '"8 steps"',
        "base.optim.warmup": 2,
        "base.evaluate.tokens": 2048,
        "text.holdout": '{ fraction = 0.01, by = "tail" }',
    }
    run = place.run(name, seed, *(f"stage.{key}={value}" for key, value in small.items()), only="base")
    ends = _ends(run / "base", "val_loss_nats")
    return {**planned(name, place, seed, arm), "fall of the held-out loss": ends[0] - _side(arm, ends)}


def _result(stage: Path) -> dict[str, Any]:
    return json.loads((stage / "result.json").read_text())
