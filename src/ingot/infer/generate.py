"""Sampling in batches: prompts of any lengths in, continuations with exact log-probabilities out.

Every random number is a hash of (seed, step, row, sample, position): one uniform per token, turned into a token by the
inverse of the cumulative distribution. So a continuation depends on its own prompt and key, not on its neighbours, the
order of the batch or how it was split, up to the rounding of matrix products of another size; and a rollout can be made
again from the weights and the step. Rows that have ended leave the batch.

Rejected: `torch.multinomial` with a generator (one stream for the whole batch), and left padding (positions, masks and
the cache then depend on the longest neighbour).

Shapes: B rows, T positions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ingot.core.errors import UserError
from ingot.data.order import keys_of
from ingot.model.attention import KVCache
from ingot.model.transformer import Transformer


@dataclass(frozen=True)
class Completion:
    """One continuation."""

    ids: np.ndarray
    """The sampled ids, int64, the stop token included."""
    logps: np.ndarray
    """ln p of each sampled id under the whole distribution (before top-p) at the temperature (1 if greedy), fp32."""
    stopped: bool
    """True where a stop token ended it; False where `max_new` or the context did."""


def generate(
    model: Transformer,
    prompts: Sequence[np.ndarray | list[int]],
    *,
    max_new: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop: frozenset[int] = frozenset(),
    seed: int = 0,
    step: int = 0,
    keys: Sequence[tuple[int, int]] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    """Continue every prompt by up to `max_new` tokens.

    A row ends at a stop token, after `max_new` tokens, or when prompt and continuation fill the model's context (the
    window does not slide: a cache of rotated keys would no longer equal a full forward).

    Args:
        prompts: ids, at least one and at most context - 1 per prompt.
        temperature: divides the logits; 0 takes the most probable token.
        top_p: samples from the smallest set of most probable tokens that holds this much probability.
        stop: ids that end a row; the stop id itself is kept.
        seed, step: with `keys`, what the randomness is keyed by.
        keys: (row, sample) of each prompt; default (its place in the list, 0). Give them to split a batch.
        on_token: called with (place in the list, id) as tokens appear.

    Raises:
        UserError: an empty prompt, one that leaves no room, an id outside the vocabulary, or a setting out of range.
    """
    _check(model, prompts, max_new, temperature, top_p)
    keys = keys if keys is not None else [(row, 0) for row in range(len(prompts))]
    assert len(keys) == len(prompts), f"{len(keys)} keys for {len(prompts)} prompts"
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            return _generate(model, prompts, max_new, temperature, top_p, stop, (seed, step), keys, on_token)
    finally:
        model.train(was_training)


def uniforms(seed: int, step: int, keys: Sequence[tuple[int, int]], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) for each (row, sample) and position: 52 bits of a hash of all five."""
    rows, samples = np.array(keys, dtype=np.int64).reshape(-1, 2).T
    hashed = keys_of(seed, step, rows, samples, np.asarray(positions, dtype=np.int64))
    return (hashed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _generate(
    model: Transformer,
    prompts: Sequence[np.ndarray | list[int]],
    max_new: int,
    temperature: float,
    top_p: float,
    stop: frozenset[int],
    origin: tuple[int, int],
    keys: Sequence[tuple[int, int]],
    on_token: Callable[[int, int], None] | None,
) -> list[Completion]:
    if not prompts:
        return []
    device = model.embedding.weight.device
    lengths = [len(prompt) for prompt in prompts]
    last = [min(length + max_new, model.config.context) for length in lengths]
    ids_BT = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids_BT[row, : lengths[row]] = torch.as_tensor(np.asarray(prompt, dtype=np.int64))
    cache = KVCache(model.config, len(prompts), max(last), model.embedding.weight.dtype, device)
    out = model(ids_BT.to(device), cache=cache)
    cache.length_B = torch.tensor(lengths, device=device)
    hidden_BD = out.hidden[torch.arange(len(prompts), device=device), cache.length_B - 1]

    alive = list(range(len(prompts)))
    made: list[list[int]] = [[] for _ in prompts]
    logps: list[list[float]] = [[] for _ in prompts]
    stopped = [False] * len(prompts)
    while True:
        positions = [lengths[row] + len(made[row]) for row in alive]
        u_B = uniforms(*origin, [keys[row] for row in alive], positions)
        ids_B, logp_B = _sample(out.head(hidden_BD), temperature, top_p, torch.from_numpy(u_B))
        for row, token, logp in zip(alive, ids_B.tolist(), logp_B.tolist(), strict=True):
            made[row].append(token)
            logps[row].append(logp)
            stopped[row] = token in stop
            if on_token is not None:
                on_token(row, token)
        going = [i for i, row in enumerate(alive) if not stopped[row] and lengths[row] + len(made[row]) < last[row]]
        if not going:
            break
        if len(going) < len(alive):
            kept = torch.tensor(going, device=device)
            cache.keep(kept)
            ids_B, alive = ids_B[kept], [alive[i] for i in going]
        out = model(ids_B[:, None], cache=cache)
        hidden_BD = out.hidden[:, 0]
    return [
        Completion(np.array(m, dtype=np.int64), np.array(p, dtype=np.float32), s)
        for m, p, s in zip(made, logps, stopped, strict=True)
    ]


def _sample(logits_BV: Tensor, temperature: float, top_p: float, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and their log-probabilities; sums in fp64, so that a uniform below 1 falls on a token that has weight."""
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    logp_BV = torch.log_softmax(logits_BV / temperature if temperature > 0 else logits_BV, dim=-1)
    if temperature == 0:
        ids_B = logits_BV.argmax(dim=-1)
    else:
        p_BV = logp_BV.double().exp()
        if top_p < 1:
            sorted_BV, order_BV = p_BV.sort(dim=-1, descending=True, stable=True)
            enough_BV = sorted_BV.cumsum(dim=-1) - sorted_BV >= top_p  # the tokens before already hold top_p
            p_BV = torch.zeros_like(p_BV).scatter(1, order_BV, sorted_BV.masked_fill(enough_BV, 0.0))
        total_BV = p_BV.cumsum(dim=-1)
        aim_B1 = u_B.to(total_BV.device)[:, None] * total_BV[:, -1:]
        ids_B = torch.searchsorted(total_BV, aim_B1, right=True).squeeze(1)
    return ids_B, logp_BV.gather(1, ids_B[:, None]).squeeze(1)


def _check(
    model: Transformer, prompts: Sequence[np.ndarray | list[int]], max_new: int, temperature: float, top_p: float
) -> None:
    context, vocab = model.config.context, model.config.vocab
    if max_new < 1:
        raise UserError(f"max_new: found {max_new}, expected at least 1")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature: found {temperature}, expected 0 (greedy) or a positive number")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p: found {top_p}, expected more than 0 and at most 1 (1 keeps every token)")
    for number, prompt in enumerate(prompts):
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
