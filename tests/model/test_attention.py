"""D8: the fused attention against the eager one, memory, documents, and the rounding of rotary positions."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.model.attention import Mask, additive, attend, attend_eager, causal_mask, document_mask, make_mask
from ingot.model.config import ModelSettings, RopeScaling
from ingot.model.rope import apply_rope, make_rope, scale_frequencies
from ingot.model.transformer import build

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def _random(B, H, K, T, D, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, n, T, D, generator=generator, dtype=dtype, requires_grad=True) for n in (H, K, K)]


class _LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("isolated", [False, True])
def test_D8_fused_equals_eager(dtype, kv_heads, isolated):
    T = 130
    mask = None
    if isolated:
        mask = document_mask(torch.randint(3, (2, T), generator=torch.Generator().manual_seed(1)).sort(dim=1).values)
    results = []
    for impl in ("sdpa", "eager"):
        inputs = _random(2, 8, kv_heads, T, 16, dtype)
        out = attend(*inputs, Mask(impl, mask))
        out.square().sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for fused, eager in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


def test_D8_eager_memory_is_quadratic_and_fused_linear():
    largest = {}
    for impl in ("eager", "sdpa"):
        for T in (1024, 2048):
            q, k, v = (x.detach() for x in _random(1, 2, 2, T, 16, torch.float32))
            with _LargestTensor() as seen:
                attend(q, k, v, Mask(impl, None))
            largest[impl, T] = seen.elements
    assert largest["eager", 1024] == 2 * 1024 * 1024
    assert largest["eager", 2048] == 4 * largest["eager", 1024]
    assert largest["sdpa", 2048] == 2 * largest["sdpa", 1024]


def test_D8_scores_are_written_out_only_for_short_bfloat16_rows_on_a_cpu():
    def writes_scores(T, dtype):
        config = ModelSettings(depth=1, width=8, heads=1, ffn=16, context=T).resolve(5)
        model, ids_BT = build(config, seed=0, dtype=dtype), torch.zeros(1, T, dtype=torch.long)
        with _LargestTensor() as seen, torch.no_grad():
            model(ids_BT)
        return seen.elements >= T * T

    assert writes_scores(64, torch.bfloat16)
    assert not writes_scores(1024, torch.bfloat16)
    assert not writes_scores(64, torch.float32)


def test_D8_eager_bfloat16_is_close_to_float32():
    q, k, v = _random(2, 4, 4, 64, 32, torch.float32)
    half = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), Mask("eager", None)).float()
    assert (half - attend(q, k, v, Mask("eager", None))).abs().max() < 0.03


def test_document_mask_is_block_diagonal_and_causal():
    mask = document_mask(torch.tensor([[5, 5, 9, 9, 9]]))[0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_D8_a_document_behind_many_masked_keys_is_finite(impl):
    """The fused kernel goes through keys in blocks, and here whole blocks are masked."""
    q, k, v = _random(1, 2, 2, 1400, 8, torch.float32)
    documents = (torch.arange(1400) >= 1300).long()[None]
    out = attend(q, k, v, Mask(impl, document_mask(documents)))
    alone = attend(q[:, :, 1300:], k[:, :, 1300:], v[:, :, 1300:], Mask(impl, None))
    torch.testing.assert_close(out[:, :, 1300:], alone, rtol=1e-5, atol=1e-5)


def test_rope_keeps_lengths_and_depends_on_differences_only():
    q, k = torch.randn(2, 1, 6, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = []
    for shift in (0, 1000):
        rope = make_rope(torch.arange(6)[None] + shift, 32, 10_000.0, torch.float64)
        a, b = apply_rope(q, rope), apply_rope(k, rope)
        torch.testing.assert_close(a.norm(dim=-1), q.norm(dim=-1), rtol=1e-12, atol=1e-12)
        scores.append(a[0, :, 0] @ b[0, :, 0].T)
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-10, atol=1e-10)


def test_rope_angles_are_float32_for_a_bfloat16_model():
    rope = make_rope(torch.tensor([[256, 257]]), 32, 10_000.0, torch.bfloat16)
    assert rope.cos_BT1E.dtype == torch.float32
    assert not torch.equal(rope.cos_BT1E[0, 0], rope.cos_BT1E[0, 1])
    assert apply_rope(torch.ones(1, 2, 1, 32, dtype=torch.bfloat16), rope).dtype == torch.bfloat16


LLAMA_31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)


def test_scaled_frequencies_are_kept_slowed_down_or_mixed():
    """Llama 3.1's heads of 128 features at theta 500,000, wavelengths against 8,192 / 4 and 8,192 / 1."""
    frequency = 500_000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    scaled = scale_frequencies(frequency, LLAMA_31)
    wavelength = 2 * math.pi / frequency
    fast, slow = wavelength < 2048, wavelength > 8192
    assert torch.equal(scaled[fast], frequency[fast])
    torch.testing.assert_close(scaled[slow], frequency[slow] / 8, rtol=1e-15, atol=0)
    between = scaled[~fast & ~slow] / frequency[~fast & ~slow]
    assert fast.sum() == 29
    assert len(between) == 6
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (scaled.diff() < 0).all()


