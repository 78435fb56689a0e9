"""Kernels of a GPU against the same in plain torch; skipped where there is none."""

import copy
import importlib
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from ingot.kernels import bias_gelu, joint_linear
from ingot.model import lm_head as heads
from ingot.model import norms
from ingot.model.config import ModelSettings
from ingot.model.transformer import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "vocab", "padded"), [(1, 11, 64), (300, 50_257, 50_304), (33, 131_072, 131_072)])
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_a_labels_cost_and_its_gradient(dtype, n, vocab, padded, spread) -> None:
    pytest.importorskip("triton")
    from ingot.kernels.triton import nll_

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
    found = bias_gelu._BiasGELU.apply(z, bias, approximate == "tanh")
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
        monkeypatch.setattr(bias_gelu, "HERE", there)
        call = torch.compile(bias_gelu.gelu) if compiled else bias_gelu.gelu
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = call(layer, x, "none")
        found.append([out, *torch.autograd.grad(out.float().square().sum(), (x, layer.weight, layer.bias))])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() < 1e-2 * other.norm()
    wide = bias_gelu.gelu(layer, x, "none")
    torch.testing.assert_close(wide, F.gelu(layer(x)))


def _norm(kind: str, size: int) -> norms.RMSNorm | norms.LayerNorm:
    return norms.RMSNorm(size, 1e-5) if kind == "rms" else norms.LayerNorm(size, 1e-5, bias=kind == "layer")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["layer", "without bias", "rms"])
@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 100, 520), (2, 1024, 768), (1, 40, 2048), (0, 4, 8)])
def test_a_stream_and_its_norm(dtype, kind, shape) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator("cuda").manual_seed(shape[1])
    x, *gradients = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(3))
    x = (2 * x + 0.5).requires_grad_()
    norm = _norm(kind, shape[-1]).cuda()
    for parameter in norm.parameters():
        parameter.data.normal_(generator=generator)
    exact = [y.detach().double().requires_grad_() for y in (x, *norm.parameters())]
    how = (F.layer_norm, F.rms_norm)[kind == "rms"]
    wanted = exact[0] * 1, how(exact[0], shape[-1:], *exact[1:], eps=norm.eps)
    with torch.autocast("cuda", dtype=dtype):
        found = norms.branch(norm, x)
    assert [y.dtype for y in found] == [dtype, dtype]
    assert torch.equal(found[0], x)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=eps, atol=1e-5)
    of_x, *of_norm = torch.autograd.grad(found, (x, *norm.parameters()), gradients)
    expected = torch.autograd.grad(wanted, exact, [g.double() for g in gradients])
    torch.testing.assert_close(of_x.double(), expected[0], rtol=eps, atol=1e-5)
    for one, right in zip(of_norm, expected[1:], strict=True):
        assert (one - right).norm() <= 1e-5 * right.norm()
        assert one.dtype == torch.float32


@pytest.mark.parametrize("sizes", [(128, 128, 128), (256, 128, 128), (768, 768, 768)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 1024)])
def test_matrices_side_by_side(sizes, shape) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator("cuda").manual_seed(shape[1])
    each = [torch.randn(*shape, size, device="cuda", generator=generator).bfloat16() for size in sizes]
    each[1] = each[1].transpose(0, 1).contiguous().transpose(0, 1)
    out, parts = torch.ops.ingot.joined(*each)
    expected = torch.cat(each, -1).flatten(0, 1)
    assert torch.equal(out, expected)
    torch.testing.assert_close(parts.sum(0).double(), expected.double().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_on_a_gpu_takes_the_kernels_where_it_may(compiled, monkeypatch) -> None:
    """Of its gradients: those of streams with their norms, and of queries, keys and values."""
    pytest.importorskip("triton")
    calls = []
    for module, name in ((norms, "norm_backward"), (joint_linear, "joined")):
        real = getattr(kernels := importlib.import_module("ingot.kernels.triton"), name)
        monkeypatch.setattr(kernels, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
        assert module.TRITON
    model = build(ModelSettings(depth=2, width=128, heads=2, context=64, family="gpt2").resolve(100), 1, "cuda")
    ids = torch.randint(100, (4, 64), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    found = []
    for there in (True, False):
        torch.compiler.reset()
        for module in (norms, joint_linear):
            monkeypatch.setattr(module, "TRITON", there)
        model.zero_grad()
        call = copy.copy(model)
        if compiled:
            call.stack = torch.compile(model.stack)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = call(ids)
            out.head.nll(out.hidden.flatten(0, 1), ids.flatten()).mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if not n.endswith("k.bias")})  # its own is 0
    assert Counter(calls) == {"norm_backward": 4, "joined": 2}
    for name, one in found[0].items():
        assert one.dtype == torch.float32
        assert (one - found[1][name]).norm() < 2e-2 * found[1][name].norm(), name
