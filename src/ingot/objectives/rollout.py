"""Rollouts: completions of a batch's prompts, sampled from the policy, as rows to train on.

Tokens are sampled at the policy's temperature, without top-k and top-p: the ratios of the loss must refer to the
distribution that was sampled from. A completion ends with its first stop token, included. Random numbers are keyed by
(seed, step, index in the batch, sample, position), so a step that was killed is repeated exactly from its weights. An
evaluation (step 0) uses the prompt's row number as the index.

The sampler's log-probabilities only serve to monitor the sampler; the loss uses those of the training forward pass.

Shapes: B completions, T positions.
"""

from dataclasses import dataclass, replace

import numpy as np

from ingot.data.batches import Batch, append_answers
from ingot.infer.generate import Completion, generate
from ingot.infer.sampling import Sampling
from ingot.model.transformer import Transformer
from ingot.tokenizer.chat import stop_ids
from ingot.train.objective import Context


@dataclass(frozen=True)
class Rollout:
    """Completions of prompts; completion i * samples + j is sample j of prompt i."""

    prompts: Batch
    completions: list[Completion]
    samples: int
    batch: Batch
    """Prompts followed by their completions, with labels on the completions only.

    Columns: `lengths_B`, and `sampled_logps_BT`, the sampler's log-probabilities.
    """

    @property
    def completion_tokens_B(self) -> np.ndarray:
        """Number of tokens of each completion, stop token included."""
        return np.array([len(c.ids) for c in self.completions])

    @property
    def truncated_B(self) -> np.ndarray:
        """Completions without a stop token, bool."""
        return np.array([c.stop_reason != "stop" for c in self.completions])


def roll_out(prompts: Batch, ctx: Context, *, samples: int, max_new: int, temperature: float) -> Rollout:
    """Complete every prompt of a batch `samples` times.

    Args:
        prompts: rows with a column `lengths_B`.
        max_new: tokens of the longest completion.
    """
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
    batch = append_answers(prompts, [c.ids for c in completions], samples)
    logps_BT = np.zeros(batch.labels_BT.shape, np.float32)
    logps_BT[batch.labels_BT != batch.ignore] = np.concatenate([c.logps for c in completions])
    batch = replace(batch, columns={**batch.columns, "sampled_logps_BT": logps_BT})
    return Rollout(prompts, completions, samples, batch)
