"""Log-probabilities of answers given prompts, computed in batches of rows of different lengths.

Used by multiple-choice tasks, judges and lm-eval. An answer includes its leading space. Rows longer than the context
lose the beginning of their prompt.

Shapes: B rows, T positions, N positions that predict answer tokens, V vocabulary, D width.
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
    """The score of one answer."""

    logp: float
    """Sum of ln p of its tokens, given the prompt and the preceding tokens."""
    tokens: int
    greedy: bool
    """Whether greedy decoding would generate it."""


def score(
    model: Transformer,
    requests: Sequence[tuple[Ids, Ids]],
    advance: Callable[[int], None] = lambda n: None,
) -> list[Scored]:
    """Score answers.

    Args:
        model: runs in its own precision; it is left in evaluation mode.
        requests: (prompt, answer) ids, each with at least one token.
        advance: called with the number of answers done since the last call.

    Raises:
        UserError: an answer is longer than the context.
    """
    context = int(model.config.context)
    for prompt, answer in requests:
        assert min(len(prompt), len(answer)) > 0, "prompt and answer need at least one token each"
        if len(answer) > context:
            raise UserError(
                f"an answer has {len(answer):,} tokens, more than the model's context of {context:,}; shorten it"
            )
    rows = [np.concatenate([np.asarray(p), np.asarray(a)]).astype(np.int64)[-context - 1 :] for p, a in requests]
    scores: dict[int, Scored] = {}
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # rows of similar length need little padding
    model.eval()
    while order:
        size = rows_per_pass(len(rows[order[0]]))
        batch, order = order[:size], order[size:]
        scored = _score(model, [rows[i] for i in batch], [len(requests[i][1]) for i in batch])
        scores.update(zip(batch, scored, strict=True))
        advance(len(batch))
    return [scores[i] for i in range(len(rows))]


@torch.inference_mode()
def _score(model: Transformer, rows: list[np.ndarray], lengths: list[int]) -> list[Scored]:
    """Scores of rows that end with an answer of the given length."""
    device = model.embedding.weight.device
    ids_BT = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.long)
    predicts_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)  # position t predicts the id at t + 1
    for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        ids_BT[b, : len(row) - 1] = torch.from_numpy(row[:-1])
        predicts_BT[b, len(row) - 1 - n : len(row) - 1] = True
    labels_N = torch.from_numpy(np.concatenate([row[-n:] for row, n in zip(rows, lengths, strict=True)])).to(device)
    out = model(ids_BT.to(device))
    hidden_ND = out.hidden[predicts_BT.to(device)]
    size = chunk_size(int(model.config.vocab), hidden_ND.device, needs_grad=False)
    logps, greedy = [], []
    for hidden_nD, labels_n in zip(hidden_ND.split(size), labels_N.split(size), strict=True):
        logp_nV = torch.log_softmax(out.head(hidden_nD).float(), -1)
        logps.append(logp_nV.gather(1, labels_n[:, None])[:, 0].double())
        greedy.append(argmax(logp_nV) == labels_n)
    logp_N, greedy_N = torch.cat(logps).cpu(), torch.cat(greedy).cpu()
    return [
        Scored(float(logp_n.sum()), len(logp_n), bool(greedy_n.all()))
        for logp_n, greedy_n in zip(logp_N.split(lengths), greedy_N.split(lengths), strict=True)
    ]
