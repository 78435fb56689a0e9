"""Kernels of generation over a table of shapes: as near to float64 as PyTorch is in the same precision.

Those for other instruction sets are tested over a few of the shapes.
"""

import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.kernels import build, cpu_decode
from tests.exactness import FLOOR, draw, error

BF16, FP32 = torch.bfloat16, torch.float32
slow = pytest.mark.slow
ROUNDING = {BF16: 2**-8, FP32: 2**-23}
"""The largest relative error of a number that is rounded to the dtype."""
FEW = ((1, 3, 5), (7, 33, 50), (33, 64, 150))
HAS = {"x86-64-v4": torch.cpu._is_avx512_supported, "x86-64-v3": torch.cpu._is_avx2_supported}
each_dtype = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])


def _forget() -> None:
    cpu_decode._built.clear()
    cpu_decode._function.cache_clear()
    cpu_decode._constant.cache_clear()


def _available() -> bool:
    return cpu_decode.available(torch.device("cpu"), FP32, FP32)


@pytest.fixture
def kernels() -> None:
    """As they are built for this CPU."""
    if not _available():
        pytest.skip("no C++ compiler")


@pytest.fixture(params=["x86-64-v3", pytest.param("x86-64-v4", marks=slow), pytest.param("x86-64", marks=slow)])
def other_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As they are built with AVX2, with AVX-512 without bf16, and with SSE alone."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not HAS.get(request.param, lambda: True)():
        pytest.skip("another CPU")
    flags = tuple(f"-march={request.param}" if flag.startswith("-march") else flag for flag in build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", flags)
    _forget()
    if cpu_decode._library() is None:
        pytest.skip("no C++ compiler")
    yield
    _forget()


def _near(found: Tensor, torchs: Tensor, exact: Tensor, floor: float, scale: float = 0.0) -> None:
    """As near to float64 as 1.3 times PyTorch, and `floor`; relative to `scale` where sums may cancel to less."""
    own, of_torch = error(found, exact, scale), error(torchs, exact, scale)
    assert own <= 1.3 * of_torch + floor, f"error {own:.3g}, of torch {of_torch:.3g}"


def _from_mean(rows: int, size: int) -> Tensor:
    """Rows whose mean is large beside what is left without it."""
    return 3 * draw(rows, size) + 100


# -- products and their epilogues --------------------------------------------------------------------------------------

SHAPES = [(inputs, outputs) for inputs in (1, 3, 16, 33, 64, 150) for outputs in (1, 8, 33, 65, 150, 1000)]
"""Inputs, outputs."""
LARGE = [(260, 256, 270), (300, 800, 290), (520, 1700, 260), (1100, 128, 290), (1100, 320, 200)]
"""More rows than pass a panel at once, and panels larger than a core's second cache."""


def _product(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """With and without a bias, from rows of a wider tensor, and added to what is there."""
    x, weight, bias = draw(rows, inputs, dtype=dtype), draw(outputs, inputs, seed=1, dtype=dtype), draw(outputs, seed=2)
    panels, exact, torchs = cpu_decode.pack(weight), x.double() @ weight.double().T, x.float() @ weight.float().T
    floor, scale = 2e-7 * inputs**0.5, (rows * inputs * outputs) ** 0.5
    found = cpu_decode.linear(panels, outputs, None, x)
    assert found.dtype == FP32
    _near(found, torchs, exact, floor, scale)
    onto = draw(rows, outputs, seed=3)
    exact, torchs = exact + bias.double() + onto.double(), torchs + bias + onto
    found = cpu_decode.linear(panels, outputs, bias, x.repeat(1, 2)[:, :inputs], onto)
    assert found is onto
    _near(found, torchs, exact, floor, scale)


def _swiglu(rows: int, inputs: int, features: int, dtype: torch.dtype) -> None:
    x, gate = draw(rows, inputs, dtype=dtype), (3 * draw(features, inputs) / inputs**0.5).to(dtype)
    up, bias = (draw(features, inputs, seed=1) / inputs**0.5).to(dtype), draw(2, features, seed=2)
    panels = cpu_decode.pack_gated(gate, up)
    for some in (None, bias):

        def by_torch(wide: torch.dtype, some: Tensor | None = some) -> Tensor:
            g, u = (
                F.linear(x.to(wide), weight.to(wide), None if some is None else some[i].to(wide))
                for i, weight in enumerate((gate, up))
            )
            return (F.silu(g) * u).to(dtype if wide == FP32 else wide)

        found = cpu_decode.swiglu(panels, features, None if some is None else some.flatten(), x)
        assert found.dtype == dtype
        _near(found, by_torch(FP32), by_torch(torch.float64), 1e-6 * inputs**0.5, (rows * features) ** 0.5)


def _gelu(rows: int, inputs: int, features: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, inputs, dtype=dtype), (3 * draw(features, inputs, seed=1) / inputs**0.5).to(dtype)
    panels = cpu_decode.pack(weight)
    for tanh in (False, True):
        for bias in (None, draw(features, seed=2)):

            def by_torch(wide: torch.dtype, tanh: bool = tanh, bias: Tensor | None = bias) -> Tensor:
                inner = F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
                return F.gelu(inner, approximate="tanh" if tanh else "none").to(dtype if wide == FP32 else wide)

            found = cpu_decode.gelu(panels, features, bias, tanh, x)
            assert found.dtype == dtype
            _near(found, by_torch(FP32), by_torch(torch.float64), 1e-6 * inputs**0.5, (rows * features) ** 0.5)


@each_dtype
@pytest.mark.parametrize("operation", [_product, _swiglu, _gelu])
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 33, *(pytest.param(rows, marks=slow) for rows in (7, 9, 150))])
def test_products(kernels: None, operation: Any, rows: int, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        operation(rows, *shape, dtype)


@slow
@each_dtype
@pytest.mark.parametrize("operation", [_product, _swiglu, _gelu])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_products(kernels: None, operation: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    operation(*shape, dtype)


def test_a_control_a_weight_less_is_noticed(kernels: None) -> None:
    """The comparison fails for the smallest mistake."""
    x, weight = draw(7, 33), draw(50, 33, seed=1)
    wrong = weight.clone()
    wrong[49, 32] = 0
    exact, torchs = x.double() @ weight.double().T, x @ weight.T
    _near(cpu_decode.linear(cpu_decode.pack(weight), 50, None, x), torchs, exact, 1e-6)
    with pytest.raises(AssertionError, match="error"):
        _near(cpu_decode.linear(cpu_decode.pack(wrong), 50, None, x), torchs, exact, 1e-6)


# -- norms -------------------------------------------------------------------------------------------------------------


def _norms(rows: int, size: int, dtype: torch.dtype) -> None:
    x, gain, bias = 3 * draw(rows, size), draw(size, seed=1), draw(size, seed=2)

    def rms(wide: torch.dtype, x: Tensor = x) -> Tensor:
        return F.rms_norm(x.to(wide), (size,), gain.to(wide), 1e-5)

    found = cpu_decode.rms_norm(gain, 1e-5, dtype, x)
    assert found.dtype == dtype
    _near(found, rms(FP32).to(dtype), rms(torch.float64), 3e-7)
    repeated = cpu_decode.rms_norm(gain, 1e-5, FP32, x.expand(2, -1, -1))
    _near(repeated, rms(FP32).expand(2, -1, -1), rms(torch.float64).expand(2, -1, -1), 3e-7)

    x = _from_mean(rows, size)
    for some in (None, bias):
        by_torch = [
            F.layer_norm(x.to(wide), (size,), gain.to(wide), None if some is None else some.to(wide), 1e-5)
            for wide in (FP32, torch.float64)
        ]
        found = cpu_decode.layer_norm(gain, some, 1e-5, dtype, x)
        assert found.dtype == dtype
        if size > 1:  # of one number nothing is left but the bias
            _near(found, by_torch[0].to(dtype), by_torch[1], 3e-5)  # of numbers near 100


def _norm_heads(size: int) -> None:
    qkv, gain = 3 * draw(2, 5, 7, size), draw(size, seed=1)
    given = qkv.clone()
    exact = F.rms_norm(given[:, :, 2:5].double(), (size,), gain.double(), 1e-5)
    cpu_decode.norm_heads(gain, 1e-5, qkv, slice(2, 5))
    assert error(qkv[:, :, 2:5], exact) < 5e-7
    assert torch.equal(qkv[:, :, :2], given[:, :, :2])
    assert torch.equal(qkv[:, :, 5:], given[:, :, 5:])


@each_dtype
@pytest.mark.parametrize("rows", [0, 1, 5, 600])
def test_norms(kernels: None, rows: int, dtype: torch.dtype) -> None:
    for size in (1, 3, 8, 16, 33, 64, 150):
        _norms(rows, size, dtype)


def test_the_norm_of_some_heads_leaves_the_others(kernels: None) -> None:
    for size in (1, 3, 8, 16, 33, 64, 150):
        _norm_heads(size)


# -- attention ---------------------------------------------------------------------------------------------------------

HEADS = [(4, 4, 64), (6, 2, 8), (4, 1, 33), (2, 2, 130)]
"""H, K, D; an odd D is not rotated."""


def _rotation(*shape: int) -> Tensor:
    angle = 9 * draw(*shape)
    return torch.complex(angle.cos(), angle.sin())


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """All heads of a position rotated by its complex numbers."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation.unsqueeze(-2)).flatten(-2)


def _mix(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention over the stored keys and values in float64, and by PyTorch in their dtype; ... x H x T x D."""
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), bias.double())
    return F.scaled_dot_product_attention(q.to(dtype), k, v, bias.to(dtype)), exact


