"""Our own functions for a CPU against the same in float64, as they are built for this machine and for any other."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ingot.core import artifact
from ingot.kernels import build, cpu_decode
from ingot.kernels.replay import Word

CPU = torch.device("cpu")
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
SIZES = [1, 3, 8, 16, 33, 64, 150]
X86 = platform.machine().lower() in ("x86_64", "amd64")


NEEDS = {"x86-64-v4": torch.cpu._is_avx512_supported, "x86-64-v3": torch.cpu._is_avx2_supported}


@pytest.fixture(params=["native", "x86-64-v4", "x86-64-v3", "x86-64"])
def built(request, monkeypatch, tmp_path_factory):
    """With the vectors of this CPU, with AVX-512 without bf16, with AVX2 and with SSE alone."""
    if request.param != "native":
        if not X86 or not NEEDS.get(request.param, lambda: True)():
            pytest.skip("another processor")
        flags = tuple(f"-march={request.param}" if flag.startswith("-march") else flag for flag in build.FLAGS)
        monkeypatch.setattr(build, "FLAGS", flags)
    _forget()
    if cpu_decode._library() is None:
        pytest.skip("no C++ compiler")
    yield
    _forget()


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """A process that finds nothing built."""
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    _forget()
    yield tmp_path
    _forget()


def _forget():
    cpu_decode._library.cache_clear()
    cpu_decode._function.cache_clear()
    cpu_decode._of.cache_clear()
    cpu_decode._tiles.cache_clear()


def _drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def _turned(x, turn):
    """Pairs of all heads of a position times its complex numbers."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn.unsqueeze(-2)).flatten(-2)


def _close(found, wanted, dtype):
    assert found.dtype in (dtype, torch.float32)
    assert float((found.double() - wanted).norm()) <= DTYPES[dtype] * float(wanted.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 150])
def test_the_product_of_any_number_of_rows(built, rows, dtype):
    for inputs in SIZES:
        for outputs in (*SIZES, 1000):
            x, weight, bias = _drawn(rows, inputs, dtype=dtype), _drawn(outputs, inputs, dtype=dtype), _drawn(outputs)
            panels, onto, wanted = cpu_decode.pack(weight), _drawn(rows, outputs), x.double() @ weight.double().T
            found = cpu_decode.product(panels, outputs, None, x)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5 * inputs**0.5)
            wanted += bias.double() + onto.double()
            found = cpu_decode.product(panels, outputs, bias, x.repeat(1, 2)[:, :inputs], onto)
            assert found is onto
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5 * inputs**0.5)


LARGE = [(260, 256, 270), (300, 800, 290), (520, 1700, 260), (1100, 128, 290), (1100, 320, 200)]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), LARGE)
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
def test_large_products(built, monkeypatch, rows, inputs, outputs, dtype, digits):
    """Where there are matrix tiles fp32 is in digits; as training has it, and very many inputs, most are in three
    parts. In the last two bf16 takes two panels at once: of the first one panel is left over, of the second a gate goes
    with what it is multiplied with."""
    if not digits:
        monkeypatch.setattr(cpu_decode, "_packed", lambda x: x.dtype)
    x, weight, up = (_drawn(n, inputs, dtype=dtype) for n in (rows, outputs, outputs + 1))
    up, bias, onto = up[1:] / inputs**0.5, _drawn(outputs), _drawn(rows, outputs)
    wanted = x.double() @ weight.double().T
    found = cpu_decode.product(cpu_decode.pack(weight), outputs, None, x)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5 * inputs**0.5)
    wanted += onto.double() + bias.double()
    found = cpu_decode.product(cpu_decode.pack(weight), outputs, bias, x, onto)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5 * inputs**0.5)
    gate = weight / inputs**0.5
    g, u = (x.double() @ part.double().T for part in (gate, up))
    found = cpu_decode.gated(cpu_decode.pack_gated(gate, up), outputs, None, x)
    torch.testing.assert_close(found.double(), g * g.sigmoid() * u, rtol=DTYPES[dtype], atol=2e-5)


def _parts(x, number):
    """The first parts in bf16 of fp32, in float64."""
    found = []
    for _ in range(number):
        found.append(x.bfloat16())
        x = x - found[-1].float()
    return [part.double() for part in found]


