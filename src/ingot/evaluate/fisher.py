"""The diagonal Fisher information: how sensitive a model's predictions on some text are to each weight.

F_i = E_x E_{y ~ p(y|x)} (d/d theta_i ln p(y|x))^2 is the *true* Fisher: the text x is from the old task, and the labels
y are from the model's own distribution given the preceding gold text. F is per token, the unit of the loss:
F (theta - theta*)^2 / 2 is, to second order, the KL(model at theta* || model at theta) per token of the old text.

Estimators (`labels`):

- `sampled` draws one label at every labelled position. The draws are independent and their gradients have mean 0, so
  cross terms between positions vanish in expectation, and the squared gradient of a complete row is an unbiased
  estimate of the sum of the Fisher information of its positions.
- `mixed`, the default, has the same expectation at the same cost. It replaces the gradient of a drawn label, a random
  vector in the logits with mean 0 and covariance diag(p) - p p', by `losses.random_scores`, a vector with the same
  moments in which every token of the vocabulary takes part. This matters for confident models: a label of probability
  1e-5 carries most of the information and is hardly ever drawn (docs/LOG.md).
- `exact` sums over the vocabulary, sum_v p_v (d ln p_v)^2 at each position: no noise, but V backward passes per token.
- `empirical` uses the gold labels, as a control. It is another quantity: at a position where the model predicts the
  gold label with probability p, it is smaller by (1 - p) / p, so a well-trained model appears insensitive to its
  weights.

The cost is one backward pass per row, plus squaring and adding its gradient. With `sampled` and `mixed` several rows
may share a pass, since the square of their summed gradient has the same expectation: faster on a GPU, but with fewer
squares, so noisier.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.data.sampler import key_of
from ingot.evaluate.bootstrap import ratio
from ingot.infer.sampling import inverse_cdf_sample, uniforms
from ingot.model.lm_head import LMHead, chunk_size
from ingot.model.losses import random_scores, token_logps
from ingot.model.transformer import Transformer

Labels = Literal["mixed", "sampled", "exact", "empirical"]


class Fisher:
    """Sums of squared gradients over batches. `squares` and `per_batch` are its complete state, for resuming."""

    def __init__(self, model: Transformer, labels: Labels = "mixed", seed: int = 1):
        self.model, self.labels, self.seed = model.eval(), labels, seed
        self.weights = {name: p.requires_grad_() for name, p in model.named_parameters()}
        self.squares = {name: torch.zeros_like(p) for name, p in self.weights.items()}
        self.per_batch: dict[str, list[float]] = {"traces": [], "tokens": []}
        """Of every batch: the sum of its squares over all weights, and its number of labelled positions."""

    @property
    def tokens(self) -> int:
        """Labelled positions so far."""
        return int(sum(self.per_batch["tokens"]))

    def add(self, batch: Batch, first_row: int) -> None:
        """Add the squared gradient of a batch (tensors) as one sample.

        Args:
            first_row: number of the batch's first row in the run; it keys the random draws.
        """
        trace = 0.0
        for weight, gradients in self._gradients(batch, first_row):
            for square, gradient in zip(self.squares.values(), gradients, strict=True):
                square.addcmul_(gradient, gradient, value=weight)
            trace += weight * float(nn.utils.get_total_norm(gradients)) ** 2
        self.per_batch["traces"].append(trace)
        self.per_batch["tokens"].append(int((batch.labels_BT != batch.ignore).sum()))

    def mean(self) -> dict[str, Tensor]:
        """F per token, by parameter."""
        return {name: square / max(1, self.tokens) for name, square in self.squares.items()}

    def trace(self) -> dict[str, float]:
        """The sum of F over all weights, with a 95 % interval over batches."""
        return ratio(np.array(self.per_batch["traces"]), np.array(self.per_batch["tokens"]))

    def _gradients(self, batch: Batch, first_row: int) -> Any:
        """(weight, gradient of every parameter) of each squared gradient that the batch contributes."""
        out = self.model(**batch.inputs)
        labelled_BT = batch.labels_BT != batch.ignore
        parameters = list(self.weights.values())
        if self.labels == "exact":
            for hidden_W in out.hidden[labelled_BT]:
                logp_V = out.head(hidden_W).log_softmax(-1)
                for p, logp in zip(logp_V.detach().exp().tolist(), logp_V, strict=True):
                    yield p, torch.autograd.grad(logp, parameters, retain_graph=True)
            return
        if self.labels == "mixed":
            scores_N = random_scores(out.hidden[labelled_BT], out.head, key_of(self.seed, first_row))
            yield 1.0, torch.autograd.grad(scores_N.sum(), parameters)
            return
        labels_BT = batch.labels_BT
        if self.labels == "sampled":
            uniform_N = self._uniforms(batch, first_row)[labelled_BT]
            sampled_N = _sample(out.hidden.detach()[labelled_BT], out.head, uniform_N)
            labels_BT = labels_BT.masked_scatter(labelled_BT, sampled_N)
        logp = token_logps(out.hidden, out.head, labels_BT, ignore=batch.ignore).sum()
        yield 1.0, torch.autograd.grad(logp, parameters)

    def _uniforms(self, batch: Batch, first_row: int) -> Tensor:
        """Uniform random numbers, [B, T], keyed by row number and position only."""
        B, T = batch.labels_BT.shape
        rows_N = first_row + np.repeat(np.arange(B), T)
        keys_N2 = np.stack([rows_N, np.zeros_like(rows_N)], 1)
        uniform_N = uniforms(self.seed, 0, keys_N2, np.tile(np.arange(T), B))
        return torch.from_numpy(uniform_N).view(B, T).to(batch.labels_BT.device)


@torch.no_grad()
def _sample(hidden_NW: Tensor, head: LMHead, uniform_N: Tensor) -> Tensor:
    """A token sampled from the model's distribution at every position, chunked over positions."""
    size = chunk_size(len(head.weight), hidden_NW.device, needs_grad=False)
    chunks = zip(hidden_NW.split(size), uniform_N.split(size), strict=True)
    return torch.cat([inverse_cdf_sample(head(hidden_nW).float(), uniform_n) for hidden_nW, uniform_n in chunks])
