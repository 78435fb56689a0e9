"""The diagonal Fisher information: how much a model's predictions on some text hang on each weight.

F_i = E_x E_{y ~ p(y|x)} (d/d theta_i ln p(y|x))^2, the *true* Fisher: text from the old task, labels from the model's
own distribution given the gold text before them. `sampled` draws one label at every labelled place. Such draws are
independent with gradients of mean zero, so the terms across places vanish in expectation, the square of a whole row's
gradient is an unbiased estimate of the sum over its places of each place's own Fisher, and dividing by the number of
places gives F per token, the unit of the loss: half of F (theta - theta*)^2 is, to second order, what
KL(model at theta* || model at theta) the old text costs per token.

`mixed`, the default, has the same expectation at the same cost: all that a draw contributes is a random vector in the
logits with mean zero and covariance diag(p) - p p', and `ops.random_scores` makes one in which every token of the
vocabulary has its part. It matters where the model is sure: a label of probability 1e-5 has most of the information and
is never among 2,000 draws. (Measured: a small model that had learned to reverse three letters; 512 rows gave 5e-15 a
weight by drawing, 1.6e-8 by mixing, where it was to 2 % between rows.)

Gold labels instead (`empirical`) give something else: where the model is right with probability p, a logit's value
shrinks by (1 - p) / p, so a well-trained model seems to need none of its weights. It is here as a control. `exact`
replaces the draw by the sum over the vocabulary, sum_v p_v (d ln p_v)^2 at each place: no noise, V backward passes a
token, hence for checks on small models.

One backward pass a row, whose gradient is squared and added: about the cost of training on those rows, with two passes
over the weights more. `pool` rows may share one where gradients are independent (drawn or mixed: the square of their
sum is right on average too): quicker on a GPU, and with so many fewer squares so much noisier. Rejected:
gradients of each row by `torch.func.vmap` (no fewer operations, and each of the model's would have to know of it).

Squaring the mean gradient of a batch of gold labels is none of these, and counting one example more than is divided by
(the widely copied reference code stops at `index > samples`) is not either.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.data.sampler import key_of
from ingot.evaluate.bootstrap import ratio
from ingot.infer.sampling import pick, uniforms
from ingot.model.lm_head import LMHead, chunk_size
from ingot.model.losses import random_scores, token_logps
from ingot.model.transformer import Transformer

Labels = Literal["mixed", "sampled", "exact", "empirical"]


class Fisher:
    """Squared gradients, added up over batches. What a killed run goes on from is `squares` and `noted`."""

    def __init__(self, model: Transformer, labels: Labels = "mixed", seed: int = 1):
        self.model, self.labels, self.seed = model.eval(), labels, seed
        self.weights = {name: p.requires_grad_() for name, p in model.named_parameters()}
        self.squares = {name: torch.zeros_like(p) for name, p in self.weights.items()}
        self.noted: dict[str, list[float]] = {"traces": [], "tokens": []}
        """Of every batch: the sum of its squares over all weights, and its labelled places."""

    @property
    def tokens(self) -> int:
        """Labelled places so far."""
        return int(sum(self.noted["tokens"]))

    def add(self, batch: Batch, place: int) -> None:
        """Add the squared gradient of a batch (tensors) as one sample; `place` names its draws."""
        trace = 0.0
        for share, gradients in self._gradients(batch, place):
            for square, gradient in zip(self.squares.values(), gradients, strict=True):
                square.addcmul_(gradient, gradient, value=share)
            trace += share * float(nn.utils.get_total_norm(gradients)) ** 2
        self.noted["traces"].append(trace)
        self.noted["tokens"].append(int((batch.labels_BT != batch.ignore).sum()))

    def mean(self) -> dict[str, Tensor]:
        """F per token, by parameter."""
        return {name: square / max(1, self.tokens) for name, square in self.squares.items()}

    def trace(self) -> dict[str, float]:
        """The sum of F over all weights with a 95 % interval over batches: how well so many samples know it."""
        return ratio(np.array(self.noted["traces"]), np.array(self.noted["tokens"]))

    def _gradients(self, batch: Batch, place: int) -> Any:
        """(share, gradient of every parameter) of each term of the sum that this batch stands for."""
        out = self.model(**batch.inputs)
        kept_BT = batch.labels_BT != batch.ignore
        parameters = list(self.weights.values())
        if self.labels == "exact":
            for hidden_W in out.hidden[kept_BT]:
                logp_V = out.head(hidden_W).log_softmax(-1)
                for p, logp in zip(logp_V.detach().exp().tolist(), logp_V, strict=True):
                    yield p, torch.autograd.grad(logp, parameters, retain_graph=True)
            return
        if self.labels == "mixed":
            scores_N = random_scores(out.hidden[kept_BT], out.head, key_of(self.seed, place))
            yield 1.0, torch.autograd.grad(scores_N.sum(), parameters)
            return
        labels_BT = batch.labels_BT
        if self.labels == "sampled":
            drawn_N = _drawn(out.hidden.detach()[kept_BT], out.head, self._uniforms(batch, place)[kept_BT])
            labels_BT = labels_BT.masked_scatter(kept_BT, drawn_N)
        logp = token_logps(out.hidden, out.head, labels_BT, ignore=batch.ignore).sum()
        yield 1.0, torch.autograd.grad(logp, parameters)

    def _uniforms(self, batch: Batch, place: int) -> Tensor:
        """One number for each place of each row, B x T, whatever else is in the batch."""
        B, T = batch.labels_BT.shape
        rows_N = place + np.repeat(np.arange(B), T)
        keys_N2 = np.stack([rows_N, np.zeros_like(rows_N)], 1)
        drawn_N = uniforms(self.seed, 0, keys_N2, np.tile(np.arange(T), B))
        return torch.from_numpy(drawn_N).view(B, T).to(batch.labels_BT.device)


@torch.no_grad()
def _drawn(hidden_NW: Tensor, head: LMHead, uniform_N: Tensor) -> Tensor:
    """The model's own draw at every place, in chunks of the head."""
    size = chunk_size(len(head.weight), hidden_NW.device, needs_grad=False)
    chunks = zip(hidden_NW.split(size), uniform_N.split(size), strict=True)
    return torch.cat([pick(head(hidden_nW).float(), uniform_n) for hidden_nW, uniform_n in chunks])
