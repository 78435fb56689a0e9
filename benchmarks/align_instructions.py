"""Does aligning a small base model on real preferences work? The shipped recipe, with adapters and controls beside it.

python benchmarks/align_instructions.py runs/stdlib/base instructions.json [--out runs/align]

The base model is the demo's (`make demo`), or any finished train stage; the rows are {instruction, input, chosen,
rejected}. Beside the recipe's own stages run

    lora, lora_dpo      the same fine-tuning and the same DPO as corrections of rank 8, at rates of their own; to learn
                        English, the former trains embedding and head beside them
    lora_blocks         the former without these two
    backward            DPO with the two sides of every pair exchanged: a control, no more of what is preferred
    reward_1 to _4      the recipe's reward model with another fifth of the rows held out: with the recipe's own, each
                        row is held out once, and the gate is on the mean of the five
    coin                a reward model of rows with sides exchanged by coin, on held-out rows as they are: a control

and every number is printed with its gate. An interrupted check goes on with the same line; the exit code says whether
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
NAME, JUDGE, HELD_OUT = "align-instructions", "manners.py:preferred", 0.2
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
holdout = { share = 0.2, by = "tail" }

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
holdout = { share = 0.2, by = "tail" }

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
"""What runs beside the recipe, with the lengths and rates of the stages that it is compared with."""
FOLD = """
[stage.fold_{k}]
kind = "corpus"
sources = ["fold_{k}.json"]
format = "pairs"
holdout = {{ share = 0.2, by = "tail" }}

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
"""The recipe's reward model on other rows."""
FOLDS = 5
ARMS += "".join(FOLD.format(k=k) for k in range(1, FOLDS))


@dataclass(frozen=True)
class Gate:
    """A number that was measured, and what it has to be."""

    claim: str
    measured: str
    holds: bool


def toss(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose two sides are exchanged by coin, but for the held-out ones. A row is as long as before, so the border
    between them is where it was."""
    coin, shown = (
        random.Random(0),
        int((1 - HELD_OUT) * len(rows)) - 10,
    )  # the border is by characters: rows near it stay
    swap = {"chosen": "rejected", "rejected": "chosen"}
    return [
        {swap.get(name, name): value for name, value in row.items()} if n < shown and coin.random() < 0.5 else row
        for n, row in enumerate(rows)
    ]


def folds(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows with each fifth of them moved to the end, where what is held out stands; the last one is there."""
    borders = [round(len(rows) * k / FOLDS) for k in range(FOLDS)]
    return [rows[:start] + rows[end:] + rows[start:end] for start, end in itertools.pairwise(borders)]


def gates(run: Path) -> list[Gate]:
    """What a finished run shows."""
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
    shares = {arm: (before - loss) / (before - after) for arm, loss in loras.items()}
    gain = {arm: f"{loss:.3f}: {100 * shares[arm]:.0f} %" for arm, loss in loras.items()}
    dpo_gain = 0.6931 - trained["dpo"]["val_loss_nats"]
    dpo_share = (0.6931 - trained["lora_dpo"]["val_loss_nats"]) / dpo_gain
    fifths = [results[name]["val_accuracy"] for name in (*(f"reward_{k}" for k in range(1, FOLDS)), "reward")]
    accuracy, tossed = statistics.fmean(fifths), results["coin"]["val_accuracy"]
    each = ", ".join(f"{100 * fifth:.1f}" for fifth in fifths)
    olds = {m: card[f"{m}/old/loss_nats"] for m in ("base", "chat", "ppo", "dpo")}
    return [
        Gate("SFT: held-out response loss falls by 2.5 nats", f"{before:.3f} to {after:.3f}", before - after > 2.5),
        interval("chat", "answers", "stopped", lambda r: r["low"] > 0.9, "SFT: samples end with a stop token, > 90 %"),
        Gate("reward model: pairs, each held out once, >= 90 %", f"{100 * accuracy:.2f} % ({each})", accuracy >= 0.9),
        Gate("control: sides by coin tell nothing", f"{100 * tossed:.1f} %", abs(tossed - 0.5) < 0.15),
        interval("chat", JUDGE, "score", lambda r: True, "share of samples with a mark of the preferred: chat"),
        *(
            gate
            for model in ("dpo", "ppo")
            for gate in (
                interval(model, JUDGE, "score", lambda r: True, f"the same: {model}"),
                interval(model, JUDGE, "score_difference", lambda r: r["low"] > 0, f"{model}: more than chat"),
                interval(model, "answers", "kl_nats", lambda r: r["high"] < 20, f"{model}: nats of KL from chat, < 20"),
            )
        ),
        interval("backward", JUDGE, "score_difference", lambda r: r["low"] < 0, "control: exchanged sides, no more"),
        interval("lora_dpo", JUDGE, "score_difference", lambda r: r["low"] > 0, "DPO of rank 8: more than chat"),
        Gate("DPO of rank 8: >= 90 % of the fall of the held-out loss", f"{100 * dpo_share:.1f} %", dpo_share >= 0.9),
        Gate("SFT of rank 8, embedding, head: >= 90 % of all weights' gain", gain["lora"], shares["lora"] >= 0.9),
        Gate("SFT of rank 8 alone, share of that gain", gain["lora_blocks"], True),
        Gate("old text, nats", ", ".join(f"{m} {nats:.3f}" for m, nats in olds.items()), True),
    ]


def main() -> None:
    """Run the recipe with its arms, and say what it shows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", type=Path, help="a finished train stage, runs/stdlib/base say")
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
    found = gates(out / "runs" / NAME)
    for gate in found:
        print(f"{'holds' if gate.holds else 'FAILS':6} {gate.claim}: {gate.measured}")
    sys.exit(not all(gate.holds for gate in found))


if __name__ == "__main__":
    main()