def test_floats_in_three_parts_give_what_fp32_gives(built, monkeypatch):
    """Whatever the numbers' sizes, by tiles their products' sums are off by less than torch's; those of two parts by
    far more. Vectors add up one product after another, which is off by 1.7 times as much as torch. As training has
    weights: not in digits."""
    monkeypatch.setattr(cpu_decode, "_packed", lambda x: x.dtype)
    rows, inputs, outputs = 300, 1000, 260
    x, weight = (torch.exp2(3 * _drawn(inputs, n).T) * _drawn(n, inputs) for n in (rows, outputs))
    exact = x.double() @ weight.double().T
    size = (x.double().square() @ weight.double().square().T).sqrt()
    off = lambda found: ((found.double() - exact) / size).square().mean().sqrt()  # noqa: E731
    found = cpu_decode.product(cpu_decode.pack(weight.contiguous()), outputs, None, x.contiguous())
    assert off(found) < (1 if cpu_decode._library().tiles() else 2) * off(x @ weight.T) < 1e-6
    (high, middle), (high_w, middle_w) = _parts(x, 2), _parts(weight, 2)
    assert off(high @ high_w.T + high @ middle_w.T + middle @ high_w.T) > 8 * off(x @ weight.T)
    for whole in (x, weight):
        assert torch.equal(sum(_parts(whole, 3)), whole.double())


@pytest.fixture
def digits(built):
    if not cpu_decode._tiles():
        pytest.skip("no matrix tiles")


@pytest.mark.parametrize("inputs", [64, 500, 2048])
def test_weights_in_digits_give_what_fp32_gives(digits, inputs):
    """Of the two norms sums are off by less than torch's, also where a few of a row's numbers are far larger than the
    others; where a weight is that, by as much more as it is larger. Control: of weights that lose their last digit they
    are off by far more."""
    rows, weight = _drawn(70, inputs), _drawn(100, inputs) / 50
    largest = torch.exp2(weight.abs().amax(1, keepdim=True).log2().floor())
    two_digits = (weight / largest * 2**14).round() / 2**14 * largest
    for times in (1, 40, 3000):
        x = rows.clone()
        x[:, :: inputs // 4] *= times
        ours, of_torch, of_two = (
            _off(found, x, weight) for found in (_product(weight, x), x @ weight.T, _product(two_digits, x))
        )
        assert ours < of_torch < 6e-7
        assert of_two > 50 * ours
    for times in (8, 20):
        weight[:, 3] = times / 50
        assert _off(_product(weight, rows), rows, weight) < 2**-22.2 * times / 4 * 2


def _off(found, x, weight):
    """Root mean square, of the two norms over the root of the inputs."""
    size = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1) / x.shape[1] ** 0.5
    return float(((found.double() - x.double() @ weight.double().T) / size).square().mean().sqrt())


def _product(weight, x):
    return cpu_decode.product(cpu_decode.pack(weight), len(weight), None, x)


def test_digits_lose_nothing_of_whole_numbers(digits):
    """A power of two times numbers of 22 bits and a sign."""
    weight = torch.randint(-(2**22), 2**22, (50, 100), generator=torch.Generator().manual_seed(1)).float()
    weight[:, 0] = 2**22
    assert torch.equal(_product(2**-40 * weight, 2**30 * torch.eye(100)), 2**-10 * weight.T)


def test_digits_of_the_most_inputs_fit_their_sums(digits):
    """All products of the lower digits are as large as they can be, and of one sign."""
    row = -(126 * 2**24 + 128 * (2**16 + 2**8 + 1)) * 2.0**-31
    weight = -(126 * 2**16 + 128 * (2**8 + 1)) * 2.0**-23
    x, weights = torch.full((1, cpu_decode._MOST_INPUTS), row), torch.full((1, cpu_decode._MOST_INPUTS), weight)
    assert float(_product(weights, x)) == pytest.approx(cpu_decode._MOST_INPUTS * row * weight, rel=2e-7)
    x, weights = torch.full((1, cpu_decode._MOST_INPUTS + 1), row), torch.full((1, cpu_decode._MOST_INPUTS + 1), weight)
    assert cpu_decode.pack(weights).dtype == torch.float32
    assert float(_product(weights, x)) == pytest.approx(x.shape[1] * row * weight, rel=1e-3)  # one by one


def test_a_row_in_digits_gives_the_same_beside_any_others(digits):
    """Their sums are whole numbers: how many rows there are changes no bit."""
    x, weight = _drawn(300, 700), _drawn(90, 700)
    whole = _product(weight, x)
    assert _product(weight, x[:0]).shape == (0, 90)
    for some in (1, 16, 17, 40, 150):
        assert torch.equal(_product(weight, x[:some]), whole[:some])


