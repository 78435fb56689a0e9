"""What surrounds a GPU's kernels, where there is none: plain torch in their place, in fp64.

The kernels themselves: `test_kernels.py`.
"""

import pytest
import torch
import torch.nn.functional as F

from ingot.kernels import bias_gelu as gelu
from ingot.kernels import joint_linear as joint
from ingot.model import norms


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    """The operators of `kernels.py` on a CPU. Parts are of few rows, so that there are several."""
    for module in (gelu, joint, norms):
        monkeypatch.setattr(module, "PART", 4)

    def parts(x):
        return torch.stack([part.sum(0) for part in x.flatten(0, -2).split(4)])

    def norm_backward(of_stream, of_branch, x, gain, eps, centred, gains):
        centre = x - x.mean(-1, keepdim=True) if centred else x
        scale = (centre.square().mean(-1, keepdim=True) + eps).rsqrt()
        y, g = centre * scale, of_branch * gain
        along = y * (g * y).mean(-1, keepdim=True)
        level = g.mean(-1, keepdim=True) if centred else 0.0
        return of_stream + (g - level - along) * scale, torch.stack([parts(of_branch * y), parts(of_branch)][:gains], 1)

    def joined(a, b, c):
        together = torch.cat([a, b, c], -1)
        return together.flatten(0, 1), parts(together)

    def bias_gelu(z, bias, tanh):
        return F.gelu(z + bias, approximate="tanh" if tanh else "none")

    def bias_gelu_backward(gradient, z, bias, tanh):
        out = torch.ops.aten.gelu_backward(gradient, z + bias, approximate="tanh" if tanh else "none")
        return out, parts(out)

    torch.compiler.reset()
    with torch.library._scoped_library("ingot", "FRAGMENT") as library:
        for kernel in (norm_backward, joined, bias_gelu, bias_gelu_backward):
            library.impl(kernel.__name__, kernel, "CPU")
        yield


def _drawn(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


def _same(ours, theirs, inputs, compiled):
    """Outputs and gradients of all inputs."""
    ours = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    found, wanted = ours(*inputs), theirs(*inputs)
    weights = [torch.randn_like(y) for y in wanted]
    for outputs in zip(found, wanted, strict=True):
        torch.testing.assert_close(*outputs)
    gradients = [torch.autograd.grad(y, inputs, weights) for y in (found, wanted)]
    for one, right in zip(*gradients, strict=True):
        torch.testing.assert_close(one, right)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["layer", "without bias", "rms"])
def test_a_stream_and_its_norm(kind, compiled) -> None:
    x, gain, bias = _drawn((3, 7, 12), (12,), (12,))
    how, centred = (F.rms_norm, False) if kind == "rms" else (F.layer_norm, True)
    inputs = [x, gain, bias] if kind == "layer" else [x, gain]

    def ours(x, *gains):
        stream, normed = norms._Branch.apply(x + 1, 1e-5, centred, *gains)
        return stream.sin(), normed

    def theirs(x, *gains):
        return (x + 1).sin(), how(x + 1, (12,), *gains, eps=1e-5)

    _same(ours, theirs, inputs, compiled)


@pytest.mark.parametrize("compiled", [False, True])
def test_three_layers_of_one_input(compiled) -> None:
    inputs = _drawn((2, 5, 6), (16, 6), (16,))

    def ours(*inputs):
        q, k, v = joint._Joint.apply(*inputs, 8, 4, 4)
        return q.transpose(0, 1) * 2, k, v.sin()

    def theirs(*inputs):
        q, k, v = F.linear(*inputs).split([8, 4, 4], -1)
        return q.transpose(0, 1) * 2, k, v.sin()

    _same(ours, theirs, inputs, compiled)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_of_a_layer(tanh, compiled) -> None:
    def theirs(z, bias):
        return (F.gelu(z + bias, approximate="tanh" if tanh else "none"),)

    _same(lambda z, bias: (gelu._BiasGELU.apply(z, bias, tanh),), theirs, _drawn((3, 7, 12), (12,)), compiled)