def test_window_masks_against_the_definition():
    T, window = 9, 3
    expected = torch.tensor([[0 <= t - s < window for s in range(T)] for t in range(T)])
    assert torch.equal(causal_mask(T, window, "cpu"), expected)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    same = documents[0][:, None] == documents[0]
    assert torch.equal(document_mask(documents, window)[0], expected & same)


def test_the_mask_of_a_forward_pass_is_none_where_it_is_causal_and_the_kernel_is_fused():
    """A mask is made where documents or a window ask for one: booleans for the fused kernel, else a term of scores."""
    config = ModelSettings(depth=1, width=8, heads=1, ffn=16, context=12, window=3, family="mistral").resolve(5)
    wide = config.model_copy(update={"window": None})
    documents, cpu = torch.tensor([[0] * 5 + [1] * 3, [2] * 8]), torch.device("cpu")
    for p, impl in ((0.0, "sdpa"), (0.5, "eager")):  # there is no fused kernel with dropout
        for shape, given in ((wide, None), (wide, documents), (config, None), (config, documents)):
            mask = make_mask(shape, given, 8, cpu, torch.float32, p)
            expected = causal_mask(8, shape.window, cpu)[None] if given is None else document_mask(given, shape.window)
            assert mask.impl == impl
            if impl == "eager":
                assert torch.equal(mask.attn_mask_BTS, additive(expected, torch.float32))
            elif shape is wide and given is None:
                assert mask.attn_mask_BTS is None
            else:
                assert torch.equal(mask.attn_mask_BTS, expected)
    short = make_mask(config, None, 3, cpu, torch.float32, 0.0)
    assert short.attn_mask_BTS is None, "a window as long as the row is no window"


def test_a_pair_is_of_both_halves_and_is_rotated_by_its_angle():
    """Llama's layout: features i and i + D / 2 are one complex number, multiplied by exp(i angle)."""
    x_BTHD = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rope = make_rope(torch.arange(5)[None], 8, 10_000.0, torch.float64)
    angle_T1E = torch.arange(5.0, dtype=torch.float64)[:, None, None] * 10_000.0 ** -(
        torch.arange(4, dtype=torch.float64) / 4
    )
    expected = torch.complex(*x_BTHD.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle_T1E), angle_T1E)
    found = torch.complex(*apply_rope(x_BTHD, rope).chunk(2, dim=-1))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_D8_dropout_leaves_out_that_fraction_and_keeps_the_mean(impl):
    torch.manual_seed(0)
    T, p = 64, 0.25
    q = k = torch.zeros(1, 1, T, T)  # uniform probabilities
    v = torch.eye(T)[None, None]  # the output is the probabilities
    kept = attend(q, k, v, Mask(impl, None), p)[0, 0]
    expected = attend(q, k, v, Mask(impl, None))[0, 0]
    lower = torch.ones(T, T).tril().bool()
    assert ((kept == 0) | torch.isclose(kept, expected / (1 - p))).all()
    n = int(lower.sum())
    dropped = (kept[lower] == 0).float().mean().item()
    assert abs(dropped - p) < 4 * math.sqrt(p * (1 - p) / n)
    assert torch.equal(attend_eager(q, k, v, None, p)[1][0, 0], attend_eager(q, k, v)[1][0, 0])
