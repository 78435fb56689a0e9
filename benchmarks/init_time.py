"""`python -m benchmarks.init_time FOLDER... --time 3m`: does a recipe of `ingot init --time` take the time, and is its
model a good one?

For each folder of text: the recipe is written and run unchanged, and the complete run is timed. Then the speed of each
point of a grid, three depths by three batches, is measured by a short run. Last, each point trains on the same text for
as many tokens as it would read in the time of the recipe. All results are stages below `--work`, so the command
resumes; only the first complete run of a recipe is timed.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ingot.cli.options import seconds_of

GRID = [(depth, batch) for depth in (1, 2, 3) for batch in (8, 16, 32)]
SPEED_STEPS = 40
"""Steps of the run that a grid point's speed is taken from."""


def _ingot(work: Path, *words: str) -> None:
    with (work / "log").open("a") as log:
        subprocess.run([sys.executable, "-m", "ingot", *words], cwd=work, check=True, stdout=log, stderr=log)


def _result(work: Path, run: str) -> dict[str, Any]:
    return json.loads((work / "runs" / run / "base" / "result.json").read_text())


def measured(folder: Path, asked: str, work: Path) -> dict[str, Any]:
    """The time of the recipe and its loss."""
    kept, name = work / f"{folder.name}.json", folder.name
    if not kept.exists():
        (work / f"{name}.toml").unlink(missing_ok=True)
        _ingot(work, "init", "--text", str(folder.resolve()), "--time", asked, f"{name}.toml")
        began = time.monotonic()
        _ingot(work, "run", f"{name}.toml")
        kept.write_text(json.dumps(_result(work, name) | {"seconds": time.monotonic() - began}))
    found = json.loads(kept.read_text())
    training = found["tokens"] / found["tok_s"]
    return {"seconds": found["seconds"], "training": training, "loss": found["val_loss_nats"]}


def point_run(folder: Path, point: tuple[int, int], duration: str, name: str, work: Path) -> dict[str, Any]:
    """Train the recipe with another depth and batch; the result of its train stage."""
    depth, batch = point
    sets = [
        f"stage.base.model.depth={depth}",
        f"stage.base.batch={batch}",
        f'stage.base.duration="{duration}"',
        f'run.name="{name}"',
    ]
    words = [word for text in sets for word in ("--set", text)]
    _ingot(work, "run", f"{folder.name}.toml", "--only", "base", *words)
    return _result(work, name)


def speeds(folder: Path, work: Path) -> dict[tuple[int, int], float]:
    """Point of the grid -> tokens per second, of a short run."""
    found = {}
    for point in GRID:
        name = f"{folder.name}-{point[0]}-{point[1]}-speed"
        found[point] = point_run(folder, point, f"{SPEED_STEPS} steps", name, work)["tok_s"]
    return found


def grid(
    folder: Path, training: float, tok_s: dict[tuple[int, int], float], work: Path
) -> dict[tuple[int, int], float]:
    """Point of the grid -> held-out loss after as many tokens as its speed makes in `training` seconds."""
    losses = {}
    for point, speed in tok_s.items():
        name = f"{folder.name}-{point[0]}-{point[1]}"
        tokens = f"{round(training * speed, -4):.0f} tokens"
        losses[point] = point_run(folder, point, tokens, name, work)["val_loss_nats"]
        print(f"  depth {point[0]}, batch {point[1]}: {speed:,} tok/s, loss {losses[point]:.4f}", flush=True)
    return losses


def main() -> None:
    """Measure all folders, and print lines for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--time", default="3m")
    parser.add_argument("--work", type=Path, default=Path("runs/init-time"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    asked = seconds_of(options.time, "--time")
    recipes = {folder: measured(folder, options.time, options.work) for folder in options.folders}
    tok_s = {}
    for folder, mine in recipes.items():
        tok_s[folder] = speeds(folder, options.work)
        off = 100 * (mine["seconds"] / asked - 1)
        print(
            f"{folder.name}: {mine['seconds']:.0f} s of {asked:.0f} s ({off:+.0f} %), loss {mine['loss']:.4f}",
            flush=True,
        )
    print("times are measured; the rest may run on a busy machine", flush=True)
    for folder, mine in recipes.items():
        best = min(grid(folder, mine["training"], tok_s[folder], options.work).values())
        print(
            f"{folder.name}: {100 * (mine['loss'] / best - 1):+.1f} % from the best of the grid, {best:.4f}", flush=True
        )


if __name__ == "__main__":
    main()
