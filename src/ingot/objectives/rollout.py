"""Fresh completions of a batch's prompts, as rows to train on.

Tokens are drawn from the policy at its temperature, with no top-k and no top-p: a ratio of probabilities must be of the
distribution that was sampled from. A completion ends with the first stop token, which belongs to it. Its randomness is
keyed by (seed, step, place in the batch, sample, position), so a step that was cut short by a kill is rolled out again
to the bit from the weights; an evaluation's (step 0) is keyed by the prompt's own number.

The sampler's log-probabilities are kept only to be compared with: what is trained against is computed by the forward
pass that trains.

Shapes: B completions, T positions.
"""

from dataclasses import dataclass, replace

import numpy as np

from ingot.data.batches import Batch, answered
from ingot.infer.generate import Completion, generate
from ingot.infer.sampling import Sampling
from ingot.model.transformer import Transformer
from ingot.tokenizer.chat import stop_ids
from ingot.train.objective import Context


@dataclass(frozen=True)
class Rollout:
    """Completions of prompts: number i * samples + j is sample j of prompt i."""

    prompts: Batch
    completions: list[Completion]
    samples: int
    batch: Batch
    """Prompts with their completions, labels on the completions; columns `lengths_B` and `sampled_logps_BT`."""

    @property
    def completion_tokens_B(self) -> np.ndarray:
        """Tokens of each completion, its stop token included."""
        return np.array([len(c.ids) for c in self.completions])

    @property
    def truncated_B(self) -> np.ndarray:
        """In which no stop token came."""
        return np.array([c.stop_reason != "stop" for c in self.completions])


def roll_out(prompts: Batch, ctx: Context, *, samples: int, max_new: int, temperature: float) -> Rollout:
    """Complete every prompt of a batch (rows with a column `lengths_B`), `samples` times each."""
    assert isinstance(ctx.model, Transformer)
    stop = frozenset(stop_ids(ctx.tokenizer)) if ctx.tokenizer else frozenset[int]()
    rows = prompts.row_B if ctx.evaluating else np.arange(len(prompts))
    with ctx.execution.forward():
        completions = generate(
            ctx.model,
            [ids[:length] for ids, length in zip(prompts.ids_BT, prompts.columns["lengths_B"], strict=True)],
            Sampling(max_new=max_new, temperature=temperature, stop=stop),
            samples=samples,
            seed=ctx.seed,
            step=ctx.step,
            keys=[(int(row), 0) for row in rows],
        )
    batch = answered(prompts, [c.ids for c in completions], samples)
    logps_BT = np.zeros(batch.labels_BT.shape, np.float32)
    logps_BT[batch.labels_BT != batch.ignore] = np.concatenate([c.logps for c in completions])
    batch = replace(batch, columns={**batch.columns, "sampled_logps_BT": logps_BT})
    return Rollout(prompts, completions, samples, batch)
