"""Training with the CPU's kernels: the steps of PyTorch, and a model compared with itself differs by nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.backends.cpu_blocks import CPUBackend
from ingot.data.batches import Batch
from ingot.kernels import cpu_train
from ingot.model.losses import token_logps
from ingot.train.engine import Engine
from tests.backends.training import engine, rows
from tests.exactness import FLOOR, failures

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
each_precision = pytest.mark.parametrize(
    "precision",
    [
        pytest.param(name, marks=pytest.mark.skipif(not cpu_train.available(dtype), reason="no kernels here"))
        for name, dtype in DTYPES.items()
    ],
)


def _gradients(trained: Engine, batch: Batch) -> dict[str, Tensor]:
    trained.gradients(batch)
    return {name: p.grad.clone() for name, p in trained.trained.items() if p.grad is not None}


@each_precision
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("micro", [1, 3, 8])
def test_gradients_of_micro_batches_are_as_near_to_fp64_as_torchs(precision: str, tied: bool, micro: int) -> None:
    batch = rows(0, (8, 24), documents=3, unlabelled=0.4)
    found = _gradients(engine(CPUBackend(), precision=precision, micro=micro, tied=tied), batch)
    torchs = _gradients(engine(precision=precision, micro=micro, tied=tied), batch)
    exact = _gradients(engine(precision="fp64", micro=micro, tied=tied), batch)
    assert failures(found, torchs, exact, FLOOR[DTYPES[precision]]) == []


@each_precision
def test_steps_and_evaluations_are_those_of_torch(precision: str) -> None:
    near = 0.01 if precision == "bf16" else 1e-5
    plain, ours = engine(precision=precision), engine(CPUBackend(), precision=precision)
    first = None
    for step in range(6):
        batch = rows(step % 2, unlabelled=0.2)
        expected, found = plain.step(batch), ours.step(batch)
        first = first or float(found.loss)
        assert float(found.loss) == pytest.approx(float(expected.loss), abs=near)
        assert float(found.grad_norm) == pytest.approx(float(expected.grad_norm), rel=5 * near)
    assert float(found.loss) < first - 10 * near, "nothing was learned, so the comparison shows nothing"
    assert ours.evaluate([batch])[0] == pytest.approx(plain.evaluate([batch])[0], abs=near)
    shorter = rows(9, (5, 11))  # another shape
    assert ours.evaluate([shorter])[0] == pytest.approx(plain.evaluate([shorter])[0], abs=near)


@each_precision
def test_a_reference_that_equals_the_trained_model_gives_the_same_bits(precision: str) -> None:
    """The first loss of DPO is ln 2, and the first KL is 0."""
    batch, ours = rows(0, unlabelled=0.3), engine(CPUBackend(), precision=precision, micro=2)
    reference = copy.deepcopy(ours.model).requires_grad_(False).eval()

    def logps(out: Any, part: Batch) -> Tensor:
        return token_logps(out.hidden, out.head, part.labels_BT)

    trained = []
    for micro in batch.micro_batches(2):
        part = micro.to("cpu")
        with ours.execution.forward():
            trained.append(logps(ours.runner.forward(ours.model, part), part))
    assert trained[0].requires_grad
    assert torch.equal(torch.cat(trained), ours.context(1).over(ours.model, batch, logps))
    assert torch.equal(torch.cat(trained), ours.context(1).over(reference, batch, logps))
    plain = engine(precision=precision, micro=2)
    others = plain.context(1).over(plain.model, batch, logps)
    assert not torch.equal(torch.cat(trained), others), "a control: torch's sums have another order"
