"""`python -m proofs.recipes [NAMES]`: check the claim of each shipped recipe with several seeds; write the table.

A claim stands in the first lines of its recipe. A recipe that needs the user's files runs on a folder of data
(`--data`) and is skipped without it; some run at a reduced size, and those that no small machine can run are planned.
Everything runs in `--results`, through the command line. Stages that exist are reused, so a check resumes.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ingot
from ingot.core.artifact import digest_json
from ingot.core.events import read_events
from ingot.pipeline.graph import load_graph
from ingot.plan.machine import GPUS
from ingot.report.plan import plan_rows
from ingot.stages.kinds import KINDS
from proofs.page import page
from proofs.proof import Arm, Gate, Numbers, Proof, Results, run_arm

RECIPES = Path(ingot.__file__).parent / "recipes"
HEAD = """# What the shipped recipes reach

`make recipes` checks the claim that each recipe makes in its first lines, and writes this page. Every seed must pass
every gate; numbers are those of the seed that is nearest to the gate. A control must fail a gate: most often it is the
model before the training in question. "not run" means that there is no result for the current code.

| Recipe | Claim | What was run | Measured (worst seed) | Controls | Seeds |
|---|---|---|---|---|---|
"""
BASE = "runs/stdlib/base"
"""The model that recipes with `init` start from: the demo's, seed 1."""


@dataclass(frozen=True)
class RecipeCheck(Proof):
    """A recipe's claim. `answer` says what is run."""

    needs: str = ""
    """A path below the data that is run on."""

    def key(self, arm: Arm, seed: int) -> str:
        """The key of a result: the recipes, their functions, this file, and the versions of all kinds."""
        files = [RECIPES / f"{self.id}.toml", *sorted(RECIPES.glob("*.py")), Path(__file__)]
        versions = {name: kind.version for name, kind in KINDS.items()}
        return digest_json([self.id, arm.name, seed, versions, [file.read_text() for file in files]])


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
    if not (place.work / "asked.jsonl").exists():
        place.work.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, RECIPES / "arithmetic.py"], cwd=place.work, check=True, stdout=sys.stderr)
    run = place.run("grpo-arithmetic", seed, only="solver")
    ends = _ends(run / "solver", "val_reward")
    return {"warm start": ends[0], "held-out reward": _side(arm, ends)}


def stdlib(place: Workplace, seed: int, arm: str) -> Numbers:
    run = place.run("stdlib", seed, name="stdlib" if seed == 1 else f"stdlib-{seed}")
    cells = [json.loads(line) for line in (run / "card" / "table.jsonl").read_text().splitlines()]
    right = {c["model"]: c["value"] for c in cells if (c["task"], c["metric"]) == ("prompts", "accuracy")}
    return {model: right["base" if arm == "before" else model] for model in ("chat", "dpo", "ppo")}


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
        "reward accuracy": _side(arm, _ends(run / "reward", "val_accuracy")),
        "dpo, more marked": 0.0 if arm == "before" else marked["dpo"] - marked["chat"],
        "ppo, more marked": 0.0 if arm == "before" else marked["ppo"] - marked["chat"],
    }


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


def _trained(gates: list[Gate], control: str = "before") -> list[Arm]:
    return [Arm("trained", gates), Arm(control, gates, control=True)]


def _size(parameters: int) -> Gate:
    return Gate("parameters", parameters, parameters)


