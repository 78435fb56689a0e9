"""Check that aligning a small base model on real preferences works: the shipped recipe, with adapters and controls.

python benchmarks/align_instructions.py runs/stdlib/base instructions.json [--out runs/align]

The base model is the demo's (`make demo`) or any finished train stage; the rows are {instruction, input, chosen,
rejected}. These stages run in addition to the recipe's own:

    lora, lora_dpo      the recipe's fine-tuning and DPO with LoRA of rank 8, at their own learning rates; `lora` also
                        trains embedding and head, which learning English needs
    lora_blocks         `lora` without embedding and head
    backward            a control: DPO with the two sides of every pair exchanged, which must not gain
    reward_1 to _4      the recipe's reward model with another fifth of the rows held out; with the recipe's own, each
                        row is held out once, and the gate applies to the mean of the five
    coin                a control: a reward model trained on rows whose sides are exchanged at random, evaluated on
                        unchanged rows

Every number is printed with its gate. An interrupted check resumes with the same command line. The exit code is 0 if
all gates hold.
"""

import argparse
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ingot

RECIPES = Path(ingot.__file__).parent / "recipes"
NAME, PREFERRED, HELD_OUT = "align-instructions", "manners.py:preferred", 0.2
"""The recipe, its function that scores answers, and its held-out fraction."""
ARMS = """
[stage.lora]
kind = "train"
init = "base"
adapter = { kind = "lora", rank = 8, modules_to_save = ["embedding", "head"] }
data = { talk = 1.0 }
duration = "4 epochs"
batch = 4
optim = { lr = 3e-3, clip = 4.0 }
evaluate = { every = 50, tokens = 16384 }

[stage.lora_blocks]
kind = "train"
init = "base"
adapter = { kind = "lora", rank = 8 }
data = { talk = 1.0 }
duration = "4 epochs"
batch = 4
optim = { lr = 1e-2, clip = 4.0 }
evaluate = { every = 50, tokens = 16384 }

[stage.lora_dpo]
kind = "train"
init = "chat"
adapter = { kind = "lora", rank = 8 }
data = { pairs = 1.0 }
objective = { kind = "dpo", beta = 0.1 }
duration = "1 epoch"
batch = 16
optim = { lr = 2.5e-3, clip = 4.0 }
evaluate = { every = 25, tokens = 16384 }

[stage.exchanged]
kind = "corpus"
sources = ["instructions.json"]
format = "pairs"
fields = { chosen = "rejected", rejected = "chosen" }
holdout = { fraction = 0.2, by = "tail" }

[stage.backward]
kind = "train"
init = "chat"
data = { exchanged = 1.0 }
objective = { kind = "dpo", beta = 0.1 }
duration = "1 epoch"
batch = 16
optim = { lr = 2e-4, clip = 4.0 }
evaluate = { every = 25, tokens = 16384 }

[stage.tossed]
kind = "corpus"
sources = ["tossed.json"]
format = "pairs"
holdout = { fraction = 0.2, by = "tail" }

[stage.coin]
kind = "train"
init = "base"
data = { tossed = 1.0 }
objective = "reward"
duration = "4 epochs"
batch = 16
optim = { lr = 1e-3, clip = 4.0, ema = 0.99 }
evaluate = { every = 25, tokens = 16384 }

[stage.arms]
kind = "judge"
models = ["lora_dpo", "backward"]
against = "chat"
data = "asked"
by = ["manners.py:preferred"]
prompts = 220
max_new = 64
"""
"""Further stages, with the durations of the stages that they are compared with."""
FOLD = """
[stage.fold_{k}]
kind = "corpus"
sources = ["fold_{k}.json"]
format = "pairs"
holdout = {{ fraction = 0.2, by = "tail" }}

[stage.reward_{k}]
kind = "train"
init = "base"
data = {{ fold_{k} = 1.0 }}
objective = "reward"
duration = "4 epochs"
batch = 16
optim = {{ lr = 1e-3, clip = 4.0, ema = 0.99 }}
evaluate = {{ every = 25, tokens = 16384 }}
"""
"""The recipe's reward model with another fold of rows held out."""
FOLDS = 5
ARMS += "".join(FOLD.format(k=k) for k in range(1, FOLDS))


@dataclass(frozen=True)
class Gate:
    """A measured number, and whether it satisfies its claim."""

    claim: str
    measured: str
    holds: bool


