"""What the plan says the CPU's kernels keep, against what they keep."""

import pytest
import torch

from ingot.backends.cpu_blocks import CPUBackend
from ingot.backends.estimate import cpu_activations, why_not
from ingot.kernels import cpu_train
from ingot.model.config import MAX_LOGITS, ModelSettings
from ingot.model.transformer import build
from tests.plan.test_engine_memory import ROWS, SHAPES


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["llama", "grouped", "isolated"])
def test_f2_activations_are_what_the_cpu_kernels_keep(name: str, precision: str) -> None:
    """Each block for its backward pass, and the head."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    if not cpu_train.available(dtype):
        pytest.skip("no such vectors, or no C++ compiler")
    config = SHAPES[name].resolve(65)  # rows of logits are padded
    ids, documents = torch.randint(65, (ROWS, config.context)), torch.arange(config.context).repeat(ROWS, 1) // 20
    model = build(config, seed=0)
    model.backend = CPUBackend()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        out = model(ids, documents_BT=documents if name == "isolated" else None)
        nll = out.head.nll(out.hidden.flatten(0, 1), ids.flatten()).sum()
    ((_, *blocks),), last = out.hidden.grad_fn.saved  # the first of a segment is its input
    (head, _), *_ = nll.grad_fn.next_functions
    hidden, _, _, excess = head.saved_tensors
    saved = [last, *(tensor for block in blocks for tensor in block), hidden, excess]
    sizes = {(storage := t.untyped_storage()).data_ptr(): storage.nbytes() for t in saved}
    planned = cpu_activations(config, ROWS, precision, MAX_LOGITS["cpu"])
    assert planned is not None
    assert planned.layers + planned.logits == sum(sizes.values())
    assert planned.scores == planned.casts == 0


@pytest.mark.parametrize(
    ("change", "precision", "adapter", "why"),
    [
        ({}, "fp32", False, None),
        ({}, "fp32", True, "the C++ kernels do not train adapters"),
        ({"dropout": 0.1}, "fp32", False, "the C++ kernels have no dropout"),
        ({"norm": "layer"}, "fp32", False, "RMSNorm and SwiGLU"),
        ({}, "fp64", False, "do not compute in fp64"),
    ],
    ids=["fast", "adapter", "dropout", "LayerNorm", "fp64"],
)
def test_what_the_kernels_do_not_train_is_named(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, object], precision: str, adapter: bool, why: str | None
) -> None:
    monkeypatch.setattr("ingot.backends.estimate._has_instructions", lambda precision: True)
    shape = ModelSettings(depth=2, width=64, heads=4).resolve(50).model_copy(update=change)
    assert (why_not(shape, precision, adapter) is None) == (why is None)
    assert (why or "") in (why_not(shape, precision, adapter) or "")
    monkeypatch.setattr("ingot.backends.estimate._has_instructions", lambda precision: False)
    assert why_not(shape, precision, adapter)
