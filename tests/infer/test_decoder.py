"""The forward of decoding against the forward of training: the same logits for every family, adapter and precision."""

import numpy as np
import pytest
import torch

from ingot.infer import linear as products
from ingot.infer.decoder import Decoder, Rows
from ingot.infer.generate import generate
from ingot.infer.linear import Way, way
from ingot.infer.sampling import Sampling
from ingot.kernels import cpu_decode
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.config import FAMILIES, ModelSettings
from ingot.model.transformer import build

VOCAB = 37
CPU = torch.device("cpu")


def _model(family="llama", dtype=torch.float32, **settings):
    settings = {"depth": 2, "width": 48, "heads": 6, "context": 40, **settings}
    model = build(ModelSettings(family=family, **settings).resolve(VOCAB), seed=2, dtype=dtype)
    with torch.no_grad():  # as if trained, gains and biases too
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.mul_(3).add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _ids(rows, length, seed=0):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def _logits(model, ids_BT):
    with torch.inference_mode():
        out = model(ids_BT)
        return out.head(out.hidden)


def _decoded(model, ids_BT, lengths, dtype=None):
    """Logits after each token of rows, which read a first part as prompts and the rest token by token."""
    lengths_B = torch.tensor(lengths)
    new = ids_BT.shape[1] - int(lengths_B.max())
    prompts_BT = ids_BT[:, : int(lengths_B.max())].clone()
    prompts_BT[torch.arange(prompts_BT.shape[1]) >= lengths_B[:, None]] = 0
    with torch.inference_mode():
        rows = Rows(Decoder(model, dtype), prompts_BT, lengths_B, new)
        found = [rows.logits_BV]
        for step in range(new):
            rows.run(ids_BT[torch.arange(len(ids_BT)), lengths_B + step])
            found.append(rows.logits_BV.clone())
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_heads", [2, 6])
def test_G2_decoding_gives_the_logits_of_the_full_forward(family, kv_heads, dtype):
    window = {"window": 7} if FAMILIES[family].window else {}
    model = _model(family, dtype, kv_heads=kv_heads, **window)
    ids_BT, lengths = _ids(4, 30), [12, 3, 1, 9]
    expected_BTV = _logits(model, ids_BT)
    for row, found_TV in enumerate(_decoded(model, ids_BT, lengths)):
        first = lengths[row] - 1
        wanted_TV = expected_BTV[row, first : first + len(found_TV)]
        atol = (1e-5 if dtype == torch.float32 else 1e-12) * float(wanted_TV.abs().max())
        torch.testing.assert_close(found_TV, wanted_TV, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "settings",
    [
        {"norm": "layer", "qk_norm": True, "bias": "all"},
        {"norm": "layer", "qk_norm": True, "positions": "learned"},
        {"head_size": 16, "activation": "gelu"},
        {"rope_scaling": {"factor": 4, "low_freq_factor": 1, "high_freq_factor": 4, "original_context": 16}},
    ],
)
def test_G2_any_combination_of_the_fields_decodes(settings):
    model = _model(**settings)
    ids_BT = _ids(3, 20)
    found_BTV, expected_BTV = _decoded(model, ids_BT, [8, 8, 8]), _logits(model, ids_BT)[:, 7:]
    torch.testing.assert_close(found_BTV, expected_BTV, rtol=0, atol=1e-5 * float(expected_BTV.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("kind", "whole"), [("lora", ()), ("dora", ()), ("lora", ("embedding", "head"))])
def test_G2_an_adapter_is_decoded_with_unless_it_is_off_or_merged(kind, whole, family):
    model = _model(family, depth=1)
    frozen_BTV = _logits(model, _ids(2, 12))
    lora.adapt(model, AdapterSettings(kind=kind, rank=3, modules_to_save=whole), seed=0)
    with torch.no_grad():
        for layer in lora.adapters(model):
            layer.lora_B.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
        for module in lora.whole(model):
            module.weight.add_(torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    ids_BT = _ids(2, 12)

    def check():
        expected_BTV = _logits(model, ids_BT)[:, 4:]
        atol = 3e-5 * float(expected_BTV.abs().max())  # the correction is added to the matrix, not to its product
        torch.testing.assert_close(_decoded(model, ids_BT, [5, 5]), expected_BTV, rtol=0, atol=atol)
        return expected_BTV

    adapted = check()
    with lora.adapters_off(model):
        assert not torch.allclose(check(), adapted, atol=1e-2)
        assert torch.equal(_logits(model, ids_BT), frozen_BTV)
    lora.merge(model)
    torch.testing.assert_close(check(), adapted, rtol=1e-3, atol=1e-3)


def test_bf16_products_are_no_further_from_fp32_than_training_in_bf16_is():
    """Root mean square of the logits' error, as a share of the logits'."""
    model, ids_BT = _model(), _ids(4, 30)
    exact_BTV = _logits(model, ids_BT)[:, 11:]

    def error(found_BTV):
        return float((found_BTV.float() - exact_BTV).square().mean().sqrt() / exact_BTV.square().mean().sqrt())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained = error(_logits(model, ids_BT)[:, 11:])
    assert 1e-3 < error(_decoded(model, ids_BT, [12] * 4, torch.bfloat16)) < 1.25 * trained < 0.05


def test_autocast_and_the_models_own_precision_choose_the_products():
    model = _model(depth=1)
    assert Decoder(model).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Decoder(model).dtype == torch.bfloat16
        inside = generate(model, [[1, 2, 3]], Sampling(max_new=5, temperature=0))
    asked = generate(Decoder(model, torch.bfloat16), [[1, 2, 3]], Sampling(max_new=5, temperature=0))
    assert inside[0].ids.tolist() == asked[0].ids.tolist()
    np.testing.assert_array_equal(inside[0].logps, asked[0].logps)
    assert Decoder(_model(dtype=torch.float64)).stream == torch.float64


def _possible(how, dtype):
    own, packed = cpu_decode.available(CPU, dtype, torch.float32), products._packs(CPU, dtype)
    return {Way.PANELS: own, Way.ONEDNN: packed, Way.TORCH: True}[how]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 6, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("how", Way)
def test_layers_of_one_input_are_one_product(how, bias, rows, dtype):
    if not _possible(how, dtype):
        pytest.skip("not on this machine")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(151, out, bias) for out in (50, 7)]
    x_MI, near = torch.randn(rows, 151).to(dtype), {"rtol": 0, "atol": 2e-2 if dtype == torch.bfloat16 else 1e-5}
    with torch.inference_mode():
        expected = torch.cat([layer(x_MI.float()) for layer in layers], dim=1)
        both = products.product(layers, dtype, how)
        found, onto = both(x_MI), torch.ones(rows, 57)
        torch.testing.assert_close(found.float(), expected, **near)
        assert both(x_MI, onto) is onto
        torch.testing.assert_close(onto, expected + 1, **near)
        turned = products.product(layers, dtype, how, torch.arange(57).flip(0))(x_MI)
        torch.testing.assert_close(turned, found.flip(1), **near)


@pytest.mark.parametrize("half", [True, False])
def test_who_multiplies(half, monkeypatch):
    monkeypatch.setattr(products.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: half)
    assert way(CPU, torch.float32, True) is way(CPU, torch.bfloat16, True) is Way.PANELS
    assert way(CPU, torch.float32, False) is Way.ONEDNN
    assert way(CPU, torch.bfloat16, False) is (Way.ONEDNN if half else Way.TORCH)
    assert way(CPU, torch.float64, False) is way(torch.device("cuda"), torch.bfloat16, False) is Way.TORCH


@pytest.mark.parametrize("how", Way)
def test_every_way_gives_the_logits_of_the_full_forward(how, monkeypatch):
    if not _possible(how, torch.float32):
        pytest.skip("not on this machine")
    monkeypatch.setattr("ingot.infer.decoder.way", lambda *_, **__: how)
    for family in FAMILIES:
        model, ids_BT = _model(family), _ids(3, 12)
        expected_BTV = _logits(model, ids_BT)[:, 3:]
        for rows in (1, 3):
            found_BTV = _decoded(model, ids_BT[:rows], [4] * rows)
            assert float((found_BTV - expected_BTV[:rows]).norm() / expected_BTV[:rows].norm()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compiled", [False, True])
def test_with_a_compiler_and_without_one_the_logits_are_those_of_the_full_forward(compiled, family, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cpu_decode, "_library", lambda: None)
    elif cpu_decode._library() is None:
        pytest.skip("no C++ compiler")
    model, ids_BT = _model(family), _ids(3, 12)
    expected_BTV = _logits(model, ids_BT)[:, 3:]
    for rows in (1, 3):
        for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
            found_BTV = _decoded(model, ids_BT[:rows], [4] * rows, dtype)
            assert float((found_BTV - expected_BTV[:rows]).norm() / expected_BTV[:rows].norm()) < near