def _attend(rows: int, slots: int, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    (H, K, D), spare = heads, 9
    qkv, rotation = draw(rows, H + 2 * K, D), None
    q, k, v = qkv.split((H, K, K), dim=1)
    if D % 2 == 0:
        rotation = _rotation(rows, D // 2)
        q, k = _rotated(q, rotation), _rotated(k, rotation)
    keys, values = (draw(rows, K, slots + spare, D, seed=seed, dtype=dtype) for seed in (1, 2))
    hidden = torch.rand(rows, slots + spare, generator=torch.Generator().manual_seed(slots)) < 0.3
    bias = torch.zeros(rows, slots + spare).masked_fill_(hidden, -torch.inf)[:, :slots]
    bias[:, -1] = 0
    seen = [
        torch.cat((table[:, :, : slots - 1], new[:, :, None].to(dtype)), 2).repeat_interleave(H // K, 1)
        for table, new in ((keys, k), (values, v))
    ]
    keys[:, :, slots - 1 :], values[:, :, slots - 1 :] = torch.nan, torch.nan
    for some in (None, bias):
        added = torch.zeros(rows, slots) if some is None else some
        torchs, exact = (x.flatten(1) for x in _mix(q[:, :, None], *seen, added[:, None, None], dtype))
        found = cpu_decode.attend(qkv, rotation, keys, values, some, slots)
        assert found.dtype == dtype
        _near(found, torchs, exact, 2 * FLOOR[dtype])
    for table, new in ((keys, k), (values, v)):
        assert error(table[:, :, slots - 1], new) <= ROUNDING[dtype]
        assert table[:, :, slots:].isnan().all(), "a later slot was written"


def _attend_prompts(
    prompts: int, length: int, window: int | None, heads: tuple[int, int, int], threads: int, dtype: torch.dtype
) -> None:
    (H, K, D), samples, slots = heads, 2, length + 9
    qkv, rotation = draw(prompts, length, H + 2 * K, D), None
    q, k, v = qkv.split((H, K, K), dim=2)
    if D % 2 == 0:
        rotation = _rotation(length, D // 2)
        q, k = _rotated(q, rotation), _rotated(k, rotation)
    keys, values = (torch.full((prompts * samples, K, slots, D), torch.nan, dtype=dtype) for _ in "kv")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = cpu_decode.attend_prompts(qkv, rotation, keys, values, window, samples)
    finally:
        torch.set_num_threads(before)
    assert found.dtype == dtype
    for table, new in ((keys, k), (values, v)):
        assert error(table[:, :, :length], new.transpose(1, 2).repeat_interleave(samples, 0)) <= ROUNDING[dtype]
        assert table[:, :, length:].isnan().all(), "a later slot was written"
    age = torch.arange(length)[:, None] - torch.arange(length)
    bias = torch.zeros(length, length).masked_fill((age < 0) | (age >= (window or length)), -torch.inf)
    stored = [x.to(dtype).repeat_interleave(H // K, dim=2).transpose(1, 2) for x in (k, v)]
    torchs, exact = (x.transpose(1, 2).flatten(2) for x in _mix(q.transpose(1, 2), *stored, bias, dtype))
    _near(found, torchs, exact, 2 * FLOOR[dtype])


@each_dtype
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention(kernels: None, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    for rows in (1, 3):
        for slots in (1, 2, 15, 100):
            _attend(rows, slots, heads, dtype)


@each_dtype
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("prompts", "threads"), [(2, 1), pytest.param(1, 3, marks=slow)])
def test_attention_of_prompts(
    kernels: None, prompts: int, threads: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Three threads cannot share the heads of keys evenly: a head's queries are tasks of their own."""
    for length, window in [(1, None), (7, 3), (49, None), (97, 1), (150, 60), (150, None)]:
        _attend_prompts(prompts, length, window, heads, threads, dtype)


# -- the greedy choice -------------------------------------------------------------------------------------------------


def _argmax(vocab: int, allowed: int, dtype: torch.dtype) -> None:
    """Of equal logits the lowest id; the log-probability is that among the whole vocabulary."""
    logits = (3 * draw(4, vocab)).to(dtype)
    logits[0, -1], logits[1], logits[2] = 99, -3, logits[2] - 1000
    ids, logps = cpu_decode.argmax(logits, allowed)
    assert ids.tolist() == logits[:, :allowed].float().numpy().argmax(-1).tolist()
    assert ids[1] == 0
    exact = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logps.double(), exact, rtol=2e-6, atol=2e-6)


@each_dtype
@pytest.mark.parametrize("vocab", [1, 5, 64, 1000, 5003])
def test_the_greedy_choice(kernels: None, vocab: int, dtype: torch.dtype) -> None:
    for allowed in {1, max(1, vocab // 3), vocab}:
        _argmax(vocab, allowed, dtype)


# -- extreme numbers ---------------------------------------------------------------------------------------------------


def _extremes(dtype: torch.dtype) -> None:
    """NaN and infinities stay what they are, in their own rows and outputs."""
    x, weight = torch.tensor([[1.0, 2.0, 3.0], [torch.nan, 0.0, 0.0]]), torch.eye(3)
    found = cpu_decode.linear(cpu_decode.pack(weight.to(dtype)), 3, None, x.to(dtype))
    assert found[0].tolist() == [1, 2, 3], "zeros that fill a pair or a panel met a neighbour's NaN"
    assert found[1].isnan().all()
    x, weight = torch.ones(300, 300, dtype=dtype), torch.ones(300, 300, dtype=dtype)
    x[7, 5] = weight[9, 299] = torch.nan
    x[11, 3] = torch.inf
    found = cpu_decode.linear(cpu_decode.pack(weight), 300, None, x)
    assert found[7].isnan().all()
    assert found[:, 9].isnan().all()
    assert found.isnan().sum() == 599
    assert found.isinf().sum() == 299
    assert found[11].isinf().sum() == 299

    gates = torch.tensor([-1e30, -200, -88, -87, -1e-30, 0, 1e-30, 87, 88, 200, 1e30, torch.inf, torch.nan]).to(dtype)
    panels = cpu_decode.pack_gated(*(part[:, None].contiguous() for part in (gates, torch.ones_like(gates))))
    found = cpu_decode.swiglu(panels, len(gates), None, torch.ones(1, 1, dtype=dtype))[0]
    exact = gates.double() * gates.double().sigmoid()
    torch.testing.assert_close(found.double(), exact, rtol=max(1e-6, ROUNDING[dtype]), atol=1e-36, equal_nan=True)

    ends = torch.tensor([-1e30, -20, -3, 3, 20, 1e30, torch.inf, torch.nan])
    panels, one = cpu_decode.pack(torch.ones(8, 1, dtype=dtype)), torch.zeros(1, 1, dtype=dtype)
    for approximate in ("none", "tanh"):
        found = cpu_decode.gelu(panels, 8, ends, approximate == "tanh", one)[0]
        exact = F.gelu(ends.double(), approximate=approximate)
        torch.testing.assert_close(found.double(), exact, rtol=max(2e-6, ROUNDING[dtype]), atol=1e-6, equal_nan=True)
    assert cpu_decode.rms_norm(torch.ones(20), 1e-5, dtype, torch.full((1, 20), torch.nan)).isnan().all()

    logits = torch.zeros(3, 700, dtype=dtype)
    logits[0, 699], logits[1, :600], logits[2, 650] = torch.nan, -torch.inf, torch.inf
    ids, logps = cpu_decode.argmax(logits, 700)
    assert logps[0].isnan()
    assert ids[1:].tolist() == [600, 650]
    assert float(logps[1]) == pytest.approx(-4.60517, abs=1e-5)
    assert logps[2].isnan()


@each_dtype
def test_numbers_at_the_ends_of_their_range(kernels: None, dtype: torch.dtype) -> None:
    _extremes(dtype)


# -- other instruction sets --------------------------------------------------------------------------------------------


@each_dtype
def test_the_kernels_for_other_cpus(other_cpu: None, dtype: torch.dtype) -> None:
    """In bf16 they multiply floats."""
    for shape in FEW:
        for operation in (_product, _swiglu, _gelu):
            operation(*shape, dtype)
    _product(260, 256, 270, dtype)
    _swiglu(140, 150, 100, dtype)
    for rows, size in ((5, 33), (1, 64), (3, 150)):
        _norms(rows, size, dtype)
        _norm_heads(size)
    for heads in HEADS:
        _attend(3, 15, heads, dtype)
        _attend(1, 100, heads, dtype)
        _attend_prompts(2, 49, 20, heads, 2, dtype)
    _argmax(1000, 300, dtype)
    _extremes(dtype)


# -- whether they are there --------------------------------------------------------------------------------------------


def test_what_they_are_not_for() -> None:
    cpu, cuda, half = torch.device("cpu"), torch.device("cuda"), torch.float16
    assert not cpu_decode.available(cpu, torch.float64, torch.float64)
    assert not cpu_decode.available(cpu, BF16, torch.float64)
    assert not cpu_decode.available(cpu, half, FP32)
    assert not cpu_decode.available(cuda, FP32, FP32)


def test_they_are_built_once_for_both_dtypes(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    calls: list[Any] = []
    real = build.build
    monkeypatch.setattr(cpu_decode, "build", lambda *arguments: calls.append(arguments) or real(*arguments))
    _forget()
    for dtype in (FP32, BF16, FP32):
        cpu_decode.available(torch.device("cpu"), dtype, FP32, messages.append)
    assert len(calls) == 1
    assert messages == []


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    _forget()
    messages: list[str] = []
    try:
        for dtype in (FP32, BF16):
            assert not cpu_decode.available(torch.device("cpu"), dtype, FP32, messages.append)
        assert len(messages) == 2, "that it is being built, and that it cannot be"
    finally:
        _forget()
