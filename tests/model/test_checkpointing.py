"""D9: activations that are computed again give the same gradients to the bit, in every mode."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.model import checkpointing, lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.config import Checkpointing, ModelSettings, segment_blocks
from ingot.model.transformer import Block, Transformer, build

V, T = 50, 40
MODES: list[Checkpointing] = ["full", "sqrt", 3, "selective"]
TAPS = frozenset({"hidden.0", "hidden.1", "hidden.4", "attention.1", "value.2"})
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "documents": {"documents": True},
    "dropout": {"model": {"family": "gpt2", "dropout": 0.1}},
    "lora": {"adapter": AdapterSettings(rank=2, dropout=0.2)},
    "dora": {"adapter": AdapterSettings(kind="dora", rank=2), "documents": True},
    "taps": {"taps": TAPS},
    "window, qk_norm": {"model": {"family": "qwen3", "window": 9}},
}


def _model(mode: Checkpointing, model: dict[str, Any], adapter: AdapterSettings | None) -> Transformer:
    shape = {"depth": 4, "width": 32, "heads": 2, "ffn": 64, "context": T, **model}
    made = build(ModelSettings(**shape).resolve(V), seed=0).train()
    if adapter:
        lora.add_adapters(made, adapter, seed=1)
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    made.checkpointing = mode
    return made


def _gradients(
    mode: Checkpointing,
    bf16: bool = False,
    documents: bool = False,
    taps: frozenset[str] = frozenset(),
    backend: Any = None,
    model: dict[str, Any] | None = None,
    adapter: AdapterSettings | None = None,
) -> dict[str, Tensor]:
    """The gradients of all trained parameters; the loss also reads the taps."""
    made = _model(mode, model or {}, adapter)
    made.backend = backend or made.backend
    draw = torch.Generator().manual_seed(2)
    ids_BT = torch.randint(V, (3, T), generator=draw)
    documents_BT = (torch.arange(T) // 11).repeat(3, 1) if documents else None
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
        out = made(ids_BT, documents_BT=documents_BT, taps=taps)
        loss = out.head.nll(out.hidden.flatten(0, 1), ids_BT.flatten()).sum()
    for tensor in out.taps.values():
        loss = loss + tensor.float().square().sum()
    loss.backward()
    return {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_D9_gradients_are_the_same_to_the_bit(name: str, bf16: bool) -> None:
    case = CASES[name]
    stored = _gradients("none", bf16, **case)
    assert all(gradient.any() for gradient in stored.values())
    assert [mode for mode in MODES if not _same(_gradients(mode, bf16, **case), stored)] == []


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_D9_gradients_of_the_cpus_kernels_are_the_same_to_the_bit(bf16: bool) -> None:
    cpu_blocks = pytest.importorskip("ingot.backends.cpu_blocks")
    if not pytest.importorskip("ingot.kernels.cpu_train").available(torch.bfloat16 if bf16 else torch.float32):
        pytest.skip("no such vectors, or no C++ compiler")
    case = {"documents": True, "backend": cpu_blocks.CPUBackend()}
    stored = _gradients("none", bf16, **case)
    assert [mode for mode in MODES if not _same(_gradients(mode, bf16, **case), stored)] == []


def test_D9_control_dropout_that_draws_again_gives_other_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import checkpoint

    stored, original = _gradients("none", **CASES["dropout"]), checkpoint.checkpoint

    def forgetful(*args: Any, **options: Any) -> Any:
        return original(*args, **{**options, "preserve_rng_state": False})

    monkeypatch.setattr(checkpoint, "checkpoint", forgetful)
    assert not _same(_gradients("full", **CASES["dropout"]), stored)


@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("full", 2), ("sqrt", 2), (3, 2), ("selective", 2)])
def test_D9_each_block_is_computed_once_more(mode: Checkpointing, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all without gradients, such as in an evaluation."""
    calls: list[Block] = []
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, *args: (calls.append(self), forward(self, *args))[1])
    _gradients(mode)
    assert len(calls) == 4 * times
    calls.clear()
    with torch.no_grad():
        _model(mode, {}, None)(torch.zeros(1, T, dtype=torch.long))
    assert len(calls) == 4


@pytest.mark.parametrize("random", [False, True])
def test_D9_selective_computes_no_matrix_product_again(random: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: `full` does. With dropout, attention is computed again, so that it draws its numbers again."""
    shape = {"dropout": 0.1 * random}
    products = _products("none", shape)
    assert _products("selective", shape) == products
    assert _products("full", shape) == products + 4 * (
        7 if random else 6
    )  # without a mask of dropout, none reads the last one
    kept: list[str] = []
    monkeypatch.setattr(checkpointing, "_operations", lambda names, prefix="": kept.extend(names) or [])
    checkpointing.checkpointed(lambda x: x, _model("selective", shape, None), selective=True)
    assert ("flash_attention" in kept) == (not random)


class _Products(TorchDispatchMode):
    """The number of matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def _products(mode: Checkpointing, shape: dict[str, Any]) -> int:
    with _Products() as products:
        _gradients(mode, model=shape)
    return products.count


def test_D9_source_error_one_segment_a_block_is_not_the_square_root() -> None:
    """002 checkpoints every block and calls it O(sqrt L); stored are L inputs. With sqrt(L) blocks they are sqrt(L)."""
    stored = {"full": 64 // segment_blocks("full", 64), "sqrt": 64 // segment_blocks("sqrt", 64)}
    assert stored == {"full": 64, "sqrt": 8}
    assert [segment_blocks("sqrt", n) for n in (1, 2, 3, 12, 96)] == [1, 1, 2, 3, 10]
    modes: list[Checkpointing] = ["none", "full", "selective", 4, 99]
    assert [segment_blocks(mode, 12) for mode in modes] == [12, 1, 1, 4, 12]
