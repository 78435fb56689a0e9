"""`python -m benchmarks.init_time FOLDER... --time 3m`: does a recipe of `ingot init --time` take the time, and is its
model a good one?

For each folder of text: the recipe is written and run unchanged, and the complete run is timed. Then a grid of three
depths by three batches trains on the same tokens for as many seconds, by speeds of a short run of each. All results
are stages below `--work`, so the command resumes; only the first complete run of a recipe is timed.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ingot.cli.options import seconds_of

DEPTHS, BATCHES = (1, 2, 3), (8, 16, 32)
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
        kept.write_text(json.dumps({"seconds": time.monotonic() - began, **_result(work, name)}))
    found = json.loads(kept.read_text())
    training = found["tokens"] / found["tok_s"]
    return {"seconds": found["seconds"], "training": training, "loss": found["val_loss_nats"]}


def grid(folder: Path, training: float, work: Path) -> dict[tuple[int, int], float]:
    """(depth, batch) -> held-out loss after as many seconds of training."""
    losses = {}
    for depth in DEPTHS:
        for batch in BATCHES:
            point = [f"stage.base.model.depth={depth}", f"stage.base.batch={batch}"]

            def train(name: str, duration: str, point: list[str] = point) -> dict[str, Any]:
                sets = [*point, f'stage.base.duration="{duration}"', f'run.name="{name}"']
                words = [word for text in sets for word in ("--set", text)]
                _ingot(work, "run", f"{folder.name}.toml", "--only", "base", *words)
                return _result(work, name)

            name = f"{folder.name}-{depth}-{batch}"
            speed = train(f"{name}-speed", f"{SPEED_STEPS} steps")["tok_s"]
            losses[depth, batch] = train(name, f"{round(training * speed, -4):.0f} tokens")["val_loss_nats"]
            print(f"  depth {depth}, batch {batch}: {speed:,} tok/s, loss {losses[depth, batch]:.4f}", flush=True)
    return losses


def main() -> None:
    """Measure all folders, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--time", default="3m")
    parser.add_argument("--work", type=Path, default=Path("runs/init-time"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    asked = seconds_of(options.time, "--time")
    for folder in options.folders:
        mine = measured(folder, options.time, options.work)
        off = 100 * (mine["seconds"] / asked - 1)
        print(
            f"{folder.name}: {mine['seconds']:.0f} s of {asked:.0f} s ({off:+.0f} %), loss {mine['loss']:.4f}",
            flush=True,
        )
        best = min(grid(folder, mine["training"], options.work).values())
        print(
            f"{folder.name}: {100 * (mine['loss'] / best - 1):+.1f} % from the best of the grid, {best:.4f}", flush=True
        )


if __name__ == "__main__":
    main()
