"""How likely a model finds answers to prompts: sums of ln p, by whole batches of ragged rows.

What choices, judges and other programs' benchmarks are scored by. Prompt and answer are encoded apart, as they are when
a model writes the answer itself; an answer brings the blank it begins with. Rows longer than the context lose the
beginning of their prompt, as a conversation that has grown too long does.

Shapes: B rows, T positions, N positions that predict an answer, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ingot.core.errors import UserError
from ingot.infer.ops import argmax
from ingot.model.lm_head import chunk_size
from ingot.model.transformer import Transformer
from ingot.train.settings import rows_per_pass

Ids = np.ndarray | Sequence[int]


@dataclass(frozen=True)
class Scored:
    """One answer."""

    logp: float
    """Sum of ln p of its tokens, given the prompt and the tokens before."""
    tokens: int
    greedy: bool
    """Whether each of its tokens was the likeliest."""


def score(
    model: Transformer,
    requests: Sequence[tuple[Ids, Ids]],
    advance: Callable[[int], None] = lambda n: None,
) -> list[Scored]:
    """Score answers.

    Args:
        model: read in its own precision, in evaluation mode.
        requests: prompt and answer, ids; both have at least one.
        advance: told the number of answers done.

    Raises:
        UserError: an answer longer than the context.
    """
    context = int(model.config.context)
    for prompt, answer in requests:
        assert min(len(prompt), len(answer)) > 0, "a prompt and an answer need a token each"
        if len(answer) > context:
            raise UserError(
                f"an answer has {len(answer):,} tokens, more than the model's context of {context:,}; shorten it"
            )
    rows = [np.concatenate([np.asarray(p), np.asarray(a)]).astype(np.int64)[-context - 1 :] for p, a in requests]
    found: list[Scored | None] = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # like lengths together: little padding
    model.eval()
    while order:
        size = rows_per_pass(len(rows[order[0]]))
        batch, order = order[:size], order[size:]
        scored = _score(model, [rows[i] for i in batch], [len(requests[i][1]) for i in batch])
        for i, one in zip(batch, scored, strict=True):
            found[i] = one
        advance(len(batch))
    return [one for one in found if one is not None]


@torch.inference_mode()
def _score(model: Transformer, rows: list[np.ndarray], lengths: list[int]) -> list[Scored]:
    """Rows are prompts with their answers; what is at place t of the inputs predicts the id at t + 1."""
    device = model.embedding.weight.device
    ids_BT = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.long)
    asked_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)
    for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        ids_BT[b, : len(row) - 1] = torch.from_numpy(row[:-1])
        asked_BT[b, len(row) - 1 - n : len(row) - 1] = True
    labels_N = torch.from_numpy(np.concatenate([row[-n:] for row, n in zip(rows, lengths, strict=True)])).to(device)
    out = model(ids_BT.to(device))
    hidden_ND = out.hidden[asked_BT.to(device)]
    size = chunk_size(int(model.config.vocab), hidden_ND.device, needs_grad=False)
    logps, best = [], []
    for hidden_nD, labels_n in zip(hidden_ND.split(size), labels_N.split(size), strict=True):
        logp_nV = torch.log_softmax(out.head(hidden_nD).float(), -1)
        logps.append(logp_nV.gather(1, labels_n[:, None])[:, 0].double())
        best.append(argmax(logp_nV) == labels_n)
    logp_N, best_N = torch.cat(logps).cpu(), torch.cat(best).cpu()
    return [
        Scored(float(logp.sum()), len(logp), bool(greedy.all()))
        for logp, greedy in zip(logp_N.split(lengths), best_N.split(lengths), strict=True)
    ]
