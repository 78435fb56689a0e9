"""D2: the fixed points of the preference losses.

The data are sixteen prompts with one pair each, and the reference is exactly uniform. The difference of log-ratios h
that minimises each loss is known in closed form; the proof trains to convergence and compares.
"""

import math

import numpy as np
import torch

from ingot.data.batches import Batch
from ingot.objectives.preference import Preference, Unpaired
from ingot.objectives.settings import PreferenceSettings, UnpairedSettings
from ingot.train.objective import Objective
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import engine, frozen, logits, model, rows

V, PROMPTS, STEPS = 16, 16, 400
TAU = 0.1
"""beta of IPO."""
SETTINGS: dict[str, dict[str, object]] = {
    "ipo": {"loss": "ipo", "beta": TAU, "length_norm": False},
    "ipo, 4 of 5 choices": {"loss": "ipo", "beta": TAU, "length_norm": False},
    "cdpo": {"loss": "sigmoid", "beta": 0.5, "label_smoothing": 0.1},
    "dpo, 4 of 5 choices": {"loss": "sigmoid", "beta": 0.5},
    "simpo": {"loss": "simpo"},
    "orpo": {"loss": "orpo"},
    "dpo as ipo": {"loss": "sigmoid", "beta": TAU},
    "dpo as cdpo": {"loss": "sigmoid", "beta": 0.5},
}


def pairs(seed: int, against: int) -> Batch:
    """The pair of each prompt; with `against`, five copies of it, of which `against` are reversed."""
    draw = np.random.default_rng(seed)
    letters = [draw.permutation(np.arange(1, V))[:6] for _ in range(PROMPTS)]
    # Both answers of a pair have different letters and lengths.
    distinct = [(a[: draw.integers(2, 4)], a[3 : draw.integers(5, 7)]) for a in letters]
    copies = 5 if against else 1
    ordered = [pair[::-1] if t < against else pair for pair in distinct for t in range(copies)]
    prompts = [[p] for p in range(PROMPTS) for _ in range(2 * copies)]
    return rows(prompts, [[*answer, 0] for pair in ordered for answer in pair], group=2)


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    policy = model(V, 12, seed, uniform=True)
    kto = arm == "kto"
    objective: Objective = Unpaired(UnpairedSettings()) if kto else Preference(PreferenceSettings(**SETTINGS[arm]))  # type: ignore[arg-type]
    learner = engine(policy, objective, steps, 1e-3, seed, companions={"reference": frozen(policy)})
    batch = pairs(seed, 1 if "4 of 5" in arm else 0)
    first = float(learner.step(batch).loss)
    for _ in range(steps - 1):
        learner.step(batch)
    test = pairs(seed, 0)
    labels_BT1 = torch.from_numpy(test.labels_BT).clamp(min=0)[..., None]
    logp_BT = logits(policy, test).log_softmax(-1).gather(-1, labels_BT1)[..., 0]
    ratio_B = torch.where(torch.from_numpy(test.labels_BT != -100), logp_BT + math.log(V), 0.0).sum(1)
    h_P = ratio_B[0::2] - ratio_B[1::2]
    beta = 0.1 if kto else float(SETTINGS[arm].get("beta", 1.0))  # type: ignore[arg-type]
    return {
        "h": float(h_P.mean()),
        "beta h": float(beta * h_P.mean()),
        "least h": float(h_P.min()),
        "first loss": first,
    }


def _near(number: str, value: float, within: float) -> Gate:
    return Gate(number, value * (1 - within), value * (1 + within))


IPO, CDPO = _near("h", 1 / (2 * TAU), 0.1), _near("beta h", math.log(0.9 / 0.1), 0.05)
LN2 = Gate("first loss", math.log(2) - 1e-6, math.log(2) + 1e-6)
SEPARATED = Gate("least h", low=1.0, why="a clear separation of every pair")
PROOF = Proof(
    "D2",
    "IPO, conservative DPO and DPO on inconsistent choices converge to their fixed points; other losses separate pairs",
    "IPO h = 1/(2 tau) = 5, on 4 of 5 choices 3; cDPO (0.1) and DPO beta h = ln 9 = 2.197 and ln 4 = 1.386",
    run,
    [
        Arm("ipo", [IPO]),
        Arm("ipo, 4 of 5 choices", [_near("h", 0.6 / (2 * TAU), 0.1)]),
        Arm("cdpo", [CDPO, LN2]),
        Arm("dpo, 4 of 5 choices", [_near("beta h", math.log(4), 0.05), LN2]),
        *(Arm(name, [SEPARATED]) for name in ("kto", "simpo", "orpo")),
        Arm("dpo as ipo", [IPO], control=True),
        Arm("dpo as cdpo", [CDPO], control=True),
    ],
)
