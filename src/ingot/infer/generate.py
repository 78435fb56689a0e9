"""Continuing prompts in batches: prompts of any lengths in, continuations with exact log-probabilities out.

A continuation depends on its own prompt and key, not on its neighbours, the order of the batch or how it was split, up
to the rounding of matrix products of another size; so a rollout can be made again from the weights and the step
(`sampling.py` says how). Samples of one prompt share its prefill. Rows that have ended leave the batch.

`Generation` is the state, one call of `step` a token, so that whoever loops over it can look at tokens as they come and
end rows: `generate` here, text and stop strings in `text.py`. What a step does for single rows is done with arrays, and
the device is waited for once a step.

Rejected: a callback per token (the loop belongs to the caller, who may want to stop or to yield), and left padding
(positions, masks and the cache then depend on the longest neighbour).

Shapes: B living rows, R all rows (prompts x samples), T positions, N new tokens, V vocabulary.
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
"""What ended a continuation: a stop id, a stop string, `max_new`, or the model's context being full."""


@dataclass(frozen=True)
class Completion:
    """One continuation."""

    ids: np.ndarray
    """The sampled ids, int64, the stop id included."""
    logps: np.ndarray
    """ln p of each sampled id under the model at the temperature (1 if greedy), before the repetition penalty and any
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

    A row ends at a stop id, after `max_new` tokens, or when prompt and continuation fill the model's context (the
    window does not slide: a cache of rotated keys would no longer equal a full forward).

    Args:
        model: its weights as they are now, without dropout. In its own precision, or in autocast's where that
            is on. Give a `Decoder` to choose another, or to copy once for many calls.
        prompts: ids, at least one and at most context - 1 per prompt.
        sampling: how tokens are drawn; default: from the model's distribution as it is.
        samples: continuations of each prompt; they share its prefill.
        seed, step: with `keys`, what the randomness is keyed by.
        keys: (row, first sample) of each prompt; default (its place in the list, 0). Give them to split a batch.

    Returns:
        prompts x samples continuations; number i * samples + j is sample j of prompt i.

    Raises:
        UserError: an empty prompt, one that leaves no room, or an id outside the vocabulary.
    """
    generation = Generation(model, prompts, sampling or Sampling(), samples=samples, seed=seed, step=step, keys=keys)
    while generation.going:
        generation.step()
    return [generation.completion(row) for row in range(len(generation.reason_R))]


