"""ALGORITHMS 2.6: adapters, layer by layer and on whole models."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ingot.core.errors import UserError
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings, adapted_layers, adapter_parameters, linear_layers
from ingot.model.config import FAMILIES, ModelConfig, ModelSettings
from ingot.model.losses import cross_entropy
from ingot.model.transformer import Transformer, build
from ingot.optim.grad_terms import Anchor
from ingot.optim.groups import groups
from ingot.optim.settings import OptimSettings

KINDS = ("lora", "rslora", "dora")
BOTH = ("embedding", "head")
ALONE = (("embedding",), ("head",))
TRAINED = (("llama", BOTH), *(("llama", m) for m in ALONE), *(("gpt2", m) for m in ALONE))
"""Families and their `modules_to_save`; GPT-2's head is its embedding."""


def _config(**changes: object) -> ModelConfig:
    return ModelSettings.model_validate({"depth": 2, "width": 32, "heads": 4, "context": 16, **changes}).resolve(40)


def _settings(kind: str = "lora", **changes: object) -> AdapterSettings:
    return AdapterSettings.model_validate({"kind": kind, "rank": 4, "alpha": 8.0, **changes})


def _stirred(model: Transformer, scale: float = 0.05) -> None:
    """Adapters (and biases) moved off their start, as after training."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name or name.endswith("bias"):
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * scale)


def _logits(model: Transformer, ids: torch.Tensor | None = None) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12) if ids is None else ids
    with torch.no_grad():
        out = model(ids)
        return out.head(out.hidden)


def _pair(kind: str, family: str = "llama", dtype: torch.dtype = torch.float32, **changes: object):
    """A model with adapters, and the one it was made of."""
    frozen, model = (build(_config(family=family), 3, dtype=dtype) for _ in range(2))
    if family == "gpt2":
        _stirred(frozen), _stirred(model)  # biases that are not zero
    lora.add_adapters(model, _settings(kind, **changes), seed=1)
    return model, frozen


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_2_6_at_step_0_the_logits_are_the_frozen_ones_to_the_bit(kind: str, family: str) -> None:
    model, frozen = _pair(kind, family, dropout=0.5)
    assert torch.equal(_logits(model), _logits(frozen))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(_logits(model), _logits(frozen))
    _stirred(model)
    assert not torch.equal(_logits(model), _logits(frozen))


@pytest.mark.parametrize("kind", KINDS)
def test_2_6_the_first_gradient_of_A_is_zero_and_that_of_B_is_not(kind: str) -> None:
    model, _ = _pair(kind)
    out = model(torch.arange(24).view(2, 12))
    out.head(out.hidden).square().mean().backward()
    for name, p in model.named_parameters():
        if name.endswith("lora_A"):
            assert torch.equal(p.grad, torch.zeros_like(p)), name  # type: ignore[arg-type]
        elif "lora_" in name:
            assert p.grad.any(), name  # type: ignore[union-attr]
        else:
            assert p.grad is None, name


def test_2_6_A_starts_uniform_in_one_over_the_root_of_its_inputs() -> None:
    layer = lora.LoRALinear(nn.Linear(64, 8), _settings(rank=512), torch.Generator().manual_seed(0))
    bound = 1 / 8
    assert bound * 0.999 < layer.lora_A.abs().max() <= bound
    assert layer.lora_A.var().item() == pytest.approx(bound**2 / 3, rel=0.02)
    torch.manual_seed(0)
    theirs = torch.empty(512, 64)
    nn.init.kaiming_uniform_(theirs, a=math.sqrt(5))
    assert theirs.abs().max() <= bound
    assert theirs.abs().max() > bound * 0.999
    assert not layer.lora_B.any()


def test_2_6_the_scale() -> None:
    assert _settings("lora", rank=16, alpha=32).scale == 2
    assert _settings("rslora", rank=16, alpha=32).scale == 8
    assert _settings("dora", rank=16, alpha=32).scale == 2
    assert AdapterSettings().scale == 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_2_6_a_layer_is_its_formula(kind: str, bias: bool) -> None:
    """In float64, against the formula written out: outputs, and the gradients of all that is trained."""
    torch.manual_seed(0)
    frozen = nn.Linear(12, 10, bias=bias, dtype=torch.float64)
    layer = lora.LoRALinear(frozen, _settings(kind), torch.Generator().manual_seed(1))
    with torch.no_grad():
        layer.lora_B.normal_()
        if layer.lora_magnitude is not None:
            layer.lora_magnitude.mul_(1.3)
    x, pull = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 5, 10, dtype=torch.float64)

    def formula(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor | None) -> torch.Tensor:
        merged = frozen.weight.detach() + layer.scale * b @ a
        if m is not None:
            merged = merged * (m / merged.norm(dim=1).detach())[:, None]
        return x @ merged.T + (frozen.bias.detach() if bias else 0)

    own = [p for p in (layer.lora_A, layer.lora_B, layer.lora_magnitude) if p is not None]
    copies = [p.detach().clone().requires_grad_() for p in own]
    expected = formula(copies[0], copies[1], copies[2] if kind == "dora" else None)
    found = layer(x)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    (expected * pull).sum().backward()
    (found * pull).sum().backward()
    for mine, theirs in zip(own, copies, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_zeros_stays_a_number(kind: str) -> None:
    """Padded matrices have some; DoRA divides by the length of a row."""
    frozen = nn.Linear(6, 4)
    with torch.no_grad():
        frozen.weight[1] = 0
    layer, x = lora.LoRALinear(frozen, _settings(kind)), torch.randn(3, 6)
    assert torch.equal(layer(x), frozen(x))
    (layer(x).square().sum() + layer.merged_weight().square().sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_2_6_at_full_rank_it_can_be_any_step_of_the_whole_matrix(kind: str) -> None:
    """The step that fine-tuning would make of a linear layer, written as a product; one rank less leaves a rest."""
    torch.manual_seed(0)
    frozen = nn.Linear(12, 10, bias=False, dtype=torch.float64)
    x, wanted = torch.randn(40, 12, dtype=torch.float64), torch.randn(40, 10, dtype=torch.float64)
    (frozen(x) - wanted).square().mean().backward()
    assert frozen.weight.grad is not None
    step = -0.5 * frozen.weight.grad
    tuned = frozen.weight.detach() + step
    u, sizes, v = torch.linalg.svd(step)
    for rank, rest in ((10, 0.0), (9, float(sizes[-1]))):
        layer = lora.LoRALinear(frozen, _settings(kind, rank=rank))
        with torch.no_grad():
            layer.lora_A.copy_(v[:rank])
            layer.lora_B.copy_(u[:, :rank] * sizes[:rank] / layer.scale)
            if layer.lora_magnitude is not None:
                layer.lora_magnitude.copy_((tuned - (rank < 10) * sizes[-1] * u[:, -1:] * v[9:10]).norm(dim=1))
            found = layer(torch.eye(12, dtype=torch.float64)).T
        assert float(torch.linalg.matrix_norm(found - tuned, 2)) == pytest.approx(rest, abs=1e-12)
    assert sizes[-1] > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_2_6_dropout_is_seen_by_the_correction_alone(kind: str) -> None:
    """y = W x + b + (W' - W) drop(x): with everything dropped nothing but the frozen layer is left."""
    torch.manual_seed(0)
    frozen = nn.Linear(12, 10, dtype=torch.float64)
    layer = lora.LoRALinear(frozen, _settings(kind, dropout=0.5), torch.Generator().manual_seed(1))
    with torch.no_grad():
        layer.lora_B.normal_()
    x = torch.randn(400, 12, dtype=torch.float64)
    torch.manual_seed(7)
    found = layer.train()(x)
    torch.manual_seed(7)
    dropped = F.dropout(x, 0.5)
    expected = frozen(x) + dropped @ (layer.merged_weight() - frozen.weight).T
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert torch.allclose(layer.eval()(x), x @ layer.merged_weight().T + frozen.bias, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_2_6_a_merged_model_computes_the_same_without_adapters(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    model, frozen = _pair(kind)
    _stirred(model)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        before = _logits(model)
        lora.merge(model)
        merged = _logits(model)
        assert (merged - before).abs().max() < tolerance * max(1.0, before.abs().max().item())
        assert (merged - _logits(frozen)).abs().max() > 5 * (merged - before).abs().max()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in frozen.named_parameters()]
    assert all(p.requires_grad for p in model.parameters())
    assert not lora.adapters(model)
    for name, p in frozen.named_parameters():
        assert torch.equal(model.get_parameter(name), p) == (name not in _matrices(frozen)), name
    plain = _logits(model)
    lora.merge(model)  # there is nothing left to merge
    assert torch.equal(_logits(model), plain)


def _matrices(model: Transformer) -> set[str]:
    return {f"{name}.weight" for name in linear_layers(model.config)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_2_6_the_merged_matrix_is_the_formula(kind: str, dtype: torch.dtype) -> None:
    """In the precision of the adapter, also where the frozen matrix has fewer bits."""
    layer = lora.LoRALinear(nn.Linear(12, 10), _settings(kind), torch.Generator().manual_seed(1))
    with torch.no_grad():
        layer.lora_B.normal_()
        layer.weight.data = layer.weight.data.to(dtype)
    expected = layer.weight.float() + layer.scale * layer.lora_B @ layer.lora_A
    if layer.lora_magnitude is not None:
        expected = expected * (layer.lora_magnitude / expected.norm(dim=1))[:, None]
    assert layer.merged_weight().dtype == torch.float32
    assert torch.allclose(layer.merged_weight(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(layer.effective_weight(), layer.merged_weight())
    layer.enabled = False
    assert layer.effective_weight() is layer.weight


@pytest.mark.parametrize("kind", KINDS)
def test_E4_the_reference_is_the_frozen_model_to_the_bit(kind: str) -> None:
    model, frozen = _pair(kind)
    _stirred(model)
    on = _logits(model)
    assert torch.equal(_logits(lora.reference(model)), _logits(frozen))
    assert torch.equal(_logits(lora.reference(lora.reference(model))), _logits(frozen))
    assert torch.equal(_logits(model), on), "the model keeps its adapters"
    assert not torch.equal(on, _logits(frozen))


def test_the_reference_shares_every_weight_and_goes_its_own_way() -> None:
    model, frozen = _pair("lora")
    view = lora.reference(model)
    _stirred(model)  # as training does, after the view was made
    assert torch.equal(_logits(view), _logits(frozen))
    assert not torch.equal(_logits(model), _logits(frozen))
    assert {p.data_ptr() for p in view.parameters()} == {p.data_ptr() for p in model.parameters()}
    assert model.training
    assert not view.training


@pytest.mark.parametrize("kind", KINDS)
def test_2_6_matrices_held_in_bf16_are_as_those_that_autocast_rounds(kind: str) -> None:
    """Logits to the bit, the gradients of A and B too; the adapter and all that is no matrix stay fp32."""
    found = []
    for held in (False, True):
        model, _ = _pair(kind, "gpt2", targets=["q", "ffn.*"])
        _stirred(model)
        if held:
            lora.cast_frozen(model, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.arange(24).view(2, 12))
            out.head(out.hidden).square().mean().backward()
            logits = _logits(model)
        found.append((model, logits))
    (one, logits), (two, held_logits) = found
    assert two.get_parameter("layers.0.attention.k.weight").dtype == torch.bfloat16
    assert {p.dtype for n, p in two.named_parameters() if not n.endswith("weight") or "norm" in n} == {torch.float32}
    if kind != "dora":  # its row lengths are of the matrix as it is held
        assert torch.equal(logits, held_logits)
    assert (logits - held_logits).abs().max() < 2e-2
    for name, p in one.named_parameters():
        if p.grad is not None:
            grad = two.get_parameter(name).grad
            assert grad is not None
            assert torch.allclose(
                p.grad, grad, rtol=0.05, atol=float(p.grad.abs().max()) * (0 if kind != "dora" else 0.05)
            )
    assert torch.isfinite(_logits(two)).all(), "outside autocast too"


def test_adapters_are_not_tied_to_a_seed_of_the_device_or_the_process() -> None:
    torch.manual_seed(1)
    one, _ = _pair("lora")
    torch.manual_seed(2)
    two, _ = _pair("lora")
    assert torch.equal(one.layers["1"].ffn.up.lora_A, two.layers["1"].ffn.up.lora_A)  # type: ignore[union-attr]
    assert not torch.equal(one.layers["1"].ffn.up.lora_A, one.layers["0"].ffn.up.lora_A)  # type: ignore[union-attr]


def test_a_pull_through_lengths_of_rows_is_the_slope_of_what_is_logged() -> None:
    """DoRA: the penalty's value a little further along its gradient and a little before, in float64."""
    model, frozen = _pair("dora", dtype=torch.float64)
    _stirred(model)
    anchor = Anchor("hold", 3.0, {n: p.detach() for n, p in frozen.named_parameters()})
    anchor.add_gradients(lora.weights(model))
    slopes = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def value(part: str, by: float) -> float:
        moved = [(model.get_parameter(n), slope * by) for n, slope in slopes.items() if part in n]
        with torch.no_grad():
            for p, step in moved:
                p.add_(step)
            total = sum(((p - anchor.center[n]) ** 2).sum().item() for n, p in lora.weights(model).items())
            for p, step in moved:
                p.sub_(step)
        return 1.5 * total

    for part in ("lora_A", "lora_B", "magnitude"):
        length = math.sqrt(sum(slope.square().sum().item() for n, slope in slopes.items() if part in n))
        by = 1e-5 / length
        assert (value(part, by) - value(part, -by)) / 2e-5 == pytest.approx(length, rel=1e-5), part


@pytest.mark.parametrize("kind", ["lora", "rslora"])
def test_a_pull_on_the_merged_weights_reaches_what_is_trained(kind: str) -> None:
    """Against autograd of the penalty written out; the frozen weights beside it are pulled by nothing."""
    model, frozen = _pair(kind, dtype=torch.float64)
    _stirred(model)
    start = {n: p.detach() for n, p in frozen.named_parameters()}
    draw = torch.Generator().manual_seed(2)
    importance = {n: torch.rand(p.shape, generator=draw, dtype=p.dtype) for n, p in start.items()}
    merged = lora.weights(model)
    assert merged.keys() == start.keys()
    terms = [(importance[n] * (merged[n] - start[n]).square()).sum() for n in start]
    torch.stack(terms).sum().mul(1.5).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(expected) == 2 * 2 * 7
    model.zero_grad()
    pulled = Anchor("hold", 3.0, start, importance).add_gradients(lora.weights(model))
    assert pulled["hold"].item() == pytest.approx(1.5 * sum(t.item() for t in terms), rel=1e-12)
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in expected)
        if p.grad is not None:
            assert torch.allclose(p.grad, expected[name], rtol=1e-12, atol=1e-14), name


# -- embedding and head, trained in full -------------------------------------------------------------------------------


def _loss(model: Transformer) -> torch.Tensor:
    """Of a head that is called in chunks of three positions."""
    ids = torch.arange(24).view(2, 12)
    out = model(ids)
    return cross_entropy(out.hidden, out.head, (ids + 1) % 40, max_logits=3 * 40)[0] / 24


def _trained(model: Transformer, steps: int = 3) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.any() for p in trained)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize(("family", "modules"), TRAINED)
def test_2_6_what_is_trained_in_full_starts_from_the_frozen_model_and_leaves_it_to_the_bit(
    family: str, modules: tuple[str, ...]
) -> None:
    model, frozen = _pair("lora", family, modules_to_save=modules)
    names = {"embedding.weight"} if family == "gpt2" else {f"{n}.weight" for n in modules}
    assert {n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n} == names
    assert torch.equal(_logits(model), _logits(frozen))
    _loss(model).backward()
    _loss(frozen).backward()
    for name in names:  # as if all were trained
        assert torch.equal(model.get_parameter(name).grad, frozen.get_parameter(name).grad), name  # type: ignore[arg-type]
    before = lora.reference(model)
    _trained(model)
    tuned = _logits(model)
    for n, p in frozen.named_parameters():
        assert torch.equal(model.get_parameter(n.replace("weight", "frozen") if n in names else n), p), n
    assert torch.equal(_logits(before), _logits(frozen))
    assert torch.equal(_logits(lora.reference(model)), _logits(frozen))
    assert torch.equal(_logits(model), tuned)
    for layer in lora.adapters(model):
        layer.enabled = False
    assert (_logits(model) - _logits(frozen)).abs().max() > 1e-3, "the control: corrections alone switched off"


@pytest.mark.parametrize(("family", "modules"), TRAINED)
def test_2_6_what_is_trained_in_full_is_merged_already(family: str, modules: tuple[str, ...]) -> None:
    model, frozen = _pair("dora", family, modules_to_save=modules)
    _trained(model)
    tuned, tables = _logits(model), {n: p.clone() for n, p in model.named_parameters() if "layers" not in n}
    assert lora.weights(model).keys() == dict(frozen.named_parameters()).keys()
    assert lora.weights(model)["embedding.weight"] is model.embedding.weight
    lora.merge(model)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in frozen.named_parameters()]
    assert all(torch.equal(model.get_parameter(n), t) for n, t in tables.items() if "frozen" not in n)
    assert (_logits(model) - tuned).abs().max() < 1e-5 * max(1.0, float(tuned.abs().max()))


def test_what_is_trained_in_full_decays_as_in_full_training_and_corrections_do_not() -> None:
    model, frozen = _pair("lora", modules_to_save=BOTH)
    for settings in (OptimSettings(lr=0.1, decay_embeddings=asked) for asked in (False, True)):
        decayed, _ = groups(dict(model.named_parameters()), settings)
        full, _ = groups(dict(frozen.named_parameters()), settings)
        outside = [p for n, p in frozen.named_parameters() if n in ("embedding.weight", "head.weight")]
        expected = [p.shape for p in full["params"] if any(p is o for o in outside)]
        assert [p.shape for p in decayed["params"]] == expected
        assert len(expected) == 1 + settings.decay_embeddings


# -- which matrices, and how many numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_2_6_a_layer_has_r_times_inputs_plus_outputs(family: str) -> None:
    config = _config(family=family, kv_heads=2)
    for kind in KINDS:
        settings = _settings(kind, rank=3)
        model = build(config, 0)
        frozen = sum(p.numel() for p in model.parameters())
        real = {n: (m.in_features, m.out_features) for n, m in model.layers.named_modules() if isinstance(m, nn.Linear)}
        assert linear_layers(config) == {f"layers.{n}": size for n, size in real.items()}
        lora.add_adapters(model, settings, 0)
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        by_hand = sum(3 * (i + o) + (o if kind == "dora" else 0) for i, o in real.values())
        assert sum(trained) == by_hand == adapter_parameters(settings, config)
        assert sum(p.numel() for p in model.parameters()) == frozen + by_hand


def test_E6_402_times_fewer_for_llama_7b_attention_at_rank_16() -> None:
    llama = ModelSettings(depth=32, width=4096, heads=32, ffn=11_008, context=2048).resolve(32_000)
    assert llama.parameters == 6_738_415_616
    count = adapter_parameters(AdapterSettings(rank=16, targets=("attention.*",)), llama)
    assert count == 32 * 4 * 16 * (4096 + 4096) == 16_777_216
    assert round(llama.parameters / count) == 402


def test_E6_94_times_fewer_for_124m_all_linear_layers_at_rank_8() -> None:
    gpt2 = ModelSettings(family="gpt2", depth=12, context=1024).resolve(50_257)
    assert gpt2.parameters == 124_439_808
    count = adapter_parameters(AdapterSettings(rank=8), gpt2)
    assert count == 12 * 8 * (4 * (768 + 768) + 2 * (768 + 3072)) == 1_327_104
    assert round(gpt2.parameters / count) == 94
    assert count / gpt2.parameters == pytest.approx(0.0107, abs=5e-5)  # 94 times fewer is 1.07 %


@pytest.mark.parametrize(("targets", "matrices"), [(("attention.*",), 4), (("q", "v"), 2)])
def test_E6_under_1_percent_of_124m_at_rank_8_on_attention(targets: tuple[str, ...], matrices: int) -> None:
    """0.47 % on its four projections, 0.24 % on queries and values; on all matrices it is 1.07 % (above)."""
    gpt2 = ModelSettings(family="gpt2", depth=12, context=1024).resolve(50_257)
    count = adapter_parameters(AdapterSettings(rank=8, targets=targets), gpt2)
    assert count == 12 * matrices * 8 * (768 + 768)
    assert count / gpt2.parameters <= 0.01
    assert count / gpt2.parameters == pytest.approx(matrices * 0.00118, abs=2e-5)


def test_E6_what_is_trained_in_full_counts_in_full_and_a_tied_head_once() -> None:
    gpt2 = ModelSettings(family="gpt2", depth=12, context=1024).resolve(50_257)
    untied = gpt2.model_copy(update={"tied": False})
    table, rank_8 = 50_257 * 768, 12 * 4 * 8 * (768 + 768)
    for modules, tables, of in ((BOTH, 1, gpt2), (("head",), 1, gpt2), (BOTH, 2, untied), (("head",), 1, untied)):
        settings = AdapterSettings(rank=8, targets=("attention.*",), modules_to_save=modules)  # type: ignore[arg-type]
        assert adapter_parameters(settings, of) == rank_8 + tables * table
    for family, modules in TRAINED:
        model, frozen = _pair("dora", family, modules_to_save=modules)
        settings = _settings("dora", modules_to_save=modules)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained == adapter_parameters(settings, model.config)
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in frozen.parameters()) + trained


def test_only_embedding_and_head_are_trained_in_full() -> None:
    one, two = (AdapterSettings(modules_to_save=m) for m in (("head", "embedding", "head"), BOTH))  # type: ignore[arg-type]
    assert one == two, "neither order nor repetition is part of a key"
    with pytest.raises(ValueError, match=r"modules_to_save\.0\n *Input should be 'embedding' or 'head'"):
        AdapterSettings.model_validate({"modules_to_save": ["norm"]})


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (("q",), {"layers.0.attention.q", "layers.1.attention.q"}),
        (("layers.1.*",), {f"layers.1.{n}" for n in ("attention.q", "attention.k", "attention.v", "attention.o")}
         | {f"layers.1.ffn.{n}" for n in ("gate", "up", "down")}),
        (("0.attention.[qv]", "layers.1.ffn.up"),
         {"layers.0.attention.q", "layers.0.attention.v", "layers.1.ffn.up"}),
    ],
)  # fmt: skip
def test_patterns_name_matrices(targets: tuple[str, ...], found: set[str]) -> None:
    settings = AdapterSettings(targets=targets)
    assert set(adapted_layers(settings, _config())) == found
    model = build(_config(), 0)
    lora.add_adapters(model, settings, 0)
    assert {n for n, m in model.named_modules() if isinstance(m, lora.LoRALinear)} == found


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("q_proj", "names end in attention|names end in down"),
        ("head", "in full with modules_to_save"),
        ("embed*", "in full"),
    ],
)
def test_a_pattern_that_fits_no_model_is_refused_with_the_recipe(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"'{pattern.replace('*', '.')}.*{says}"):
        AdapterSettings(targets=("q", pattern))


def test_a_pattern_that_fits_not_this_model_is_refused() -> None:
    for family, pattern in (("gpt2", "gate"), ("llama", "layers.2.*")):
        with pytest.raises(UserError, match=r"adapter\.targets: '.*' matches no matrix, expected"):
            lora.add_adapters(build(_config(family=family), 0), AdapterSettings(targets=("q", pattern)), 0)
