"""`python -m proofs.low_memory --text FILE`: final losses of AdamW with moments in fp32, bf16 and 8 bits.

Trains the recipe `shakespeare-char` with each `optim.state` and with several seeds through the command line. Stages
that exist are reused, so an interrupted run goes on. The gate is a mean final loss within 1 % of that of fp32; the
control, SGD without any moments, must fail it. Bytes are those of the moments in the last checkpoint.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from safetensors import safe_open

from ingot.core.artifact import checkpoint_path
from ingot.core.events import read_events
from ingot.report.terminal import print_rows
from proofs.recipe_runs import Workplace

SETS = {
    "fp32": [],
    "bf16": ['stage.base.optim.state="bf16"'],
    "8bit": ['stage.base.optim.state="8bit"'],
    "no moments": ["stage.base.optim={ kind = 'sgd', momentum = 0.0, lr = 0.3, warmup = 100, ema = 0.995 }"],
}
MAX_ABOVE = 0.01
"""Largest final loss above that of fp32, as a fraction."""


def moment_bytes(stage: Path) -> int:
    """Bytes of the moments in the newest checkpoint of a train stage."""
    steps = [int(path.name) for path in (stage / "checkpoints").iterdir() if path.name.isdigit()]
    total = 0
    for file in checkpoint_path(stage / "checkpoints", max(steps)).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                if ".exp_avg" in name:
                    total += tensors.get_tensor(name).nbytes
    return total


def measure(place: Workplace, text: Path, seeds: int, more: list[str]) -> dict[str, tuple[list[float], int]]:
    """The final held-out losses of each state, in nats, and the bytes of its moments."""
    found = {}
    for name, sets in SETS.items():
        losses, size = [], 0
        for seed in range(1, seeds + 1):
            run = f"shakespeare-{name.replace(' ', '-')}-{seed}"
            sources = f"stage.text.sources={json.dumps([str(text.resolve())])}"
            stage = place.run("shakespeare-char", seed, sources, *more, *sets, only="base", name=run) / "base"
            losses.append(read_events(stage / "metrics.jsonl", "evaluation")[-1]["val_loss_nats"])
            size = moment_bytes(stage)
        found[name] = losses, size
    return found


def main() -> int:
    """Exit status 1 if a state fails the gate, or the control passes it."""
    parser = argparse.ArgumentParser(prog="python -m proofs.low_memory", description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="tiny Shakespeare")
    parser.add_argument("--results", type=Path, default=Path("runs/low-memory"), help="directory of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="a change of the recipe, such as a shorter duration")
    options = parser.parse_args()
    found = measure(Workplace(options.results, options.text.parent), options.text, options.seeds, options.set)
    (exact, full), rows, passed = found["fp32"], [], True
    for name, (losses, size) in found.items():
        above = statistics.mean(losses) / statistics.mean(exact) - 1
        passed &= (above <= MAX_ABOVE) != (name == "no moments")
        rows.append(
            {
                "state": name,
                "held-out loss, nats": ", ".join(f"{loss:.4f}" for loss in losses),
                "above fp32": f"{100 * above:+.2f} %",
                "moments": f"{size:,} bytes ({size / full:.0%})",
            }
        )
    print_rows(rows)
    print("as expected" if passed else f"NOT AS EXPECTED: at most {MAX_ABOVE:.0%} above fp32, and more without moments")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