class Generation:
    """Rows that are being continued; arguments as `generate`'s.

    All living rows have the same number of new tokens, since they began together: one counter serves them all. Rows
    that have ended leave the batch a quarter at a time: to drop one costs a copy of the others' keys and values.
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
        self.sampling, self.origin, self.context = sampling, (seed, step), model.config.context
        self.keys_R2 = np.array([(row, first + j) for row, first in keys for j in range(samples)], np.int64)
        self.start_R = np.repeat(np.array([len(prompt) for prompt in prompts], np.int64), samples)
        room_R = np.minimum(min(sampling.max_new, self.context), self.context - self.start_R)
        self.ids_RN = np.zeros((len(self.start_R), room_R.max(initial=0)), np.int64)
        self.logps_RN = np.zeros(self.ids_RN.shape, np.float32)
        self.made_R = np.zeros_like(self.start_R)
        self.reason_R = np.full(len(self.start_R), "", dtype="<U11")
        self.stop_ids = np.array(sorted(sampling.stop), np.int64)
        self.held_B, self.made = np.arange(len(self.start_R)), 0
        if len(prompts):
            decoder = model if isinstance(model, Decoder) else Decoder(model)
            self._prefill(decoder, prompts, samples)

    @property
    def going(self) -> bool:
        """Whether any row is still to be continued."""
        return bool((self.reason_R == "").any())

    @torch.inference_mode()
    def step(self) -> tuple[np.ndarray, np.ndarray]:
        """Give each living row its next token: the numbers of these rows and their new ids, both int64.

        Raises:
            UserError: the model's logits are not numbers.
        """
        if self.made:
            self._forward()
        position_B = self.start_R[self.held_B] + self.made
        u_B = None
        if self.sampling.temperature:
            u_B = torch.from_numpy(uniforms(*self.origin, self.keys_R2[self.held_B], position_B))
        self._ids_B, logp_B = draw(
            self._state.logits_BV, self.sampling, u_B, self._seen_BV, self._state.decoder.ops.argmax
        )
        ids_B, logps_B = torch.stack((self._ids_B.double(), logp_B.double())).cpu().numpy()  # the one wait of a step
        living_B = self.reason_R[self.held_B] == ""
        rows_B, ids_B, logps_B = self.held_B[living_B], ids_B[living_B].astype(np.int64), logps_B[living_B]
        if np.isnan(logps_B).any():
            raise UserError("sampling: the model's logits are not numbers (NaN), so its weights have diverged")
        self.ids_RN[rows_B, self.made] = ids_B
        self.logps_RN[rows_B, self.made] = logps_B
        self.made += 1
        self.made_R[rows_B] = self.made
        reason_B = np.where(position_B[living_B] + 1 >= self.context, "context", "")
        reason_B = np.where(self.made >= self.sampling.max_new, "length", reason_B)
        self.reason_R[rows_B] = np.where(np.isin(ids_B, self.stop_ids), "stop", reason_B)
        return rows_B, ids_B

    def end(self, row: int, reason: StopReason) -> None:
        """Let a row end with the token it just got."""
        self.reason_R[row] = reason

    def completion(self, row: int) -> Completion:
        """A row that has ended."""
        made, reason = self.made_R[row], str(self.reason_R[row])
        assert reason, f"row {row} has not ended"
        return Completion(self.ids_RN[row, :made].copy(), self.logps_RN[row, :made].copy(), reason)  # type: ignore[arg-type]

    def _prefill(self, decoder: Decoder, prompts: Sequence[np.ndarray | Sequence[int]], samples: int) -> None:
        """Read all prompts, padded on the right."""
        length_B = torch.tensor([len(prompt) for prompt in prompts])
        ids_BT = torch.zeros(len(prompts), int(length_B.max()), dtype=torch.long)
        penalised = self.sampling.repetition_penalty != 1
        seen_BV = torch.zeros(len(prompts), decoder.config.vocab, dtype=torch.bool) if penalised else None
        for row, prompt in enumerate(prompts):
            ids = torch.as_tensor(np.asarray(prompt, dtype=np.int64))
            ids_BT[row, : len(ids)] = ids
            if seen_BV is not None:
                seen_BV[row, ids] = True
        device, room = decoder.device, self.ids_RN.shape[1] - 1
        self._state = DecodeState(decoder, ids_BT.to(device), length_B.to(device), room, samples)
        self._seen_BV = None if seen_BV is None else seen_BV.to(device).repeat_interleave(samples, dim=0)

    def _forward(self) -> None:
        """Drop the rows that have ended, if they are many, and run the others' newest tokens."""
        living_B = self.reason_R[self.held_B] == ""
        if 4 * living_B.sum() <= 3 * len(living_B):
            kept_B = torch.from_numpy(np.flatnonzero(living_B)).to(self._ids_B.device)
            self._state.keep(kept_B)
            self._ids_B, self.held_B = self._ids_B[kept_B], self.held_B[living_B]
            self._seen_BV = None if self._seen_BV is None else self._seen_BV[kept_B]
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, self._ids_B[:, None], True)
        self._state.run(self._ids_B)


def check_prompts(
    model: Transformer | Decoder, prompts: Sequence[np.ndarray | Sequence[int]], samples: int = 1
) -> None:
    """Raise a UserError, naming the prompt by its number from 1, unless the model can continue all of them."""
    context, vocab = model.config.context, model.config.vocab
    if samples < 1:
        raise UserError(f"samples: found {samples}, expected at least 1")
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) == 0:
            raise UserError(f"prompt {number} is empty; give it at least one token, such as the end-of-text token")
        if len(prompt) >= context:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens, which leaves no room in the model's context of {context}; "
                "shorten the prompt"
            )
        low, high = int(np.min(prompt)), int(np.max(prompt))
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise UserError(
                f"prompt {number} holds id {bad}, but the model's vocabulary is {vocab}; "
                "encode it with the model's own tokenizer"
            )
