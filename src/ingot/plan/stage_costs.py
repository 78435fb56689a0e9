"""What the stages of training a large model cost, from stated assumptions. No torch.

The sources (001) print: pre-training on 1-3T tokens about $2M, fine-tuning on 10-100M about $10K, alignment on 1-10M
about $5K. Compute explains the first: 70B parameters on 2T tokens are the 1.72M GPU-hours of LLaMA 2, at $1.2 an hour.
It explains nothing of the other two: 100M tokens cost it less than $200. What remains is the price of people: answers
and comparisons that somebody writes or labels. So both are counted, and the table says which part is which.
"""

from dataclasses import dataclass

from ingot.plan.flops import training_flops
from ingot.plan.machine import GPUS, gpu_hours

PARAMETERS = 70 * 10**9
"""LLaMA 2's largest model."""
PEAK = GPUS["a100"].peak or 0.0
UTILISATION = 0.43
"""Of LLaMA 2's run: 136 of the 312 TFLOP/s of an A100."""
HOUR = 1.2
"""Dollars of an hour of an A100 under a long contract."""


@dataclass(frozen=True)
class StageCost:
    """A stage of training, as the sources have it."""

    name: str
    tokens: tuple[float, float]
    printed: float
    """Dollars in the sources' table."""
    passes: float = 1.0
    """Training on a token in multiples of 6 N: 3 epochs; or a reference beside the policy, 2 N, and two epochs."""
    rows: int = 0
    """Rows that people write or compare."""
    row: float = 0.0
    """Dollars of one."""

    def compute(self, tokens: float, hour: float = HOUR) -> float:
        """Dollars of the GPUs.

        Args:
            tokens: of the data.
            hour: dollars of an hour of an A100.
        """
        return gpu_hours(self.passes * training_flops(PARAMETERS, round(tokens)), PEAK, UTILISATION) * hour

    @property
    def people(self) -> float:
        """Dollars of the data."""
        return self.rows * self.row


STAGES = (
    StageCost("pre-training", (1e12, 3e12), 2e6),
    StageCost("fine-tuning", (10e6, 100e6), 1e4, passes=3, rows=5_000, row=2.0),
    StageCost("alignment", (1e6, 10e6), 5e3, passes=2 * 4 / 3, rows=5_000, row=1.0),
)
"""Rows and their price are assumptions that reproduce the printed sums: 5,000 answers at $2 and 5,000 comparisons at
$1. (LIMA has 1,000 answers, InstructGPT 13,000 answers and 33,000 comparisons.)"""