def test_a_row_in_digits_that_is_infinite(digits):
    """It has no digits, so its sums are no numbers; those of others stay."""
    x, weight = _drawn(20, 100), _drawn(40, 100)
    wanted = _product(weight, x)
    x[3, 5] = -torch.inf
    found = _product(weight, x)
    assert found[3].isnan().all()
    x[3], wanted[3], found[3] = 0, 0, 0
    assert torch.equal(found, wanted)
    assert torch.equal(_product(weight, x), wanted)


def test_a_product_keeps_to_what_is_not_a_number(built):
    """Zeros that fill up a pair or a panel meet nothing of a neighbour's."""
    for dtype in DTYPES:
        x, weight = torch.tensor([[1.0, 2.0, 3.0], [torch.nan, 0.0, 0.0]]), torch.eye(3)
        found = cpu_decode.product(cpu_decode.pack(weight.to(dtype)), 3, None, x.to(dtype))
        assert found[0].tolist() == [1, 2, 3]
        assert found[1].isnan().all()
        x, weight = torch.ones(300, 300, dtype=dtype), torch.ones(300, 300, dtype=dtype)
        x[7, 5] = weight[9, 299] = torch.nan
        found = cpu_decode.product(cpu_decode.pack(weight), 300, None, x).isnan()
        assert found[7].all()
        assert found[:, 9].all()
        assert found.sum() == 599


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 600])
def test_norm_and_activation(built, rows, dtype):
    for size in SIZES:
        x, gain = 3 * _drawn(rows, size), _drawn(size)
        wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()
        _close(cpu_decode.rms_norm(gain, 1e-5, dtype, x), wanted, dtype)
        _close(cpu_decode.rms_norm(gain, 1e-5, torch.float32, x.expand(2, -1, -1)), wanted.expand(2, -1, -1), dtype)
        x += 100  # a mean that is large beside what is left without it
        wanted = torch.nn.functional.layer_norm(x.double(), (size,), gain.double(), None, 1e-5)
        spread = (x.double().var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        of_the_mean = 3e-5 * gain.double().abs() / spread  # of numbers near 100; torch in fp32 errs by 1e-5
        for some in (torch.zeros(size), gain - 1):
            found = cpu_decode.layer_norm(gain, some if some.any() else None, 1e-5, dtype, x)
            assert found.dtype == dtype
            near = of_the_mean + DTYPES[dtype] * ((wanted + some).abs() + 1)
            assert ((found.double() - wanted - some).abs() <= near).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 150])
def test_the_activation_of_a_product(built, rows, dtype):
    for inputs in SIZES:
        for features in (*SIZES, 200):
            x, (gate, up) = _drawn(rows, inputs, dtype=dtype), 3 * _drawn(2, features, inputs) / inputs**0.5
            bias = _drawn(2, features)
            for some in (None, bias):
                weights = cpu_decode.pack_gated(gate.to(dtype), up.to(dtype))
                found = cpu_decode.gated(weights, features, None if some is None else some.flatten(), x)
                g, u = (x.double() @ part.to(dtype).double().T for part in (gate, up))
                g, u = (g, u) if some is None else (g + some[0], u + some[1])
                assert found.dtype == dtype
                wanted = g * g.sigmoid() * u
                torch.testing.assert_close(found.double(), wanted, rtol=DTYPES[dtype], atol=2e-5)  # of numbers near 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (6, 2, 8), (4, 1, 33), (2, 2, 130)])
