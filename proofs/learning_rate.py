"""`python -m proofs.learning_rate`: the best peak learning rate by width and batch, at equal numbers of tokens.

Trains stage `base` of the recipe `ablations` for each width and batch with the default rate, half and double it, and
goes on by factors of two until the best rate has a worse one on either side. A parabola through these three gives the
best rate. Prints a row for each width and batch, and the exponents of the rule rate = c * width^a * batch^b (least
squares over logarithms). Stages that exist are reused, so an interrupted run goes on.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from ingot.core.events import read_events
from ingot.optim.schedule import schedule
from ingot.optim.settings import OptimSettings
from ingot.report.terminal import print_rows
from proofs.recipe_runs import Workplace

WIDTHS, BATCHES = (64, 128, 256), (4, 16, 64)
DEPTH, CONTEXT = 2, 128


def bracket(loss: Callable[[int], float]) -> tuple[float, dict[int, float]]:
    """The exponent k with the least loss, by a parabola through the best whole k and its neighbours; losses by k."""
    found = {k: loss(k) for k in (-1, 0, 1)}
    while (best := min(found, key=found.__getitem__)) in (min(found), max(found)):
        k = best + (1 if best == max(found) else -1)
        found[k] = loss(k)
    left, middle, right = (found[best + step] for step in (-1, 0, 1))
    return best + 0.5 * (left - right) / (left - 2 * middle + right), found


def rule(points: dict[tuple[int, int], float]) -> tuple[float, float, float]:
    """log2 c, a and b of rate = c * width^a * batch^b, from best rates by width and batch."""
    rows = [[1, math.log2(width), math.log2(batch)] for width, batch in points]
    fitted, *_ = np.linalg.lstsq(np.array(rows), np.log2(list(points.values())), rcond=None)
    return tuple(fitted.tolist())


def default(width: int) -> float:
    """The rate of a recipe that names none."""
    return schedule(OptimSettings(), 1000, width).peak


def mean_loss(place: Workplace, width: int, batch: int, tokens: str, seeds: int, k: int) -> float:
    """The final held-out loss in nats with 2^k times the default rate, the mean of seeds 1 to `seeds`."""
    sets = [
        f"stage.base.model={{ depth = {DEPTH}, width = {width}, context = {CONTEXT}, tied = true }}",
        f"stage.base.batch={batch}",
        f'stage.base.duration="{tokens} tokens"',
        f"stage.base.optim.lr={default(width) * 2.0**k:.6g}",
    ]
    runs = [
        place.run("ablations", seed, *sets, only="base", name=f"rate-{width}-{batch}-{k}-{seed}")
        for seed in range(1, seeds + 1)
    ]
    return statistics.mean(
        read_events(run / "base" / "metrics.jsonl", "evaluation")[-1]["val_loss_nats"] for run in runs
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.learning_rate", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/learning-rate"), help="directory of the runs")
    parser.add_argument("--tokens", default="1M", help="of each run")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    place, rows, points = Workplace(options.results, options.results), [], {}
    for width, batch in product(options.widths, options.batches):
        best, losses = bracket(partial(mean_loss, place, width, batch, options.tokens, options.seeds))
        points[width, batch] = default(width) * 2**best
        rows.append(
            {
                "width": str(width),
                "batch": str(batch),
                "best rate": f"{points[width, batch]:.2e}",
                "of the default": f"{2**best:.2f}",
                "loss there, nats": f"{min(losses.values()):.4f}",
                "default above": f"{losses[0] - min(losses.values()):.4f}",
                "losses by rate / default": ", ".join(f"{2.0**k:g}: {losses[k]:.4f}" for k in sorted(losses)),
            }
        )
        print_rows(rows[-1:])
        sys.stdout.flush()
    print_rows(rows)
    if len(set(options.widths)) > 1 and len(set(options.batches)) > 1:
        constant, by_width, by_batch = rule(points)
        print(f"rate = {2**constant:.3g} * width^{by_width:.2f} * batch^{by_batch:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
