"""R2: a reward model predicts no more of the choices than there is to predict; more would be a leak."""

from proofs.proof import Arm, Gate, Proof
from proofs.r1_reward import run as _run


def run(seed: int, arm: str, **size: int):
    return _run(seed, arm, **size)


GATES = [Gate("accuracy", 0.68, 0.74)]
PROOF = Proof(
    "R2",
    "A reward model stays at the limit that the noise of the choices sets",
    "Bayes: accuracy .725 at a standard deviation of 1; above .740 something tells the answer",
    run,
    [Arm("std 1", GATES), Arm("a mark tells", GATES, control=True)],
)
