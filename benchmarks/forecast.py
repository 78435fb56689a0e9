"""`python -m benchmarks.forecast`: what `ingot plan --measure` predicts of eight recipes, beside what their runs take.

The text is random characters, so the vocabulary is as large as a recipe asks for. Predictions and runs alternate. Each
result is written to a file of its own, so an interrupted run goes on. Keep the machine quiet.

    python -m benchmarks.forecast --to forecast            # all, about half an hour on two cores
    python -m benchmarks.forecast --to forecast --only 0.5M --repetitions 1
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from ingot.core.artifact import atomic_json
from ingot.core.recipe import dump_toml
from ingot.pipeline.graph import load_graph
from ingot.pipeline.measure import measure_stage
from ingot.pipeline.run import run
from ingot.plan.machine import this_machine
from ingot.report import figures
from ingot.stages.training.costs import costs
from ingot.stages.training.forecast import forecast
from ingot.stages.training.plan_inputs import forecast_inputs
from ingot.stages.training.settings import TrainSettings
from ingot.train.settings import LoopSettings

LLAMA_11M = {"depth": 6, "width": 384, "heads": 6, "context": 256}
RECIPES: dict[str, dict[str, Any]] = {
    "0.5M": {"model": {"depth": 2, "width": 128, "heads": 4, "context": 128}, "vocab": 256, "batch": 32, "steps": 600},
    "1M, gpt2": {
        "model": {"family": "gpt2", "depth": 4, "width": 128, "heads": 4, "context": 128},
        "vocab": 1024,
        "batch": 32,
        "steps": 200,
    },
    "4M, accumulation": {
        "model": {"depth": 4, "width": 256, "heads": 4, "context": 256},
        "vocab": 1024,
        "batch": 32,
        "steps": 60,
        "loop": {"micro_batch": 8},
    },
    "11M": {"model": LLAMA_11M, "vocab": 1024, "batch": 16, "steps": 60},
    "11M, LoRA": {"model": LLAMA_11M, "vocab": 1024, "batch": 16, "steps": 40, "adapter": {"rank": 8}},
    "11M, checkpointing": {
        "model": LLAMA_11M,
        "vocab": 1024,
        "batch": 16,
        "steps": 40,
        "loop": {"checkpointing": "full", "backend": "torch"},
    },
    "45M, gpt2": {
        "model": {"family": "gpt2", "depth": 8, "width": 512, "heads": 8, "context": 256},
        "vocab": 32_000,
        "batch": 8,
        "steps": 30,
        "loop": {"micro_batch": 4},
    },
    "124M, gpt2": {
        "model": {"family": "gpt2", "depth": 12, "width": 768, "heads": 12, "context": 256},
        "vocab": 50_257,
        "batch": 4,
        "steps": 20,
    },
}
"""Name -> what differs: model, vocabulary, rows of a step, steps, and settings of the stage."""
SPECIAL_IDS = 2
"""Ids of a tokenizer of characters that are no characters: unknown and end of text."""
TOKENS = 300_000


def recipe(case: dict[str, Any], text: Path) -> dict[str, Any]:
    """The recipe of a case. With an adapter, stage `start` makes the initial model in a step."""
    train = {
        "kind": "train",
        "data": {"text": 1.0},
        "batch": case["batch"],
        "duration": f"{case['steps']} steps",
        "evaluate": {"tokens": 8192},
        "loop": case.get("loop", {}),
    }
    new = {"tokenizer": "characters", "model": case["model"]}
    stages: dict[str, Any] = {
        "text": {
            "kind": "corpus",
            "sources": [str(text)],
            "quality": "none",
            "holdout": {"fraction": 0.05, "by": "tail"},
        },
        "characters": {"kind": "tokenizer", "from": "text", "type": "char"},
    }
    if "adapter" in case:
        stages["start"] = {**train, **new, "duration": "1 steps"}
        stages["base"] = {**train, "init": "start", "adapter": case["adapter"]}
    else:
        stages["base"] = {**train, **new}
    return {"run": {"name": "forecast"}, "stage": stages}


def write_text(path: Path, characters: int) -> None:
    """Random text that has each of so many characters, and these in its first part, which is not held out."""
    draw = random.Random(1)
    alphabet = [chr(0x4E00 + n) for n in range(min(characters, 20_000))]
    alphabet += [chr(0x20000 + n) for n in range(characters - len(alphabet))]
    draw.shuffle(alphabet)
    letters = [*alphabet, *draw.choices(alphabet, k=max(0, TOKENS - characters))]
    path.write_text("\n\n".join("".join(letters[i : i + 1000]) for i in range(0, len(letters), 1000)), encoding="utf-8")


class Case:
    """A recipe and the directory of its runs."""

    def __init__(self, name: str, work: Path):
        self.name, self.work = name, work / name.replace(" ", "-").replace(",", "")
        self.work.mkdir(parents=True, exist_ok=True)
        self.path, text = self.work / "forecast.toml", self.work / "text.txt"
        if not self.path.exists():
            write_text(text, RECIPES[name]["vocab"] - SPECIAL_IDS)
            self.path.write_text(dump_toml(recipe(RECIPES[name], text.absolute())))

    def predict(self, number: int) -> dict[str, Any]:
        """Measure the stage and predict its run."""
        graph = load_graph(self.path, [f"stage.base.seed={number}"], self.work / "runs")
        node = graph.nodes["base"]
        assert isinstance(node.settings, TrainSettings)
        run(graph, [n.name for n in node.inputs.values()], lambda *_: None, quiet=True)
        inputs = forecast_inputs(node, graph.stage, this_machine(), 1, here=True)
        found = measure_stage(node.settings, inputs, graph.root, print_progress, again=True)
        assert found is not None
        plan = forecast(node.settings, inputs)
        time = costs(node.settings, inputs, plan)["time"]
        complete = found["rows"] == plan["batch"]["micro_batch"]
        return {
            "parameters": plan["parameters"]["total"],
            "predicted_bytes": plan["memory"]["total"],
            "bytes": found["peak_bytes"] if complete else None,
            "predicted_s": time["total"],
            "predicted_step_s": time["step"],
            "parts": time,
            "execution": found["execution"],
        }

    def run(self, number: int) -> dict[str, Any]:
        """Run the recipe anew: its seed is its number, so nothing is reused."""
        command = [sys.executable, "-m", "ingot", "run", str(self.path), "--out", str(self.work / "runs"), "--json"]
        command += ["--only", "base", "--set", f"stage.base.seed={number}"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        base = json.loads(done.stdout)["base"]
        events = [json.loads(line) for line in (Path(base["directory"]) / "metrics.jsonl").read_text().splitlines()]
        speed = next(e["seconds"] for e in reversed(events) if e["event"] == "speed")
        return {"s": base["result"]["seconds"], "step_s": speed["step"], "speed": speed}


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def result(case: Case, number: int) -> dict[str, Any]:
    """Prediction and run of one repetition, in turns: every other time the run comes first."""
    file = case.work / f"result-{number}.json"
    if not file.exists():
        case.predict(number) if number == 1 else None  # the first one builds kernels and makes the data
        sides = [case.predict, case.run] if number % 2 else [case.run, case.predict]
        atomic_json(file, {name: value for side in sides for name, value in side(number).items()})
    return json.loads(file.read_text())


def row(name: str, results: list[dict[str, Any]]) -> str:
    """A row of the table: predicted and actual, by the medians of all repetitions."""

    def middle(field: str) -> float:
        return statistics.median(r[field] for r in results)

    def off(predicted: float, actual: float) -> str:
        return f"{100 * (predicted / actual - 1):+.0f} %"

    memory = "– | – | –"
    if all(r["bytes"] for r in results):
        predicted, actual = middle("predicted_bytes"), middle("bytes")
        memory = f"{figures.size(predicted)} | {figures.size(actual)} | {off(predicted, actual)}"
    times = [middle(name) for name in ("predicted_step_s", "step_s", "predicted_s", "s")]
    step = f"{1e3 * times[0]:,.0f} ms | {1e3 * times[1]:,.0f} ms | {off(times[0], times[1])}"
    run = f"{times[2]:,.1f} s | {times[3]:,.1f} s | {off(times[2], times[3])}"
    return f"| {name} | {figures.short(middle('parameters'))} | {memory} | {step} | {run} |"


COLUMNS = ("recipe", "parameters", *(c for of in ("memory", "step", "run") for c in (f"{of}, predicted", "actual", "")))
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("forecast"), help="directory of results")
    parser.add_argument("--only", choices=RECIPES, action="append", help="a recipe; may be repeated")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    lines = [HEADER]
    for name in options.only or RECIPES:
        if "checkpointing" in RECIPES[name].get("loop", {}) and "checkpointing" not in LoopSettings.model_fields:
            print_progress(f"{name}: left out, there is no setting loop.checkpointing")
            continue
        case = Case(name, options.to)
        lines.append(row(name, [result(case, number + 1) for number in range(options.repetitions)]))
        print_progress(lines[-1])
    print("\n".join(lines))
    (options.to / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
