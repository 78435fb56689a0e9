"""Products in two halves: which, that they are the same products, and that two threads do not share the whole."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ingot.model import halves
from ingot.train import compiling

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "pays"),
    [
        (1024, 768, 768, True),  # GPT-2's width, 1,024 tokens
        (1024, 2048, 768, True),
        (1024, 50_257, 768, True),
        (1024, 768, 2048, False),
        (2048, 768, 768, False),
        (512, 768, 768, False),
        (4096, 384, 384, False),
        (768, 128, 128, False),
    ],
)
def test_which_products(rows: int, inner: int, columns: int, pays: bool) -> None:
    a, b = torch.empty(rows, inner, dtype=torch.bfloat16), torch.empty(inner, columns, dtype=torch.bfloat16)
    assert halves.pays(a, b) is pays
    assert not halves.pays(torch.empty(inner, rows, dtype=torch.bfloat16).T, b), "a weight's gradient"
    assert not halves.pays(a.float(), b.float())


def test_the_halves_are_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "concerned", lambda device: True)
    for rows in (768, 769):
        a, b = _random(rows, 512), _random(512, 768)
        exact = a.double() @ b.double()
        assert halves.product(a, b).shape == exact.shape
        error = (halves.product(a, b).double() - exact).abs().max() / exact.abs().max()
        assert error < 2**-8


def _halved(function: Any, *operands: torch.Tensor) -> tuple[int, float]:
    """Products in the graph of a function after the compiler's pass, and the largest change of what it gives."""
    graph = make_fx(function, tracing_mode="fake")(*operands)
    compiling._in_halves()(graph.graph)
    graph.recompile()
    count = sum(len(graph.graph.find_nodes(op="call_function", target=t)) for t in PRODUCTS)
    expected = function(*operands).float()
    return count, float((graph(*operands).float() - expected).abs().max() / expected.abs().max())


def test_the_compilers_graph() -> None:
    x, w, bias = _random(1025, 512), _random(768, 512), _random(768)
    for function, products in (
        (lambda x, w, b: x @ w.T, 2),
        (lambda x, w, b: torch.addmm(b, x, w.T), 2),
        (lambda x, w, b: torch.addmm(x @ w.T, x, w.T), 3),  # what is added has rows of its own: left whole
        (lambda x, w, b: x.T @ x, 1),  # rows that lie as columns
        (lambda x, w, b: x[:512] @ w.T, 1),
    ):
        count, change = _halved(function, x, w, bias)
        assert count == products
        assert change < 2**-8


def test_a_compiled_model_asks_for_it_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: asked.append(options) or f)
    model = SimpleNamespace(stack=None, parameters=lambda: iter([torch.zeros(1)]))
    for concerned in (True, False):
        monkeypatch.setattr(halves, "concerned", lambda device, concerned=concerned: concerned)
        compiling.compiled(model, "whole")  # pyright: ignore[reportArgumentType]
    assert "post_grad_custom_post_pass" in asked[0]["options"]
    assert "post_grad_custom_post_pass" not in asked[1]["options"]


SHARED = """
import os, torch
torch.set_num_threads(2)
def clocks():
    tasks = os.listdir("/proc/self/task")
    return {t: int(open(f"/proc/self/task/{t}/schedstat").read().split()[0]) for t in tasks}
def threads(rows):
    a, b = (torch.ones(s, dtype=torch.bfloat16) for s in ((rows, 768), (768, 768)))
    a @ b
    before = clocks()
    for _ in range(40):
        a @ b
    spent = [now - before.get(t, 0) for t, now in clocks().items()]
    return sum(spent) / max(spent)
print(threads(1024), threads(512))
"""


@pytest.mark.timing
def test_one_of_two_threads_sits_out() -> None:
    """Where this fails a newer torch shares the whole product too, and `halves.py` is needed no more."""
    if not (
        torch.cpu._is_amx_tile_supported() and (os.cpu_count() or 1) > 1 and os.path.exists("/proc/self/schedstat")
    ):
        pytest.skip("needs matrix tiles, two cores and Linux")
    waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}  # else who waits counts as working
    result = subprocess.run([sys.executable, "-c", SHARED], env=os.environ | waiting, capture_output=True, check=True)
    whole, half = map(float, result.stdout.split())
    assert whole < 1.1 < 1.3 < half
