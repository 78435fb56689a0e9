"""Rollouts: completions of a batch's prompts, sampled from the policy, as rows to train on.

Tokens are sampled at the policy's temperature, without top-k and top-p: the ratios of the loss must refer to the
distribution that was sampled from. A completion ends with its first stop token, included. Random numbers are keyed by
(seed, step, index in the batch, sample, position), so a step that was killed is repeated exactly from its weights. An
evaluation (step 0) uses the prompt's row number as the index.

The sampler's log-probabilities only serve to monitor the sampler; the loss uses those of the training forward pass.

Shapes: B completions, T positions.
"""

from collections.abc import Sequence
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
    texts = [ids[:length] for ids, length in zip(prompts.ids_BT, prompts.columns["lengths_B"], strict=True)]
    sampling, model = Sampling(max_new=max_new, temperature=temperature, stop=stop), ctx.model

    def complete(keyed: Sequence[tuple[np.ndarray, int]]) -> list[list[Completion]]:
        """All completions of each prompt, given with its key."""
        ids, keys = [prompt for prompt, _ in keyed], [(key, 0) for _, key in keyed]
        made = generate(model, ids, sampling, samples=samples, seed=ctx.seed, step=ctx.step, keys=keys)
        return [made[first : first + samples] for first in range(0, len(made), samples)]

    with ctx.execution.forward(), ctx.readable(model):
        by_prompt = ctx.map(complete, [(text, int(row)) for text, row in zip(texts, rows, strict=True)])
    completions = [completion for completions in by_prompt for completion in completions]
    batch = append_answers(prompts, [c.ids for c in completions], samples)
    logps_BT = np.zeros(batch.labels_BT.shape, np.float32)
    logps_BT[batch.labels_BT != batch.ignore] = np.concatenate([c.logps for c in completions])
    batch = replace(batch, columns={**batch.columns, "sampled_logps_BT": logps_BT})
    return Rollout(prompts, completions, samples, batch)
