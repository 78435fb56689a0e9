"""Both caches against attention written out in float64, over several blocks of slots."""

import pytest
import torch

from ingot.infer.cache import BagCache, Cache
from ingot.model.settings import ModelSettings

ROWS, PROMPT, NEW = 3, 70, 65


def _expected(q_BHD, k_BKSD, v_BKSD, bias_BS):
    group = q_BHD.shape[1] // k_BKSD.shape[1]
    k_BHSD, v_BHSD = (x.repeat_interleave(group, dim=1).double() for x in (k_BKSD, v_BKSD))
    score_BHS = torch.einsum("bhd,bhsd->bhs", q_BHD.double(), k_BHSD) * q_BHD.shape[-1] ** -0.5 + bias_BS[:, None]
    return torch.einsum("bhs,bhsd->bhd", score_BHS.softmax(-1), v_BHSD).flatten(1)


@pytest.mark.parametrize("kind", [Cache, BagCache])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("dropped_at", [0, 50, 58])  # at 58 two rows have as many blocks as three had
def test_attention_over_the_slots_in_use(dropped_at, dtype, atol, kv_heads, kind):
    config = ModelSettings(depth=2, width=32, heads=4, kv_heads=kv_heads, context=256).resolve(11)
    torch.manual_seed(1)
    k_BKSD, v_BKSD = torch.randn(2, ROWS, kv_heads, PROMPT + NEW, 8, dtype=torch.float64).to(dtype)
    q_SBHD = torch.randn(NEW, ROWS, 4, 8, dtype=torch.float64).to(dtype)
    bias_BS = torch.zeros(ROWS, PROMPT + NEW, dtype=dtype).masked_fill_(
        torch.rand(ROWS, PROMPT + NEW) < 0.2, -torch.inf
    )
    wide = torch.promote_types(dtype, torch.float32)
    cache = kind(config, ROWS, PROMPT + NEW, wide, dtype, torch.device("cpu"))
    rows, layer = torch.arange(ROWS), 1
    with torch.inference_mode():
        cache.read(layer, slice(0, 2), k_BKSD[:2, :, :PROMPT], v_BKSD[:2, :, :PROMPT])
        cache.read(layer, slice(2, 3), k_BKSD[2:, :, :PROMPT], v_BKSD[2:, :, :PROMPT])
        for step, q_BHD in enumerate(q_SBHD):
            if step == dropped_at:
                rows = torch.tensor([0, 2])
                cache.keep(rows)
            slot = PROMPT + step
            cache.grow(slot + 1)
            bias = bias_BS[rows, : slot + 1]
            q, k, v = q_BHD[rows], k_BKSD[rows, :, slot], v_BKSD[rows, :, slot]
            found_BV = cache.attend(layer, q.to(wide), k.to(wide), v, bias.to(cache.score_dtype))
            wanted_BV = _expected(q, k_BKSD[rows, :, : slot + 1], v_BKSD[rows, :, : slot + 1], bias)
            torch.testing.assert_close(found_BV.double(), wanted_BV, rtol=0, atol=atol)


@pytest.mark.parametrize("prompt", [63, 64, 65])
def test_nothing_is_read_that_nobody_wrote(prompt):
    """Freed memory holds denormal numbers, which make an Intel CPU slow; a block in use is read as a whole."""
    config = ModelSettings(depth=2, width=32, heads=4, context=256).resolve(11)
    cache = BagCache(config, 2, 200, torch.float32, torch.bfloat16, torch.device("cpu"))
    cache.keys_LBKNDP.fill_(torch.nan)
    drawn = torch.randn(4, 2, 4, prompt, 8, dtype=torch.bfloat16)
    for layer in range(2):
        cache.read(layer, slice(0, 2), *drawn[:2])
    for used in range(prompt + 1, prompt + 70):
        cache.grow(used)
        for layer in range(2):
            cache.attend(layer, drawn[0, :, :, 0].float(), drawn[1, :, :, 0], drawn[2, :, :, 0], None)
        assert not cache.keys_LBKNDP[:, :, :, : -(-used // 64)].isnan().any()
