"""`python -m benchmarks.ranks`: two ranks with a thread each against one process with two, in turns.

Both train the same recipe through `ingot run` on random letters; the speed is that of all steps after the first. No
output of one run is reused by another.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.shapes import SHAPES
from ingot.core.recipe import dump_toml

STEPS = {"S2": 1500, "S3": 60}


def recipe(shape: str, text: Path) -> dict:
    s = SHAPES[shape]
    model = {"depth": s.depth, "width": s.width, "heads": s.heads, "context": s.context}
    train = {
        "kind": "train",
        "data": {"text": 1.0},
        "tokenizer": "letters",
        "model": model,
        "batch": s.rows,
        "duration": f"{STEPS[shape]} steps",
        "evaluate": {"tokens": 256, "every": STEPS[shape], "sample": False},
        "loop": {"save_every": 10**6},
    }
    corpus = {"kind": "corpus", "sources": [str(text)], "quality": "none", "holdout": {"fraction": 0.01, "by": "tail"}}
    tokenizer = {"kind": "tokenizer", "from": "text", "type": "char"}
    return {"run": {"name": "ranks"}, "stage": {"text": corpus, "letters": tokenizer, "base": train}}


def tokens_per_second(work: Path, ranks: int, number: int) -> float:
    """The speed of a new run; its seed is its number, so that nothing is reused."""
    command = [sys.executable, "-m", "ingot", "run", "ranks.toml", "--json", "--only", "base", "--nproc", str(ranks)]
    sets = [f"stage.base.seed={number}", f"stage.base.loop.threads={2 // ranks}"]
    done = subprocess.run(
        [*command, *(w for o in sets for w in ("--set", o))], cwd=work, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)["base"]["result"]["tok_s"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--shape", choices=sorted(STEPS), action="append")
    options = parser.parse_args()
    for shape in options.shape or sorted(STEPS):
        with tempfile.TemporaryDirectory(prefix="ingot-bench-") as name:
            work, draw = Path(name), random.Random(1)
            lines = ("".join(draw.choices("abcdefgh ", k=60)) for _ in range(20_000))
            (work / "text.txt").write_text("\n".join(lines))
            (work / "ranks.toml").write_text(dump_toml(recipe(shape, work / "text.txt")))
            ratios, number = [], 0
            for repetition in range(options.repetitions):
                speed = {}
                for ranks in (1, 2) if repetition % 2 == 0 else (2, 1):
                    number += 1
                    speed[ranks] = tokens_per_second(work, ranks, number)
                ratios.append(speed[2] / speed[1])
                print(
                    f"{shape}: one process {speed[1]:,.0f} tok/s, two ranks {speed[2]:,.0f}: {ratios[-1]:.3f}",
                    flush=True,
                )
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}, n = {len(ratios)}"
            print(f"{shape}: median {statistics.median(ratios):.3f}, {spread}")


if __name__ == "__main__":
    main()
