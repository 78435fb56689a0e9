"""The operations of generation one by one, PyTorch's and the CPU's: what the decoder relies on beside the numbers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.infer.ops import TorchOps, effective_weight
from ingot.model.norms import LayerNorm, RMSNorm
from tests.exactness import draw, error
from tests.infer.cpu import cpu_ops, cpu_params

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
NEAR = {BF16: 1e-2, FP32: 2e-6, FP64: 1e-14}


each_ops = pytest.mark.parametrize(
    "ops",
    [
        pytest.param(TorchOps(FP32, FP32), id="torch, fp32"),
        pytest.param(TorchOps(BF16, FP32), id="torch, bf16"),
        pytest.param(TorchOps(FP64, FP64), id="torch, fp64"),
        *cpu_params(lambda dtype: (cpu_ops(dtype),)),
    ],
)


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.inference_mode():
        yield


def _layers(outputs: tuple[int, ...], bias: bool, inputs: int = 151) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(inputs, out, bias) for out in outputs]


@each_ops
@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_are_one_product(bias: bool, ops: TorchOps) -> None:
    layers = _layers((50, 7), bias)
    both, turned = ops.fused_linear(layers), ops.fused_linear(layers, torch.arange(57).flip(0))
    for rows in (1, 6, 33):
        x_MI = draw(rows, 151).to(ops.dtype)
        parts = [F.linear(x_MI.double(), *(p.double() for p in layer.parameters())) for layer in layers]
        exact = torch.cat(parts, dim=1)
        assert error(both(x_MI), exact) < NEAR[ops.dtype]
        assert error(turned(x_MI), exact.flip(1)) < NEAR[ops.dtype]
        onto = torch.ones(rows, 57, dtype=ops.stream)
        assert both(x_MI, onto) is onto
        assert error(onto, exact + 1) < NEAR[ops.dtype]


@each_ops
def test_layers_with_and_without_a_bias_do_not_mix(ops: TorchOps) -> None:
    some, none = _layers((8,), True) + _layers((8,), False)
    for mix in (lambda: ops.fused_linear([some, none]), lambda: ops.swiglu(some, none)):
        with pytest.raises(AssertionError, match="with and without a bias"):
            mix()


@each_ops
@pytest.mark.parametrize("bias", [True, False])
def test_feed_forwards(bias: bool, ops: TorchOps) -> None:
    gate, up = _layers((40, 40), bias)
    x_MI = draw(5, 151).to(ops.dtype)
    inner = [F.linear(x_MI.double(), *(p.double() for p in layer.parameters())) for layer in (gate, up)]
    assert error(ops.swiglu(gate, up)(x_MI), F.silu(inner[0]) * inner[1]) < 2 * NEAR[ops.dtype]
    for approximate in ("none", "tanh"):
        assert error(ops.gelu(up, approximate)(x_MI), F.gelu(inner[1], approximate=approximate)) < 2 * NEAR[ops.dtype]


@each_ops
@pytest.mark.parametrize("kind", ["rms", "layer", "layer without bias"])
def test_norms(kind: str, ops: TorchOps) -> None:
    """Of the stream, and of some heads in place with their features in another order."""
    norm = RMSNorm(48, 1e-5) if kind == "rms" else LayerNorm(48, 1e-5, bias=kind == "layer")
    for seed, parameter in enumerate(norm.parameters()):
        parameter.copy_(draw(48, seed=seed))
    x = 3 * draw(2, 5, 7, 48).to(ops.stream)
    exact = norm.double()(x.double())
    norm = norm.to(ops.stream)
    assert error(ops.norm(norm)(x), exact) < NEAR[ops.dtype]
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    given = x[..., order].contiguous()
    found = given.clone()
    ops.head_norm(norm, order)(found, slice(2, 5))
    assert error(found[:, :, 2:5], exact[:, :, 2:5][..., order]) < 2e-6, "in fp32 whatever the products are in"
    assert torch.equal(found[:, :, :2], given[:, :, :2])
    assert torch.equal(found[:, :, 5:], given[:, :, 5:])


@each_ops
def test_the_greedy_choice_takes_the_lowest_of_equal_ids_and_tells_what_is_not_a_number(ops: TorchOps) -> None:
    """Ids from `allowed` on are never chosen, but have their part in the probability."""
    logits = draw(5, 900).to(ops.dtype)
    logits[0, [7, 80, 450]], logits[1], logits[2, 3], logits[3, 899] = 99, -2, torch.nan, 99
    ids, logps = ops.argmax(logits, 600)
    assert (ids.dtype, ids[0], ids[1]) == (torch.int64, 7, 0)
    assert logps[2].isnan()
    exact = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logps.double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert ids[3] == logits[3, :600].float().argmax()
    assert logps[3] < -50
    assert ops.argmax(logits, 900)[0][3] == 899


def test_a_recorded_slot_equals_the_newest_one() -> None:
    """With the slot's number on the device all slots that have a bias are read, later ones hidden."""
    ops = TorchOps(FP32, FP32)
    keys, values = draw(3, 2, 20, 8), draw(3, 2, 20, 8, seed=1)
    qkv, angle = draw(3, 8, 8, seed=2), draw(3, 4, seed=3)
    rope = torch.complex(angle.cos(), angle.sin())
    tables = [keys.clone(), values.clone()], [keys.clone(), values.clone()]
    plain = ops.attend(qkv.clone(), rope, *tables[0], None, 12)
    bias = torch.zeros(3, 16).index_fill(1, torch.arange(12, 16), -torch.inf)
    recorded = ops.attend(qkv.clone(), rope, *tables[1], bias, 99, torch.tensor([11]))
    torch.testing.assert_close(recorded, plain, rtol=1e-6, atol=1e-6)
    for one, other in zip(*tables, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one[:, :, 11], keys[:, :, 11])


def test_torchs_operations_are_not_recorded() -> None:
    ops = TorchOps(FP32, FP32)
    assert not ops.records
    with pytest.raises(RuntimeError, match="record"):
        ops.record(lambda x: x, [torch.zeros(1)])


def test_a_layer_of_an_unknown_kind_is_refused() -> None:
    """Its output may be more than a product with its weight."""

    class Twice(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    with pytest.raises(AssertionError, match="Twice"):
        effective_weight(Twice(3, 3))
