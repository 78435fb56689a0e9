"""The cache against attention written out in float64, by our own function and by torch's operations."""

import pytest
import torch

from ingot.infer.kv_cache import Cache
from ingot.kernels import cpu_decode
from ingot.model.attention import causal_mask
from ingot.model.config import ModelSettings

ROWS, PROMPT, NEW = 3, 70, 65


def _expected(q_BHD, k_BKSD, v_BKSD, bias_BS):
    group = q_BHD.shape[1] // k_BKSD.shape[1]
    k_BHSD, v_BHSD = (x.repeat_interleave(group, dim=1).double() for x in (k_BKSD, v_BKSD))
    score_BHS = torch.einsum("bhd,bhsd->bhs", q_BHD.double(), k_BHSD) * q_BHD.shape[-1] ** -0.5 + bias_BS[:, None]
    return torch.einsum("bhs,bhsd->bhd", score_BHS.softmax(-1), v_BHSD).flatten(1)


def _turned(x_BHD, by_BE):
    real, imaginary = x_BHD.double().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = by_BE.real[:, None].double(), by_BE.imag[:, None].double()
    return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("dropped_at", [0, 50])
def test_attention_over_the_slots_in_use(dropped_at, dtype, atol, kv_heads, compiled, turned, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cpu_decode, "_library", lambda: None)
    config = ModelSettings(depth=2, width=32, heads=4, kv_heads=kv_heads, context=256).resolve(11)
    torch.manual_seed(1)
    k_BKSD, v_BKSD = torch.randn(2, ROWS, kv_heads, PROMPT + NEW, 8, dtype=torch.float64).to(dtype)
    q_SBHD = torch.randn(NEW, ROWS, 4, 8, dtype=torch.float64).to(dtype)
    bias_BS = torch.zeros(ROWS, PROMPT + NEW, dtype=dtype).masked_fill_(
        torch.rand(ROWS, PROMPT + NEW) < 0.2, -torch.inf
    )
    wide = torch.promote_types(dtype, torch.float32)
    cache = Cache(config, ROWS, PROMPT + NEW, wide, dtype, torch.device("cpu"))
    for table in (cache.keys_LBKCD, cache.values_LBKCD):
        table.fill_(torch.nan)  # nothing is read that nobody wrote
    rows, layer = torch.arange(ROWS), 1
    with torch.inference_mode():
        for some in (slice(0, 2), slice(2, 3)):
            k, v = (x[some, :, :PROMPT].transpose(1, 2) for x in (k_BKSD, v_BKSD))
            q = torch.randn(*k.shape[:2], 4, 8).to(dtype)
            cache.read(layer, some, torch.cat((q, k, v), dim=2).to(wide), None)
        for step, q_BHD in enumerate(q_SBHD):
            if step == dropped_at:
                rows = torch.tensor([0, 2])
                cache.keep(rows)
            slot = PROMPT + step
            cache.grow(slot + 1)
            bias = bias_BS[rows, : slot + 1]
            q, k, v = q_BHD[rows], k_BKSD[rows, :, slot], v_BKSD[rows, :, slot]
            qkv, turn = torch.cat((q, k, v), dim=1).to(wide), None
            if turned:
                angle = torch.randn(len(rows), 4, dtype=wide)
                turn = torch.complex(angle.cos(), angle.sin())
                q, k_BKSD[rows, :, slot] = _turned(q, turn), _turned(k, turn).to(dtype)
            found_BV = cache.attend(layer, qkv, turn, bias.to(wide))
            wanted_BV = _expected(q, k_BKSD[rows, :, : slot + 1], v_BKSD[rows, :, : slot + 1], bias)
            torch.testing.assert_close(found_BV.double(), wanted_BV, rtol=0, atol=atol)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("samples", "window"), [(1, None), (2, 3), (3, 200)])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_prompts_attend_to_themselves_and_leave_keys_and_values(dtype, atol, samples, window, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cpu_decode, "_library", lambda: None)
    settings = ModelSettings(
        depth=2, width=32, heads=4, kv_heads=2, context=256, family="mistral", window=window or 256
    )
    wide, T = torch.promote_types(dtype, torch.float32), 9
    cache = Cache(settings.resolve(11), 3 * samples, T + 5, wide, dtype, torch.device("cpu"))
    for table in (cache.keys_LBKCD, cache.values_LBKCD):
        table.fill_(torch.nan)
    torch.manual_seed(1)
    qkv_BTND, angle = torch.randn(2, T, 8, 8, dtype=torch.float64), torch.randn(T, 4, dtype=torch.float64)
    turn_TE = torch.complex(angle.cos(), angle.sin())
    q, k, v = qkv_BTND.split((4, 2, 2), dim=2)
    q, k = (_turned(x.flatten(0, 1), turn_TE.repeat(2, 1)).view(x.shape).transpose(1, 2) for x in (q, k))
    mask_TT = causal_mask(T, window, torch.device("cpu")) if window and window < T else None
    turn = turn_TE.to(torch.complex128 if wide == torch.float64 else torch.complex64)
    with torch.inference_mode():
        found = cache.read(1, slice(samples, 3 * samples), qkv_BTND.to(wide), turn, samples, mask_TT)
    age = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (age < 0) | (age >= (window or T))
    for t in range(T):
        bias = torch.zeros(2, T).masked_fill(hidden[t], -torch.inf)
        wanted = _expected(q[:, :, t], k, v.transpose(1, 2), bias)
        torch.testing.assert_close(found[:, t].double(), wanted, rtol=0, atol=atol)
    for table, new in ((cache.keys_LBKCD, k), (cache.values_LBKCD, v.transpose(1, 2))):
        written = table[1, samples:, :, :T].double()
        torch.testing.assert_close(written, new.repeat_interleave(samples, dim=0), rtol=0, atol=atol)
        assert table[0].isnan().all()
        assert table[1, :samples].isnan().all()
        assert table[1, :, :, T:].isnan().all()
