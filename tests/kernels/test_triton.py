"""The negative log-likelihood on a GPU against float64; skipped without one."""

import pytest
import torch
import torch.nn.functional as F

from ingot.backends.cuda import CUDABackend, TritonHead
from ingot.model.lm_head import LMHead
from tests.exactness import failures

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("n", "vocab", "padded"), [(0, 11, 64), (1, 11, 64), (300, 50_257, 50_304), (33, 131_072, 131_072)]
)
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_the_kernel(dtype: torch.dtype, n: int, vocab: int, padded: int, spread: float) -> None:
    """The padding is not read; where the excess is kept it is 0 there."""
    pytest.importorskip("triton")
    from ingot.kernels.triton import nll_

    generator = torch.Generator("cuda").manual_seed(n)
    logits = torch.full((n, padded), torch.nan, device="cuda", dtype=dtype)
    logits[:, :vocab] = spread * torch.randn(n, vocab, device="cuda", generator=generator)
    labels = torch.randint(vocab, (n,), device="cuda", generator=generator)
    exact = logits[:, :vocab].double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    untouched = logits.clone()
    torch.testing.assert_close(nll_(untouched, labels, vocab, False).double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(untouched[:, :vocab], logits[:, :vocab])
    torch.testing.assert_close(nll_(logits, labels, vocab, True).double(), expected, rtol=1e-5, atol=1e-4)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logits[:, :vocab].double(), gradient, rtol=2 * eps + 2e-5, atol=1e-7)
    assert not logits[:, vocab:].any()


def test_logits_that_are_not_numbers_stay_so() -> None:
    pytest.importorskip("triton")
    from ingot.kernels.triton import nll_

    logits = torch.zeros(3, 100, device="cuda")
    logits[1, 50] = torch.nan
    assert nll_(logits, torch.zeros(3, dtype=torch.long, device="cuda"), 100, True).isnan().tolist() == [0, 1, 0]


@pytest.mark.parametrize("vocab", [50_257, 64])
@pytest.mark.parametrize("max_logits", [None, 40 * 50_304])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_head(vocab: int, max_logits: int | None, dtype: torch.dtype | None) -> None:
    """In fp64 by PyTorch, else by the kernel."""
    pytest.importorskip("triton")
    generator, stored = torch.Generator("cuda").manual_seed(1), torch.float64 if dtype == torch.float64 else None
    hidden, weight = (torch.randn(n, 96, device="cuda", generator=generator) for n in (100, vocab))
    labels = torch.randint(vocab, (100,), device="cuda", generator=generator)
    scale = torch.randn(100, device="cuda", generator=generator)
    assert type(CUDABackend().lm_head(weight)) is TritonHead

    def by(head: type[LMHead], dtype: torch.dtype | None, stored: torch.dtype | None) -> dict[str, torch.Tensor]:
        given = [x.to(stored or x.dtype).requires_grad_() for x in (hidden, weight)]
        autocast = dtype is not None and stored is None
        with torch.autocast("cuda", dtype=dtype if autocast else None, enabled=autocast):
            nll = head(given[1]).nll(given[0], labels, max_logits)
        gradients = torch.autograd.grad((nll * scale).sum(), given)
        return {"nll": nll.detach(), "hidden": gradients[0], "weight": gradients[1]}

    exact = by(LMHead, None, torch.float64)
    assert failures(by(TritonHead, dtype, stored), by(LMHead, dtype, stored), exact, 1e-6) == []