def checks(place: Workplace) -> list[RecipeCheck]:
    """All checks, fast ones first."""
    falls, on_base = Gate("fall of the held-out loss", 0.5), "from the demo's base model (1.7M parameters)"
    eight = "plan; 8 steps of 2 rows on tiny Shakespeare, 2,048 tokens of vocabulary"
    return [
        RecipeCheck(
            "llama-7b",
            "7.5B parameters",
            "plan only",
            partial(planned, "llama-7b", place),
            [Arm("plan", [_size(7_499_681_792)])],
        ),
        RecipeCheck(
            "gpt2-124m",
            "GPT-2's size",
            "plan only",
            partial(planned, "gpt2-124m", place),
            [Arm("plan", [_size(124_439_808)])],
        ),
        RecipeCheck(
            "gpt2-45m",
            "44.8M parameters; learns from the first steps",
            eight,
            partial(tried, "gpt2-45m", place),
            _trained([_size(44_777_984), Gate("fall of the held-out loss", 0.2)]),
            needs="tinyshakespeare",
        ),
        RecipeCheck(
            "gpt2-110m",
            "110M parameters; learns from the first steps",
            eight,
            partial(tried, "gpt2-110m", place),
            _trained([_size(110_025_216), Gate("fall of the held-out loss", 0.2)]),
            needs="tinyshakespeare",
        ),
        RecipeCheck(
            "grpo-arithmetic",
            "a third of held-out sums right after the examples, at least half after GRPO",
            "as shipped, up to `solver`",
            partial(grpo_arithmetic, place),
            _trained([Gate("warm start", 0.25, 0.45), Gate("held-out reward", 0.5)]),
        ),
        RecipeCheck(
            "stdlib",
            "`chat`, `dpo` and `ppo` each answer 60 of 100 questions about unseen modules exactly",
            "as shipped",
            partial(stdlib, place),
            _trained([Gate(model, 0.6) for model in ("chat", "dpo", "ppo")]),
        ),
        RecipeCheck(
            "finetune-hf",
            "a thousand conversations are 100 updates or more, and held-out answers become likelier",
            f"{on_base} in the Hugging Face layout, rows of 256; 1,100 instructions",
            partial(finetune_hf, place),
            _trained([Gate("updates", 100), falls], "32 rows an update"),
            needs="instructions",
        ),
        RecipeCheck(
            "gsm8k-sft",
            "held-out solutions become likelier",
            f"{on_base}, rows of 256; 300 steps of 4 rows",
            partial(gsm8k_sft, place),
            _trained([falls]),
            needs="gsm8k",
        ),
        RecipeCheck(
            "align-instructions",
            "DPO and PPO both give more answers with a mark of the preferred ones than fine-tuning",
            f"as shipped, {on_base}; 1,100 instructions",
            partial(align_instructions, place),
            _trained(
                [
                    Gate("fall of the answers' loss", 2.5),
                    Gate("reward accuracy", 0.85),
                    Gate("dpo, more marked", 0.1),
                    Gate("ppo, more marked", 0.1),
                ]
            ),
            needs="instructions",
        ),
        RecipeCheck(
            "shakespeare-char",
            "at most 1.56 nats on the held-out tenth after 5,000 steps",
            "as shipped, on the file given",
            partial(shakespeare_char, place),
            _trained([Gate("held-out loss", high=1.56)]),
            needs="tinyshakespeare",
        ),
    ]


def main(words: Iterable[str] | None = None) -> int:
    """Exit status 1 if a check has another outcome than expected."""
    parser = argparse.ArgumentParser(prog="python -m proofs.recipes", description=__doc__)
    parser.add_argument("names", nargs="*", help="recipes to check; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="run each with seeds 1 to this (default 3)")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of data")
    parser.add_argument("--results", type=Path, default=Path("runs/recipes"), help="directory of results and runs")
    parser.add_argument("--to", type=Path, default=None, help="the page to write (docs/CLAIMS.md)")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args(None if words is None else list(words))
    all_checks = checks(Workplace(options.results.resolve() / "work", options.data))
    if unknown := set(options.names) - {c.id for c in all_checks}:
        parser.error(f"found {', '.join(sorted(unknown))}, expected some of {', '.join(c.id for c in all_checks)}")
    results, seeds, passed = Results(options.results), range(1, options.seeds + 1), True
    for check in (c for c in all_checks if not options.list and (not options.names or c.id in options.names)):
        if check.needs and not (options.data / check.needs).exists():
            print(f"{check.id}: skipped, no {options.data / check.needs}; name a folder of data with --data")
            continue
        passed &= all([run_arm(check, arm, seed, results) for seed in seeds for arm in check.arms])  # noqa: C419 - run them all
    if options.to:
        page(all_checks, results, seeds, options.to, HEAD)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