@pytest.mark.parametrize(("length", "window"), [(1, None), (7, 3), (49, None), (150, 60), (97, 1)])
@pytest.mark.parametrize(("prompts", "threads"), [(2, 1), (1, 3)])
def test_attention_of_prompts(built, prompts, threads, length, window, heads, kv_heads, size, dtype):
    samples, capacity = 2, length + 9
    qkv, turn = _drawn(prompts, length, heads + 2 * kv_heads, size), None
    q, k, v = qkv.double().split((heads, kv_heads, kv_heads), dim=2)
    if size % 2 == 0:
        angle = 9 * _drawn(length, size // 2)
        turn = torch.complex(angle.cos(), angle.sin())
        q, k = _turned(q, turn), _turned(k, turn)
    keys, values = (torch.full((prompts * samples, kv_heads, capacity, size), torch.nan, dtype=dtype) for _ in "kv")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # three cannot share one head of keys: its queries are apart
    try:
        found = cpu_decode.attend_prompts(qkv, turn, keys, values, window, samples)
    finally:
        torch.set_num_threads(before)
    assert found.dtype == dtype
    age = torch.arange(length)[:, None] - torch.arange(length)
    k, v = (x.to(dtype).double() for x in (k, v))
    for table, new in ((keys, k), (values, v)):
        wanted = new.transpose(1, 2).repeat_interleave(samples, dim=0)
        _close(table[:, :, :length], wanted, dtype)
        assert table[:, :, length:].isnan().all()
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    score = torch.einsum("bthd,bshd->bhts", q.to(dtype).double(), k) * size**-0.5
    weight = score.masked_fill((age < 0) | (age >= (window or length)), -torch.inf).softmax(-1)
    wanted = torch.einsum("bhts,bshd->bthd", weight, v).flatten(2)
    assert float((found.double() - wanted).norm()) <= 3 * DTYPES[dtype] * float(wanted.norm())


def test_the_norm_of_some_heads_leaves_the_others(built):
    for size in SIZES:
        qkv, gain = 3 * _drawn(2, 5, 7, size), _drawn(size)
        given = qkv.double()
        wanted = given / (given.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()
        cpu_decode.norm_heads(gain, 1e-5, qkv, slice(2, 5))
        _close(qkv[:, :, 2:5], wanted[:, :, 2:5], torch.float32)
        assert torch.equal(qkv[:, :, :2].double(), given[:, :, :2])
        assert torch.equal(qkv[:, :, 5:].double(), given[:, :, 5:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_a_product(built, approximate, dtype):
    x = torch.linspace(-12, 12, 1001)[:, None].to(dtype)
    for bias in (None, torch.linspace(-1, 1, 100)):
        found = cpu_decode.gelu(cpu_decode.pack(torch.ones(100, 1, dtype=dtype)), 100, bias, approximate == "tanh", x)
        inner = x.double() + (torch.zeros(100) if bias is None else bias)
        wanted = torch.nn.functional.gelu(inner.double(), approximate=approximate)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=DTYPES[dtype], atol=1e-6)
    ends = torch.tensor([-1e30, -20, 20, 1e30, torch.inf, torch.nan])
    zero = torch.zeros(1, 1, dtype=dtype)  # an infinite number of a row would be none where rows have digits
    found = cpu_decode.gelu(cpu_decode.pack(torch.ones(6, 1, dtype=dtype)), 6, ends, approximate == "tanh", zero)
    wanted = torch.nn.functional.gelu(ends.double(), approximate=approximate)[None]
    torch.testing.assert_close(found.double(), wanted, rtol=DTYPES[dtype], atol=1e-6, equal_nan=True)


def _gated(gates, dtype):
    """Each of them, times 1."""
    panels = cpu_decode.pack_gated(*(x[:, None].to(dtype) for x in (gates, torch.ones_like(gates))))
    return cpu_decode.gated(panels, len(gates), None, torch.ones(1, 1, dtype=dtype))[0]


def test_numbers_at_the_ends_of_their_range(built):
    gate = torch.tensor([-1e30, -200, -88, -87, -1e-30, 0, 1e-30, 87, 88, 200, 1e30])
    found = _gated(gate, torch.float32)
    torch.testing.assert_close(found.double(), gate.double() * gate.double().sigmoid(), rtol=1e-6, atol=1e-36)
    told = _gated(torch.tensor([torch.nan, torch.inf]), torch.bfloat16)
    assert told.isnan().tolist() == [True, False]
    assert told[1] == torch.inf
    assert cpu_decode.rms_norm(torch.ones(20), 1e-5, torch.bfloat16, torch.full((1, 20), torch.nan)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (6, 2, 8), (4, 1, 33), (2, 2, 130)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("slots", [1, 15, 100])
def test_attention(built, slots, rows, heads, kv_heads, size, dtype):
    qkv, turn = _drawn(rows, heads + 2 * kv_heads, size), None
    q, k, v = qkv.double().split((heads, kv_heads, kv_heads), dim=1)
    if size % 2 == 0:
        angle = 9 * _drawn(rows, size // 2)
        turn = torch.complex(angle.cos(), angle.sin())
        q, k = _turned(q, turn), _turned(k, turn)
    keys, values = (_drawn(rows, kv_heads, slots + 9, size, dtype=dtype) for _ in range(2))
    bias = torch.zeros(rows, slots + 9).masked_fill_(torch.rand(rows, slots + 9) < 0.3, -torch.inf)[:, :slots]
    bias[:, -1] = 0
    seen_keys, seen_values = (
        torch.cat((table[:, :, : slots - 1], newest[:, :, None].to(dtype)), dim=2)
        .double()
        .repeat_interleave(heads // kv_heads, dim=1)
        for table, newest in ((keys, k), (values, v))
    )
    keys[:, :, slots - 1 :], values[:, :, slots - 1 :] = torch.nan, torch.nan
    for some in (None, bias):
        score = torch.einsum("bhd,bhsd->bhs", q.double(), seen_keys) * size**-0.5
        weight = (score if some is None else score + some[:, None].double()).softmax(-1)
        wanted = torch.einsum("bhs,bhsd->bhd", weight, seen_values).flatten(1)
        found = cpu_decode.attend(qkv, turn, keys, values, some, Word(slots))
        assert found.dtype == dtype
        assert float((found.double() - wanted).norm()) <= 3 * DTYPES[dtype] * float(wanted.norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_made_again_reads_its_inputs_anew(built, dtype):
    """Also where rows in bf16 are multiplied as floats."""
    gain, weight, x = torch.ones(16), _drawn(33, 16, dtype=dtype), _drawn(5, 16)
    panels, gates = cpu_decode.pack(weight), cpu_decode.pack_gated(weight, weight)

    def step(x):
        normed = cpu_decode.rms_norm(gain, 1e-5, dtype, x)
        return cpu_decode.product(panels, 33, None, normed), cpu_decode.gated(gates, 33, None, normed)

    with torch.inference_mode():
        with cpu_decode.recorded(x) as recorded:
            found = step(x)
        assert recorded.whole
        other = _drawn(5, 16) + 1
        recorded.again(other)
        for one, wanted in zip(found, step(other.clone()), strict=True):
            assert torch.equal(one, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_likeliest_token(built, dtype):
    for vocab in (1, 5, 64, 1000, 5003):
        for allowed in {1, max(1, vocab // 3), vocab}:
            logits = (3 * _drawn(4, vocab)).to(dtype)
            logits[0, -1], logits[1], logits[2] = 99, -3, logits[2] - 1000  # alike in the second row
            ids, logps = cpu_decode.likeliest(logits, allowed)
            wanted = logits.double().log_softmax(-1)
            assert ids[1] == 0
            torch.testing.assert_close(ids, torch.from_numpy(logits[:, :allowed].float().numpy().argmax(-1)))
            found = wanted.gather(1, ids[:, None])[:, 0]
            torch.testing.assert_close(logps.double(), found, rtol=2e-6, atol=2e-6)
    logits = torch.zeros(2, 700, dtype=dtype)
    logits[0, 699], logits[1, :600] = torch.nan, -torch.inf
    ids, logps = cpu_decode.likeliest(logits, 700)
    assert logps[0].isnan()
    assert ids[1] == 600
    assert float(logps[1]) == pytest.approx(-4.60517, abs=1e-5)


def test_where_there_is_a_compiler_it_builds(anew):
    """Else every other test here would be skipped."""
    if os.environ.get("CXX") or shutil.which("g++") is None:
        pytest.skip("no g++")
    assert cpu_decode.available(CPU, torch.float32, torch.float32)


def test_it_is_built_once_and_whole(anew):
    if not cpu_decode.available(CPU, torch.float32, torch.float32):
        pytest.skip("no C++ compiler")
    (made,) = (anew / "native").iterdir()
    stamp = made.stat().st_mtime_ns
    _forget()
    assert cpu_decode.available(CPU, torch.bfloat16, torch.float32)
    assert made.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false", f"{sys.executable} -c pass"])
def test_without_a_compiler_that_works_torch_computes(anew, compiler, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    assert not cpu_decode.available(CPU, torch.float32, torch.float32)
    assert list((anew / "native").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_no_error(anew, monkeypatch):
    (anew / "native").write_text("")
    assert not cpu_decode.available(CPU, torch.float32, torch.float32)
    assert artifact.cache() == anew


def test_what_it_is_not_for():
    assert not cpu_decode.available(CPU, torch.float64, torch.float64)
    assert not cpu_decode.available(CPU, torch.bfloat16, torch.float64)
    assert not cpu_decode.available(CPU, torch.float16, torch.float32)
    assert not cpu_decode.available(torch.device("cuda"), torch.float32, torch.float32)


def test_it_shares_torchs_threads(built):
    """Two libraries of threads would keep each other from the cores."""
    linked = subprocess.run(["ldd", cpu_decode._library()._name], capture_output=True, text=True)
    if linked.returncode or "libgomp" not in linked.stdout:
        pytest.skip("not glibc and gcc")
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line}) == 1
