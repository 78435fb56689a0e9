"""K2: a student of the k most likely tokens needs their tail, and a tail belongs to its temperature.

The source is that of `k1_distillation`. The student is a table with 16 logits for each of the 256 contexts, so that it
reaches the minimum of its loss.

Shapes: B rows, T positions, C contexts, V letters, k stored letters, n positions.
"""

import numpy as np
import torch
from torch import Tensor

from ingot.model.lm_head import LMHead
from ingot.train.divergences import (
    Divergence,
    LiveTeacher,
    StoredTeacher,
    Teacher,
    buckets,
    distillation_terms,
    kl,
    most_likely,
)
from proofs.k1_distillation import ROWS, Source, V, batch_of
from proofs.proof import Arm, Gate, Numbers, Proof

STEPS, ALPHA = 300, 0.1
"""Steps on all 20,000 letters, and weight of the labels."""
ZIPF, STORED = 4096, 64
"""Vocabulary and stored ids of the measurement of tails."""


def run(seed: int, arm: str) -> Numbers:
    if arm in ("tail at T = 2", "tail of one bucket"):
        return tails(arm == "tail at T = 2", seed)
    k = int(arm.split()[0])
    found, full = (trained(seed, k, stored) for stored in (arm, None))
    return {"excess": found[0], "above all 16": found[0] - full[0], "k + 1": found[1] - full[1]}


def trained(seed: int, k: int, stored: str | None) -> tuple[float, float]:
    """The excess of a student, over all letters and over k letters and the tail, in nats.

    Args:
        stored: "K and the tail" or "K renormalised"; None: the teacher's full distribution.
    """
    source = Source(seed)
    data = batch_of(source.draw(ROWS, seed))
    ids_BT, labels_BT = torch.from_numpy(data.ids_BT), torch.from_numpy(data.labels_BT)
    context_BT = torch.cat((torch.zeros_like(ids_BT[:, :1]), ids_BT[:, :-1]), 1) * V + ids_BT
    logp_BTV = source(ids_BT).hidden
    identity = LMHead(torch.eye(V))
    teacher: Teacher = LiveTeacher(logp_BTV, identity)
    if stored:
        ids, kept, log_tail = most_likely(logp_BTV.view(-1, V), k, (1.0,))
        log_tail = log_tail if "tail" in stored else torch.full_like(log_tail, -60.0)
        shape = ids_BT.shape
        teacher = StoredTeacher(ids.view(*shape, k), kept.view(*shape, k), log_tail.view(shape))
    table_CV = torch.zeros(V * V, V, requires_grad=True)
    optimizer = torch.optim.Adam([table_CV], lr=0.1)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / STEPS)
        optimizer.zero_grad()
        loss_BT, *_ = distillation_terms(table_CV[context_BT], identity, labels_BT, teacher, Divergence(), ALPHA)
        loss_BT.mean().backward()
        optimizer.step()
    both = logp_BTV.view(-1, V).double(), table_CV.detach()[context_BT].view(-1, V).double()
    merged = [buckets(x_nV, both[0].topk(k).indices) for x_nV in both]
    return float(kl(*(x.log_softmax(-1) for x in both)).mean()), float(kl(*merged).mean())


def tails(stored: bool, seed: int) -> Numbers:
    """How far the tail at T = 2 is off: as stored, and as computed from that at T = 1 as if it were one token."""
    order = np.random.default_rng(seed).permutation(ZIPF)
    logits_1V = -torch.arange(1, ZIPF + 1).log()[torch.from_numpy(order)][None]
    ids, kept, log_tails = most_likely(logits_1V, STORED, (1.0, 2.0))
    exact = float(1 - (logits_1V.double() / 2).softmax(-1).gather(1, ids).sum())
    if stored:
        teacher = StoredTeacher(ids[None], kept[None], log_tails[None, :, 1])
        d = Divergence(temperature=2.0)
        found = teacher.targets((ids, kept, log_tails[:, 1]), d, ZIPF).teacher_nK[0, -1].exp()
    else:
        buckets_K: Tensor = torch.cat((logits_1V.log_softmax(-1).gather(1, ids), log_tails[:, :1]), -1)[0]
        found = (buckets_K / 2).softmax(-1)[-1]
    return {"tail": float(found), "off by": abs(float(found) - exact)}


NEAR = Gate("k + 1", high=0.01)
PROOF = Proof(
    "K2",
    "A student of the k most likely tokens and the tail learns their probabilities as from the full distribution; "
    "with k renormalised tokens it does not",
    "excess over these k + 1 outcomes at most .01 above that of a student of all 16 letters (without the tail .12 for "
    "k = 8, from the closed form of the minimum); the tail at T = 2 (Zipf's law, 4,096 ids, k = 64) to 1e-6",
    run,
    [
        Arm("8 and the tail", [NEAR]),
        Arm("4 and the tail", [NEAR]),
        Arm("tail at T = 2", [Gate("off by", high=1e-6)]),
        Arm("8 renormalised", [NEAR], control=True),
        Arm("4 renormalised", [NEAR], control=True),
        Arm("tail of one bucket", [Gate("off by", high=0.3)], control=True),
    ],
    note="Inside the tail only the labels teach (weight 0.1): `above all 16` is the excess over all letters.",
)
