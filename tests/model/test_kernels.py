"""Kernels of a GPU against the same in plain torch; skipped where there is none."""

import pytest
import torch
import torch.nn.functional as F

from ingot.model import gelu
from ingot.model import head as heads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "vocab", "padded"), [(1, 11, 64), (300, 50_257, 50_304), (33, 131_072, 131_072)])
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_a_labels_cost_and_its_gradient(dtype, n, vocab, padded, spread) -> None:
    pytest.importorskip("triton")
    from ingot.model.kernels import nll_

    generator = torch.Generator("cuda").manual_seed(n)
    logits = torch.full((n, padded), torch.nan, device="cuda", dtype=dtype)  # past the vocabulary nothing is read
    logits[:, :vocab] = spread * torch.randn(n, vocab, device="cuda", generator=generator)
    labels = torch.randint(vocab, (n,), device="cuda", generator=generator)
    exact = logits[:, :vocab].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    expected.sum().backward()
    untouched = logits.clone()
    torch.testing.assert_close(nll_(untouched, labels, vocab, False).double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(untouched[:, :vocab], logits[:, :vocab])
    torch.testing.assert_close(nll_(logits, labels, vocab, True).double(), expected, rtol=1e-5, atol=1e-4)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logits[:, :vocab].double(), exact.grad, rtol=2 * eps + 2e-5, atol=1e-7)
    assert not logits[:, vocab:].any()


@pytest.mark.parametrize("vocab", [50_257, 64])
@pytest.mark.parametrize("max_logits", [None, 40 * 50_304])
def test_the_head_equals_plain_torch(vocab, max_logits) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    hidden, weight = (torch.randn(n, 96, device="cuda", generator=generator, requires_grad=True) for n in (100, vocab))
    labels = torch.randint(vocab, (100,), device="cuda", generator=generator)
    scale = torch.randn(100, device="cuda", generator=generator)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, labels, reduction="none")
    expected = [wanted, *torch.autograd.grad((wanted * scale).sum(), exact)]
    for dtype, bound in ((None, 1e-5), (torch.bfloat16, 5e-2)):
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            found = heads.Head(weight).nll(hidden, labels, max_logits)
        gradients = torch.autograd.grad((found * scale).sum(), (hidden, weight))
        for one, right in zip((found, *gradients), expected, strict=True):
            assert (one - right).norm() < bound * right.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 100, 520), (2, 1024, 3072), (0, 4, 8)])
def test_gelu_of_a_layer_and_its_gradients(dtype, approximate, shape) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator("cuda").manual_seed(shape[1])
    z, gradient = (3 * torch.randn(shape, device="cuda", generator=generator) for _ in range(2))
    bias = torch.randn(shape[-1], device="cuda", generator=generator, requires_grad=True)
    z, gradient = z.to(dtype).requires_grad_(), gradient.to(dtype)
    exact = [x.detach().double().requires_grad_() for x in (z, bias)]
    wanted = F.gelu(exact[0] + exact[1], approximate=approximate)
    found = gelu._BiasGELU.apply(z, bias, approximate == "tanh")
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted, rtol=eps, atol=1e-6)
    of_z, of_bias = torch.autograd.grad(found, (z, bias), gradient)
    expected = torch.autograd.grad(wanted, exact, gradient.double())
    torch.testing.assert_close(of_z.double(), expected[0], rtol=eps, atol=1e-5)
    assert (of_bias - expected[1]).norm() <= 1e-5 * expected[1].norm()
    assert of_bias.dtype == bias.dtype


@pytest.mark.parametrize("compiled", [False, True])
def test_gelu_on_a_gpu_takes_the_kernel_where_it_may(compiled, monkeypatch) -> None:
    pytest.importorskip("triton")
    layer = torch.nn.Linear(32, 80, device="cuda")
    x = torch.randn(4, 32, device="cuda", requires_grad=True)
    found = []
    for there in (True, False):
        torch.compiler.reset()
        monkeypatch.setattr(gelu, "HERE", there)
        call = torch.compile(gelu.gelu) if compiled else gelu.gelu
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = call(layer, x, "none")
        found.append([out, *torch.autograd.grad(out.float().square().sum(), (x, layer.weight, layer.bias))])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() < 1e-2 * other.norm()
    wide = gelu.gelu(layer, x, "none")
    torch.testing.assert_close(wide, F.gelu(layer(x)))
