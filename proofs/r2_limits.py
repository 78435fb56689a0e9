"""R2: a reward model does not predict noisy choices better than the Bayes limit, unless the data leak them."""

from proofs.proof import Arm, Gate, Proof
from proofs.r1_reward import run as _run


def run(seed: int, arm: str, **size: int):
    return _run(seed, arm, **size)


GATES = [Gate("accuracy", 0.68, 0.74)]
PROOF = Proof(
    "R2",
    "The accuracy of a reward model does not exceed the limit set by the noise of the choices",
    "Bayes: accuracy .725 at a standard deviation of 1; above .740 the data leak the choice",
    run,
    [Arm("std 1", GATES), Arm("a mark tells", GATES, control=True)],
)
