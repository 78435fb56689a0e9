"""Compare values of a setting on tiny Shakespeare, paired by seed, with 95 % t-intervals.

python benchmarks/compare_settings.py precision input.txt                    # fp32 and bf16, 500 steps, 3 seeds
python benchmarks/compare_settings.py optimizer input.txt --steps 2000       # AdamW and Muon at four rates each
python benchmarks/compare_settings.py smoothing input.txt --set 'sweep.seeds=[1,2,3,4,5]' --out runs/smoothing

The script calls `ingot run` on the shipped recipe `shakespeare-char` with a `[sweep]`. An interrupted experiment
therefore resumes with the same command line, finished points are reused, and `ingot compare` shows all details. Quote
the paired differences.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import ingot

RECIPE = Path(ingot.__file__).parent / "recipes" / "shakespeare-char.toml"
EXPERIMENTS = {
    "precision": ['sweep.stage.base.precision=["fp32", "bf16"]'],
    "optimizer": [
        'sweep.stage.base.optim.kind=["adamw", "muon"]',
        "sweep.stage.base.optim.lr=[5e-4, 1e-3, 2e-3, 4e-3]",
    ],
    "schedule": ['sweep.stage.base.optim.schedule=["cosine", "linear", "wsd"]'],
    "smoothing": ["sweep.stage.base.objective.label_smoothing=[0.0, 0.1]"],
    "z_loss": ["sweep.stage.base.objective.z_loss=[0.0, 1e-4]"],
}
"""Experiment -> the swept settings; all others are the recipe's."""


def overrides(experiment: str, text: Path, steps: int) -> list[str]:
    """The `--set` overrides of an experiment.

    Args:
        text: the file of tiny Shakespeare.
        steps: training steps.
    """
    return [
        f'run.name="{experiment}-{steps}"',
        f'stage.text.sources=["{text.resolve()}"]',
        f'stage.base.duration="{steps} steps"',
        "stage.base.evaluate.sample=false",
        "sweep.seeds=[1, 2, 3]",
        *EXPERIMENTS[experiment],
    ]


def main() -> None:
    """Run one experiment; `ingot run` prints the comparison at its end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("text", type=Path, help="input.txt of tiny Shakespeare")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--set", action="append", default=[], help="further overrides of the recipe")
    parser.add_argument("--out", default="runs/compare_settings")
    arguments = parser.parse_args()
    sets = [*overrides(arguments.experiment, arguments.text, arguments.steps), *arguments.set]
    command = [sys.executable, "-c", "from ingot.cli.app import main; main()", "run", str(RECIPE), "--only", "base"]
    command += ["--out", arguments.out, *(word for override in sets for word in ("--set", override))]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
