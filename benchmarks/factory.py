"""`python -m benchmarks.factory CORPUS --peer PYTHON`: steps of the corpus factory against datatrove's, alternately.

CORPUS is a directory of `benchmarks.documentation`; PYTHON is an interpreter with datatrove[processing] 0.10. Both read
the same files, compute on all cores and write what they keep; ours also removes exact duplicates and splits.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.contenders import SCRIPTS

RECIPE = """
[run]
name = "bench"

[stage.text]
kind    = "corpus"
sources = ["{corpus}/*.jsonl.gz"]
quality = "none"
workers = 2
"""
STEPS = {
    "near-duplicates": ("datatrove_minhash.py", "pii = false\ndedup = { minhash = {} }"),
    "rules": (
        "datatrove_rules.py",
        'pii = false\nfilters = ["gopher_repetition", "gopher_quality", "c4", "fineweb"]',
    ),
    "pii": ("datatrove_rules.py", "pii = true"),
}


def ours(corpus: Path, settings: str) -> float:
    """Seconds of our stage, without the start of its process."""
    with tempfile.TemporaryDirectory() as directory:
        recipe = Path(directory) / "bench.toml"
        recipe.write_text(RECIPE.format(corpus=corpus) + settings)
        command = [sys.executable, "-m", "ingot", "run", str(recipe), "--out", directory]
        subprocess.run(command, check=True, capture_output=True)
        return json.loads((Path(directory) / "bench" / "text" / "result.json").read_text())["seconds"]


def theirs(corpus: Path, python: str, script: str, step: str) -> float:
    """Seconds of datatrove's pipeline."""
    job = json.dumps({"corpus": str(corpus), "steps": step})
    done = subprocess.run([python, str(SCRIPTS / script)], input=job, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["seconds"]


def main() -> None:
    """Measure all steps and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", nargs="*", default=list(STEPS))
    options = parser.parse_args()
    for step in options.steps:
        script, settings = STEPS[step]
        pairs = []
        for _ in range(options.repetitions):
            pairs.append((ours(options.corpus, settings), theirs(options.corpus, options.peer, script, step)))
        ratios = sorted(other / mine for mine, other in pairs)
        mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
        spread = f"{statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}), n = {len(pairs)}"
        print(f"{step}: {mine:.1f} s, datatrove {other:.1f} s, ratio {spread}", flush=True)


if __name__ == "__main__":
    main()
