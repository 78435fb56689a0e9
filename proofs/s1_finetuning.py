"""S1: fine-tuning learns the answers completely, and nothing of the prompts."""

import math

from proofs.letters import REVERSE, ROWS, V, learn, prompt_nll, score
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import model

LENGTH, STEPS = 6, 800


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    trained = model(V, 24, seed)
    scrambled, unmasked = arm == "answers of other rows", arm == "prompts learned too"
    learn(trained, {REVERSE: ROWS}, LENGTH, steps, seed, scrambled=scrambled, unmasked=unmasked)
    return {**score(trained, REVERSE, LENGTH), "prompt nll": prompt_nll(trained, REVERSE, LENGTH)}


GATES = [Gate("right", low=0.99), Gate("ended", low=0.995), Gate("prompt nll", low=math.log(16) - 0.1)]
PROOF = Proof(
    "S1",
    "A model fine-tuned on answers reverses six letters and stops, and has learned nothing of the prompts",
    "exact match 1, every answer ends; the loss on prompts, .693 = ln 2 at best, stays above ln 16 - .1 = 2.673",
    run,
    [
        Arm("answers", GATES),
        Arm("answers of other rows", GATES, control=True),
        Arm("prompts learned too", GATES[2:], control=True),
    ],
)
