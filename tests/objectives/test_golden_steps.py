"""Steps of DPO, PPO and GRPO in fp64 against values recorded before the redesign (commit 08c377b).

`python -m tests.objectives.test_golden_steps` prints what stands in `golden_steps.json`.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.data.batches import Batch
from ingot.objectives.preference import Preference
from ingot.objectives.settings import PreferenceSettings
from ingot.train.engine import Engine
from tests.objectives.helpers import engine, model, pairs
from tests.objectives.rl_helpers import grpo, play, ppo, ragged_prompts

GOLDEN = Path(__file__).with_name("golden_steps.json")
STEPS = 3


def _dpo(path: Path, **settings: Any) -> tuple[Engine, Iterator[Batch]]:
    reference = model(seed=2).eval().requires_grad_(False)
    made = engine(path, Preference(PreferenceSettings(**settings)), companions={"reference": reference}, micro=6)
    return made, (pairs(8, seed) for seed in range(STEPS))


def _sampled(objective: Any, path: Path) -> tuple[Engine, Iterator[Batch]]:
    return play(objective, path, precision="fp64", micro=7), (ragged_prompts(8, seed) for seed in range(STEPS))


CASES: dict[str, Callable[[Path], tuple[Engine, Iterator[Batch]]]] = {
    "dpo": lambda path: _dpo(path),
    "dpo, smoothed, with sft": lambda path: _dpo(path, label_smoothing=0.1, sft_weight=0.5),
    "ipo": lambda path: _dpo(path, loss="ipo"),
    "ppo": lambda path: _sampled(ppo(max_new=6, epochs=2, minibatches=2), path),
    "ppo, entropy and a KL in the loss": lambda path: _sampled(ppo(max_new=6, entropy=0.1, kl="k2-loss"), path),
    "grpo": lambda path: _sampled(grpo(max_new=6, group=4), path),
    "grpo, KL in the loss, two epochs": lambda path: _sampled(
        grpo(max_new=6, group=4, aggregation="sequence", standardise=True, beta=0.1, kl="k3-loss", epochs=2), path
    ),
    "rloo, KL in the reward": lambda path: _sampled(grpo(max_new=6, group=4, baseline="others", beta=0.1), path),
}


def found(case: str, path: Path) -> list[dict[str, float]]:
    """The numbers of each step, and a projection of all weights after it."""
    made, batches = CASES[case](path)
    steps = []
    for batch in batches:
        metrics = made.step(copy.deepcopy(batch))
        weights = torch.cat([p.detach().flatten() for p in made.trained.values()])
        seen = torch.cos(torch.arange(len(weights), dtype=torch.float64))
        others = {name: float(value) for name, value in metrics.others.items()}
        numbers = {"loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm), **others}
        steps.append({**numbers, "weights": float(weights @ seen)})
    return steps


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_before_the_redesign(case: str, tmp_path: Path) -> None:
    for now, before in zip(found(case, tmp_path), json.loads(GOLDEN.read_text())[case], strict=True):
        assert now.keys() == before.keys()
        for name, value in before.items():
            assert now[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        json.dump({case: found(case, Path(directory)) for case in CASES}, sys.stdout, indent=1)
