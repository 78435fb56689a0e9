"""The head in C++ against float64, beside torch's own way in the same precision."""

import pytest
import torch
from torch import Tensor

from ingot.backends.cpu_head import NativeHead
from ingot.kernels import cpu_train
from ingot.model.lm_head import Head
from ingot.model.losses import IGNORE, cross_entropy, token_logps

BF16, FP32 = torch.bfloat16, torch.float32
WHY = "no such vectors, or no C++ compiler"
needed = pytest.mark.skipif(not cpu_train.available(BF16), reason=WHY)
each = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(BF16, marks=needed, id="bf16"),
        pytest.param(FP32, marks=pytest.mark.skipif(not cpu_train.available(FP32), reason=WHY), id="fp32"),
    ],
)

PIECE = 1536


def _drawn(rows: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a matrix that makes logits of some size, labels, and how often each counts."""
    g = torch.Generator().manual_seed(rows + vocab)
    hidden, weight = torch.randn(rows, width, generator=g), torch.randn(vocab, width, generator=g) / width**0.5 * 2
    return hidden, weight, torch.randint(vocab, (rows,), generator=g), torch.randn(rows, generator=g)


def _found(head: type[Head], given: tuple[Tensor, ...], max_logits: int | None, dtype: torch.dtype) -> list[Tensor]:
    """Costs and gradients of hidden states and the matrix."""
    hidden, weight, labels, counts = given
    # What is multiplied is rounded before, so that only what each does is compared.
    hidden, weight = (x.bfloat16().float().requires_grad_() for x in (hidden, weight))
    if dtype == torch.float64:
        hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == BF16):
        nll = head(weight).nll(hidden, labels, max_logits)
    (nll * counts).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [nll.detach(), hidden.grad, weight.grad]


def _off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@each
@pytest.mark.parametrize(
    ("rows", "width", "vocab", "chunk"),
    [
        (1, 16, 2, None),
        (7, 48, 65, None),
        (64, 128, 65, 20),
        (130, 32, 257, 50),
        (33, 80, PIECE - 1, None),
        (40, 64, PIECE, None),
        (40, 64, PIECE + 1, 9),
        (136, 48, 2 * PIECE + 33, None),
        (65, 96, 4096, 64),
    ],
)
def test_costs_and_gradients(rows: int, width: int, vocab: int, chunk: int | None, dtype: torch.dtype) -> None:
    """As near to float64 as torch's operations are, in pieces of the vocabulary and in chunks of positions."""
    given = _drawn(rows, width, vocab)
    limit = None if chunk is None else chunk * vocab
    wanted = _found(Head, given, None, torch.float64)
    ours, others = _found(NativeHead, given, limit, dtype), _found(Head, given, limit, dtype)
    for found, torchs, exact in zip(ours, others, wanted, strict=True):
        assert _off(found, exact) < 1.3 * _off(torchs, exact) + 1e-6  # thousands of products are added up


@each
def test_a_broken_head_is_found(dtype: torch.dtype) -> None:
    given = _drawn(40, 64, 300)
    exact = _found(Head, given, None, torch.float64)

    class Late(NativeHead):
        def weight_gradient(self, excess: Tensor, scaled_nD: Tensor, others_VD: Tensor | None) -> Tensor:
            return super().weight_gradient(excess, scaled_nD.roll(1, 0), others_VD)

    (_, _, found), (_, _, torchs) = _found(Late, given, None, dtype), _found(Head, given, None, dtype)
    assert _off(found, exact[2]) > 10 * _off(torchs, exact[2])


@each
def test_nothing_labelled(dtype: torch.dtype) -> None:
    costs, hidden, weight = _found(NativeHead, _drawn(0, 32, 50), None, dtype)
    assert (len(costs), len(hidden)) == (0, 0)
    assert torch.equal(weight, torch.zeros(50, 32))


@each
@pytest.mark.parametrize("size", [10.0, 64.0])
def test_sure_and_hopeless_labels(size: float, dtype: torch.dtype) -> None:
    """A label of probability one costs nothing and asks for nothing; one of none costs its distance, as in torch."""
    weight = torch.zeros(20, 16)
    weight[3, 0], weight[4, 0] = size, -size
    hidden = torch.zeros(2, 16, requires_grad=True)
    with torch.no_grad():
        hidden[:, 0] = 2.0
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == BF16):
        nll = NativeHead(weight).nll(hidden, torch.tensor([3, 4]))
    nll.sum().backward()
    sure, hopeless = nll.tolist()
    assert 0 <= sure < 1e-6
    assert hopeless == pytest.approx(4 * size)
    assert hidden.grad is not None
    assert hidden.grad[0].abs().max() < 1e-6
    assert hidden.grad[1, 0] == pytest.approx(2 * size)


@needed
@pytest.mark.parametrize("label", [-100, -1, 50])
def test_a_label_that_is_none_is_refused(label: int) -> None:
    hidden, weight, labels, _ = _drawn(9, 32, 50)
    labels[3] = label
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(AssertionError, match="labels"):
        NativeHead(weight).nll(hidden, labels)


@needed
def test_what_is_frozen_gets_no_gradient_and_what_is_no_number_is_not_hidden() -> None:
    hidden, weight, labels, _ = _drawn(9, 32, 50)
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, count = cross_entropy(hidden[None], NativeHead(weight), labels[None])
        loss.backward()
        assert (count, weight.grad) == (9, None)
        assert hidden.grad is not None
        with torch.no_grad():
            some = torch.where(torch.arange(9) % 2 == 0, labels, IGNORE)[None]
            logps = token_logps(hidden[None], NativeHead(weight), some)
            assert torch.equal(logps[0, 1::2], torch.zeros(4))
            torchs = token_logps(hidden[None], Head(weight), some)
            torch.testing.assert_close(logps, torchs, rtol=0, atol=1e-2)
            broken = hidden.detach().clone()
            broken[4, 7] = float("nan")
            found = NativeHead(weight).nll(broken, labels)
    assert found.isnan().tolist() == [i == 4 for i in range(9)]