def toss(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exchange the two sides of training rows with probability 1/2; held-out rows stay unchanged.

    The lengths of rows do not change, so the same rows are held out.
    """
    coin = random.Random(0)
    training_rows = int((1 - HELD_OUT) * len(rows)) - 10  # the split is by characters, so rows near it stay unchanged
    swap = {"chosen": "rejected", "rejected": "chosen"}
    return [
        {swap.get(name, name): value for name, value in row.items()}
        if n < training_rows and coin.random() < 0.5
        else row
        for n, row in enumerate(rows)
    ]


def folds(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows with each of the first four fifths moved to the held-out end, where the last fifth is anyway."""
    starts = [round(len(rows) * k / FOLDS) for k in range(FOLDS)]
    return [rows[:start] + rows[end:] + rows[start:end] for start, end in itertools.pairwise(starts)]


def gates(run: Path) -> list[Gate]:
    """All gates, from the directory of a finished run."""
    results = {p.parent.name: json.loads(p.read_text()) for p in run.glob("*/result.json")}
    card, trained = results["card"], {n: r for n, r in results.items() if "trained_parameters" in r}
    cells = {
        (row["model"], row["task"], row["metric"]): row
        for stage in ("verdict", "arms")
        for row in map(json.loads, (run / stage / "table.jsonl").read_text().splitlines())
    }

    def interval(model: str, task: str, metric: str, holds: Callable[[dict[str, float]], bool], claim: str) -> Gate:
        row = cells[model, task, metric]
        return Gate(claim, f"{row['value']:.3f} ({row['low']:.3f} to {row['high']:.3f}, n = {row['n']})", holds(row))

    before, after = card["base/talk/response_loss_nats"], card["chat/talk/response_loss_nats"]
    loras = {arm: trained[arm]["val_loss_nats"] for arm in ("lora", "lora_blocks")}
    fractions = {arm: (before - loss) / (before - after) for arm, loss in loras.items()}
    gain = {arm: f"{loss:.3f}: {100 * fractions[arm]:.0f} %" for arm, loss in loras.items()}
    dpo_gain = 0.6931 - trained["dpo"]["val_loss_nats"]
    dpo_fraction = (0.6931 - trained["lora_dpo"]["val_loss_nats"]) / dpo_gain
    accuracies = [results[name]["val_accuracy"] for name in (*(f"reward_{k}" for k in range(1, FOLDS)), "reward")]
    accuracy, random_accuracy = statistics.fmean(accuracies), results["coin"]["val_accuracy"]
    by_fold = ", ".join(f"{100 * fold:.1f}" for fold in accuracies)
    old_text = {m: card[f"{m}/old/loss_nats"] for m in ("base", "chat", "ppo", "dpo")}
    return [
        Gate("SFT: held-out response loss falls by 2.5 nats", f"{before:.3f} to {after:.3f}", before - after > 2.5),
        interval("chat", "answers", "stopped", lambda r: r["low"] > 0.9, "SFT: samples end with a stop token, > 90 %"),
        Gate(
            "reward model: accuracy, each pair held out once, >= 90 %",
            f"{100 * accuracy:.2f} % ({by_fold})",
            accuracy >= 0.9,
        ),
        Gate(
            "control: accuracy after training on random sides, 35 to 65 %",
            f"{100 * random_accuracy:.1f} %",
            abs(random_accuracy - 0.5) < 0.15,
        ),
        interval("chat", PREFERRED, "score", lambda r: True, "fraction of samples with a preferred property: chat"),
        *(
            gate
            for model in ("dpo", "ppo")
            for gate in (
                interval(model, PREFERRED, "score", lambda r: True, f"the same: {model}"),
                interval(model, PREFERRED, "score_difference", lambda r: r["low"] > 0, f"{model}: more than chat"),
                interval(model, "answers", "kl_nats", lambda r: r["high"] < 20, f"{model}: KL from chat, < 20 nats"),
            )
        ),
        interval(
            "backward", PREFERRED, "score_difference", lambda r: r["low"] < 0, "control: exchanged sides, no gain"
        ),
        interval("lora_dpo", PREFERRED, "score_difference", lambda r: r["low"] > 0, "DPO of rank 8: more than chat"),
        Gate(
            "DPO of rank 8: >= 90 % of the fall of the held-out loss",
            f"{100 * dpo_fraction:.1f} %",
            dpo_fraction >= 0.9,
        ),
        Gate("SFT of rank 8, embedding, head: >= 90 % of all weights' gain", gain["lora"], fractions["lora"] >= 0.9),
        Gate("SFT of rank 8 only, fraction of that gain", gain["lora_blocks"], True),
        Gate("loss on old text, nats", ", ".join(f"{m} {nats:.3f}" for m, nats in old_text.items()), True),
    ]


def main() -> None:
    """Run the recipe with its further stages, and print the gates."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", type=Path, help="a finished train stage, such as runs/stdlib/base")
    parser.add_argument("rows", type=Path, help="instructions with a chosen and a rejected answer, as JSON")
    parser.add_argument("--out", type=Path, default=Path("runs/align_instructions"))
    parser.add_argument("--set", action="append", default=[], help="further overrides of the recipe")
    arguments = parser.parse_args()
    out, base = arguments.out, arguments.base.resolve()
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(arguments.rows, out / "instructions.json")
    rows = json.loads(arguments.rows.read_text())
    (out / "tossed.json").write_text(json.dumps(toss(rows)))
    for k, fold in enumerate(folds(rows), start=1):
        (out / f"fold_{k}.json").write_text(json.dumps(fold))
    (out / "manners.py").write_text((RECIPES / "manners.py").read_text())
    (out / "recipe.toml").write_text((RECIPES / f"{NAME}.toml").read_text() + ARMS)
    sets = [f'stage.base.path="{base}"', *arguments.set]
    command = [sys.executable, "-c", "from ingot.cli.app import main; main()", "run", "recipe.toml"]
    command += [word for override in sets for word in ("--set", override)]
    if code := subprocess.run(command, cwd=out).returncode:
        sys.exit(code)
    all_gates = gates(out / "runs" / NAME)
    for gate in all_gates:
        print(f"{'holds' if gate.holds else 'FAILS':6} {gate.claim}: {gate.measured}")
    sys.exit(not all(gate.holds for gate in all_gates))


if __name__ == "__main__":
    main()
