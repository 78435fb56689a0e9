"""Batched generation: prompts of any lengths in, continuations with exact log-probabilities out.

A continuation depends only on the weights, its prompt and its key (`sampling.py`), not on the other rows, their order
or the split into batches, up to the rounding of matrix products of other sizes. So a rollout can be reproduced from the
weights and the step. Samples of a prompt share its prefill. Rows that have ended leave the batch.

`Generation` holds the state; each call of `step` generates one token per row and waits for the device once. Its caller
can read the tokens and end rows: `generate` here, text and stop strings in `streaming.py`.

Prompts are padded on the right, so that positions do not depend on the longest prompt.

Shapes: B rows in the batch, R all rows (prompts x samples), T positions, N new tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ingot.core.errors import UserError
from ingot.infer.decoder import Decoder, DecodeState
from ingot.infer.sampling import Sampling, draw, uniforms
from ingot.model.transformer import Transformer

StopReason = Literal["stop", "stop_string", "length", "context"]
"""What ended a continuation: a stop id, a stop string, `max_new` tokens, or a full context."""


@dataclass(frozen=True)
class Completion:
    """A continuation of a prompt."""

    ids: np.ndarray
    """The sampled ids, int64, including the stop id."""
    logps: np.ndarray
    """ln p of each sampled id under the model at the temperature (1 if greedy), without repetition penalty and
    truncation, fp32."""
    stop_reason: StopReason


def generate(
    model: Transformer | Decoder,
    prompts: Sequence[np.ndarray | Sequence[int]],
    sampling: Sampling | None = None,
    *,
    samples: int = 1,
    seed: int = 0,
    step: int = 0,
    keys: Sequence[tuple[int, int]] | None = None,
) -> list[Completion]:
    """Continue every prompt, `samples` times each.

    A row ends at a stop id, after `max_new` tokens, or when prompt and continuation fill the model's context. (The
    context does not slide: with cached rotated keys the result would differ from a full forward pass.)

    Args:
        model: a model, which runs without dropout in its own precision, or in autocast's if that is on. Pass a
            `Decoder` to choose another precision, or to lay the weights out once for many calls.
        prompts: token ids, 1 to context - 1 per prompt.
        sampling: how tokens are drawn; default: from the model's distribution.
        samples: continuations per prompt; they share its prefill.
        seed, step: keys of the random numbers, together with `keys`.
        keys: (row, first sample) of each prompt; default: (its index, 0). Pass them to split a batch reproducibly.

    Returns:
        prompts x samples continuations; index i * samples + j is sample j of prompt i.

    Raises:
        UserError: a prompt is empty, fills the context, or has an id outside the vocabulary.
    """
    generation = Generation(model, prompts, sampling or Sampling(), samples=samples, seed=seed, step=step, keys=keys)
    while generation.active:
        generation.step()
    return [generation.completion(row) for row in range(len(generation.reason_R))]


class Generation:
    """The state of a generation. Arguments as for `generate`.

    All rows of the batch have the same number of new tokens, `generated`. Ended rows leave the batch when they are a
    quarter of it, because removing rows copies the keys and values of the others.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Transformer | Decoder,
        prompts: Sequence[np.ndarray | Sequence[int]],
        sampling: Sampling,
        *,
        samples: int = 1,
        seed: int = 0,
        step: int = 0,
        keys: Sequence[tuple[int, int]] | None = None,
    ):
        check_prompts(model, prompts, samples)
        keys = keys if keys is not None else [(row, 0) for row in range(len(prompts))]
        assert len(keys) == len(prompts), f"{len(keys)} keys for {len(prompts)} prompts"
        self.sampling, self.seed_step, self.context = sampling, (seed, step), model.config.context
        self.keys_R2 = np.array([(row, first + j) for row, first in keys for j in range(samples)], np.int64)
        self.start_R = np.repeat(np.array([len(prompt) for prompt in prompts], np.int64), samples)
        max_new_R = np.minimum(min(sampling.max_new, self.context), self.context - self.start_R)
        self.ids_RN = np.zeros((len(self.start_R), max_new_R.max(initial=0)), np.int64)
        self.logps_RN = np.zeros(self.ids_RN.shape, np.float32)
        self.length_R = np.zeros_like(self.start_R)
        self.reason_R = np.full(len(self.start_R), "", dtype="<U11")
        self.stop_ids = np.array(sorted(sampling.stop), np.int64)
        self.row_B, self.generated = np.arange(len(self.start_R)), 0
        if len(prompts):
            decoder = model if isinstance(model, Decoder) else Decoder(model)
            self._prefill(decoder, prompts, samples)

    @property
    def active(self) -> bool:
        """Whether any row has not ended."""
        return bool((self.reason_R == "").any())

    @torch.inference_mode()
    def step(self) -> tuple[np.ndarray, np.ndarray]:
        """Generate the next token of each active row. Returns the indices of these rows and their new ids, both int64.

        Raises:
            UserError: the model's logits are NaN.
        """
        if self.generated:
            self._forward()
        position_B = self.start_R[self.row_B] + self.generated
        u_B = None
        if self.sampling.temperature:
            u_B = torch.from_numpy(uniforms(*self.seed_step, self.keys_R2[self.row_B], position_B))
        self._ids_B, logp_B = draw(
            self._state.logits_BV, self.sampling, u_B, self._seen_BV, self._state.decoder.ops.argmax
        )
        ids_B, logps_B = (
            torch.stack((self._ids_B.double(), logp_B.double())).cpu().numpy()
        )  # the only synchronisation of a step
        active_B = self.reason_R[self.row_B] == ""
        rows_B, ids_B, logps_B = self.row_B[active_B], ids_B[active_B].astype(np.int64), logps_B[active_B]
        if np.isnan(logps_B).any():
            raise UserError("sampling: the model's logits are not numbers (NaN), so its weights have diverged")
        self.ids_RN[rows_B, self.generated] = ids_B
        self.logps_RN[rows_B, self.generated] = logps_B
        self.generated += 1
        self.length_R[rows_B] = self.generated
        reason_B = np.where(position_B[active_B] + 1 >= self.context, "context", "")
        reason_B = np.where(self.generated >= self.sampling.max_new, "length", reason_B)
        self.reason_R[rows_B] = np.where(np.isin(ids_B, self.stop_ids), "stop", reason_B)
        return rows_B, ids_B

    def end(self, row: int, reason: StopReason) -> None:
        """End a row after its newest token."""
        self.reason_R[row] = reason

    def completion(self, row: int) -> Completion:
        """The completion of a row that has ended."""
        length, reason = self.length_R[row], str(self.reason_R[row])
        assert reason, f"row {row} has not ended"
        return Completion(self.ids_RN[row, :length].copy(), self.logps_RN[row, :length].copy(), reason)  # type: ignore[arg-type]

    def _prefill(self, decoder: Decoder, prompts: Sequence[np.ndarray | Sequence[int]], samples: int) -> None:
        """Run all prompts, padded on the right."""
        length_B = torch.tensor([len(prompt) for prompt in prompts])
        ids_BT = torch.zeros(len(prompts), int(length_B.max()), dtype=torch.long)
        penalised = self.sampling.repetition_penalty != 1
        seen_BV = torch.zeros(len(prompts), decoder.config.vocab, dtype=torch.bool) if penalised else None
        for row, prompt in enumerate(prompts):
            ids = torch.as_tensor(np.asarray(prompt, dtype=np.int64))
            ids_BT[row, : len(ids)] = ids
            if seen_BV is not None:
                seen_BV[row, ids] = True
        device, max_new = decoder.device, self.ids_RN.shape[1] - 1
        self._state = DecodeState(decoder, ids_BT.to(device), length_B.to(device), max_new, samples)
        self._seen_BV = None if seen_BV is None else seen_BV.to(device).repeat_interleave(samples, dim=0)

    def _forward(self) -> None:
        """Remove ended rows if they are at least a quarter of the batch, and run the newest tokens of the others."""
        active_B = self.reason_R[self.row_B] == ""
        if 4 * active_B.sum() <= 3 * len(active_B):
            index_B = torch.from_numpy(np.flatnonzero(active_B)).to(self._ids_B.device)
            self._state.keep(index_B)
            self._ids_B, self.row_B = self._ids_B[index_B], self.row_B[active_B]
            self._seen_BV = None if self._seen_BV is None else self._seen_BV[index_B]
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, self._ids_B[:, None], True)
        self._state.run(self._ids_B)


def check_prompts(
    model: Transformer | Decoder, prompts: Sequence[np.ndarray | Sequence[int]], samples: int = 1
) -> None:
    """Check that the model can continue all prompts.

    Raises:
        UserError: it cannot; the message has the number of the prompt, from 1.
    """
    context, vocab = model.config.context, model.config.vocab
    if samples < 1:
        raise UserError(f"samples: found {samples}, expected at least 1")
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) == 0:
            raise UserError(f"prompt {number} is empty; give it at least one token, such as the end-of-text token")
        if len(prompt) >= context:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens, which fill the model's context of {context}; "
                "shorten the prompt"
            )
        low, high = int(np.min(prompt)), int(np.max(prompt))
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise UserError(
                f"prompt {number} has id {bad}, but the model's vocabulary is {vocab}; "
                "encode it with the model's own tokenizer"
            )
