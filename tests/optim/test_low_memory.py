"""D4: moments in bf16 and in 8 bits: their bytes, their rounding, and what training makes of them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from ingot.core.errors import UserError
from ingot.model.config import ModelSettings
from ingot.model.losses import token_logps
from ingot.model.transformer import Transformer, build
from ingot.optim import low_memory, optimizers
from ingot.optim.low_memory import LowMemoryAdam, nearest_codes, round_stochastically
from ingot.optim.optimizers import Optimizer
from ingot.optim.settings import OptimSettings


def _need(state: str) -> None:
    if state == "8bit":
        pytest.importorskip("torchao")


def _parameters(*shapes: tuple[int, ...]) -> dict[str, torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {f"w{n}": torch.nn.Parameter(torch.randn(shape, generator=draw)) for n, shape in enumerate(shapes)}


def _optimizer(named: dict[str, torch.nn.Parameter], state: str, **table: Any) -> Optimizer:
    return optimizers.build(named, OptimSettings.model_validate({"state": state, **table}), 1e-2)


def _steps(optimizer: Optimizer, named: dict[str, torch.nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last + 1):
        draw = torch.Generator().manual_seed(step)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=draw) * 10.0 ** -(step % 3)
        optimizer.step(1e-2, 1.0, torch.tensor(3.0))


SHAPES = ((64, 100), (4096,), (30,), (33, 125))
"""One with 8 bits, the least with 8 bits, and two too small or of no whole blocks."""


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_D4_bytes_of_a_state(state: str) -> None:
    _need(state)
    named = _parameters(*SHAPES)
    tensors = _optimizer(named, state).tensors()
    found = {
        name: sum(t.nbytes for key, t in tensors.items() if key.startswith(f"{name}.exp")) / p.numel()
        for name, p in named.items()
    }
    eight = 2 * (1 + 4 / 256)
    each = {"fp32": [8] * 4, "bf16": [4] * 4, "8bit": [eight, eight, 8, 8]}[state]
    assert list(found.values()) == pytest.approx(each)


@pytest.mark.parametrize(("state", "limit"), [("bf16", 0.01), ("8bit", 0.05)])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_D4_weights_stay_near_those_of_fp32_moments(kind: str, state: str, limit: float) -> None:
    """Relative to the way that they went. Small ones, and those of no whole blocks, have fp32 moments with 8 bits."""
    _need(state)
    start, exact, low = (_parameters(*SHAPES) for _ in range(3))
    _steps(_optimizer(exact, "fp32", kind=kind), exact, 1, 30)
    optimizer = _optimizer(low, state, kind=kind)
    assert isinstance(optimizer.optimizers[0], LowMemoryAdam)
    _steps(optimizer, low, 1, 30)
    for name, weight in exact.items():
        distance = ((low[name] - weight).norm() / (weight - start[name]).norm()).item()
        is_exact = state == "8bit" and name in ("w2", "w3")
        assert distance == 0 if is_exact else 0 < distance < limit


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_D4_a_resumed_run_is_the_same_to_the_bit(state: str) -> None:
    _need(state)
    through, first, second = (_parameters(*SHAPES) for _ in range(3))
    whole = _optimizer(through, state)
    _steps(whole, through, 1, 6)
    stopped = _optimizer(first, state)
    _steps(stopped, first, 1, 3)
    resumed = _optimizer(second, state)
    for name, tensor in resumed.tensors().items():
        tensor.copy_(stopped.tensors()[name])
    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(first[name])
    torch.manual_seed(99)  # no generator has a part in it
    _steps(resumed, second, 4, 6)
    assert all(torch.equal(second[name], through[name]) for name in through)
    assert all(torch.equal(tensor, whole.tensors()[name]) for name, tensor in resumed.tensors().items())


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_D4_spans_change_no_result(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _need(state)
    one, many = _parameters(*SHAPES), _parameters(*SHAPES)
    _steps(_optimizer(one, state), one, 1, 4)
    monkeypatch.setattr(low_memory, "_SPAN", 1024)
    optimizer = _optimizer(many, state)
    _steps(optimizer, many, 1, 4)
    assert all(torch.equal(many[name], one[name]) for name in one)
    assert {float(t) for name, t in optimizer.tensors().items() if name.endswith("step")} == {4.0}


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_D4_a_skipped_step_changes_nothing(state: str) -> None:
    """Neither where the caller skips it nor where the kernel does, as on a GPU."""
    _need(state)
    named = _parameters(*SHAPES)
    optimizer = _optimizer(named, state)
    _steps(optimizer, named, 1, 2)
    before = {name: t.clone() for name, t in {**optimizer.tensors(), **named}.items()}
    optimizer.step(1e-2, skipped=torch.tensor(True))
    kernel = optimizer.optimizers[0]
    assert isinstance(kernel, LowMemoryAdam)
    kernel.step(found_inf=torch.tensor(1.0))
    assert all(torch.equal(t, before[name]) for name, t in {**optimizer.tensors(), **named}.items())
    kernel.step(found_inf=torch.tensor(0.0))
    assert not torch.equal(named["w0"], before["w0"])


def test_D4_rounding_to_bf16_is_unbiased_and_leaves_bf16_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2000, generator=draw) * 10.0 ** torch.randint(-12, 3, (2000,), generator=draw)
    exact = x.bfloat16()
    assert torch.equal(round_stochastically(exact.float(), torch.tensor(3.0), x), exact)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    assert torch.equal(round_stochastically(special, torch.tensor(1.0), special).float(), special)
    steps = 400
    rounded = torch.stack([round_stochastically(x, torch.tensor(float(s)), x).double() for s in range(steps)])
    spacing = 2.0 ** (x.double().abs().log2().floor() - 7)
    error = (rounded.mean(0) - x) / spacing
    assert (rounded - x).abs().div(spacing).max() < 1, "one of the two neighbours"
    assert error.std() < 1.1 * 0.5 / steps**0.5
    assert abs(float(error.mean())) < 4 * 0.5 / (steps * 2000) ** 0.5


def test_D4_the_nearest_bf16_number_would_never_change() -> None:
    """The second moment of a gradient that has become ten times smaller, with beta2 = 0.999."""
    start = 1 + torch.rand(4096, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    exact, near, random = start, start.bfloat16().float(), start
    for step in range(1, 3001):
        exact, near, random = (0.999 * v + 0.001 * 0.01 for v in (exact, near, random))
        near = near.bfloat16().float()
        random = round_stochastically(random, torch.tensor(float(step)), weights).float()
    assert torch.equal(near, start.bfloat16().float()), "control: it stands still"
    assert start.mean() > 15 * exact.mean()
    assert random.mean() == pytest.approx(float(exact.mean()), rel=0.01)


def test_D4_codes_are_torchaos() -> None:
    """But for ties, which rounding may decide otherwise."""
    quant = pytest.importorskip("torchao.optim.quant_utils")
    draw = torch.Generator().manual_seed(0)
    for signed in (True, False):
        x = torch.randn(1 << 14, generator=draw)
        scaled, _ = quant.scale_tensor(x if signed else x.square(), 256)
        table = low_memory._table(signed, torch.device("cpu"))
        theirs, ours = quant.quantize_8bit_with_qmap(scaled, table), nearest_codes(scaled, table)
        assert (theirs != ours).float().mean() < 1e-3
        best = (scaled[:, None] - table).abs().min(1).values
        torch.testing.assert_close((scaled - table[ours.long()]).abs(), best)


def test_D4_without_torchao_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    low_memory._torchao.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"needs the extra torchao; pip install 'ingot\[torchao\]'"):
        _optimizer(_parameters((4, 4)), "8bit")


@pytest.mark.parametrize("kind", ["galore", "GaLore", "lomo", "adafactor", "adamw-8bit", "adamw8bit"])
def test_D4_other_low_memory_optimizers_are_refused_with_what_to_take(kind: str) -> None:
    with pytest.raises(ValidationError, match=f"found kind = '{kind}', .*kind = 'adamw' with state = '8bit'"):
        OptimSettings.model_validate({"kind": kind})


@pytest.mark.parametrize("kind", ["muon", "lion", "sgd"])
def test_D4_other_kinds_have_no_such_state(kind: str) -> None:
    with pytest.raises(ValidationError, match=r"found state with kind = .*\('adamw', 'adam'\)"):
        OptimSettings.model_validate({"kind": kind, "lr": 0.1, "state": "bf16"})


# -- training ----------------------------------------------------------------------------------------------------------

CONTEXT, ROWS = 32, 16


def _text() -> Tensor:
    """The sources of a module of the standard library, as bytes below 128."""
    return torch.tensor([b for b in Path(json.decoder.__file__).read_bytes() if b < 128])


def _loss(model: Transformer, ids_BL: Tensor) -> Tensor:
    out = model(ids_BL[:, :-1])
    return -token_logps(out.hidden, out.head, ids_BL[:, 1:]).mean()


def _final_loss(steps: int = 120, **table: Any) -> float:
    text, draw = _text(), torch.Generator().manual_seed(1)
    held_out = text[-33 * CONTEXT :].unfold(0, CONTEXT + 1, CONTEXT)
    model = build(ModelSettings(depth=1, width=64, heads=2, context=CONTEXT, tied=True).resolve(128), seed=1)
    named = dict(model.named_parameters())
    optimizer = optimizers.build(named, OptimSettings.model_validate(table), 3e-3)
    for step in range(steps):
        starts = torch.randint(len(text) - 34 * CONTEXT, (ROWS, 1), generator=draw)
        optimizer.clear()
        _loss(model, text[starts + torch.arange(CONTEXT + 1)]).backward()
        optimizer.step(table.get("lr", 3e-3) * (1 - step / steps))
    with torch.no_grad():
        return float(_loss(model, held_out))


@pytest.mark.slow
def test_D4_low_memory_moments_train_as_well_as_fp32() -> None:
    """Within 1 % of AdamW. Control: no moments at all."""
    pytest.importorskip("torchao")
    adamw = _final_loss()
    assert _final_loss(state="bf16") == pytest.approx(adamw, rel=0.01)
    assert _final_loss(state="8bit") == pytest.approx(adamw, rel=0.01)
    assert _final_loss(kind="sgd", momentum=0.0, lr=0.3) > 1.1 * adamw
