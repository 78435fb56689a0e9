"""G1, G2, D8: what holds for the default holds for GPT-2's, Mistral's and Qwen's style, and for mixtures of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.model import attention
from ingot.model.config import ModelConfig, ModelSettings, RopeScaling
from ingot.model.losses import cross_entropy
from ingot.model.transformer import Transformer, build
from ingot.optim.groups import decays
from tests.model.helpers import set_impl

SMALL = {"depth": 2, "width": 48, "heads": 6, "context": 64}
SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16)
FAMILIES = {
    "llama": {"family": "llama", "kv_heads": 2, "rope_scaling": SCALING},
    "gpt2": {"family": "gpt2"},
    "mistral": {"family": "mistral", "kv_heads": 2, "window": 11},
    "qwen2": {"family": "qwen2", "kv_heads": 3, "tied": True},
    "qwen3": {"family": "qwen3", "kv_heads": 2, "head_size": 16},
    "all at once": {
        **{"positions": "learned", "norm": "layer", "activation": "gelu", "bias": "all", "qk_norm": True},
        **{"window": 7, "kv_heads": 1, "head_size": 10},
    },
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def _config(family, **overrides):
    return ModelSettings(**{**SMALL, **FAMILIES[family], **overrides}).resolve(65)


def _ids(*shape, vocab=65, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _noisy(config, dtype=torch.float32):
    """A model in which every bias and gain matters."""
    model = build(config, seed=0, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return model


@EVERY_FAMILY
@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_G1_a_changed_future_token_leaves_earlier_logits_bit_identical(monkeypatch, family, impl, dtype):
    model = _noisy(_config(family), dtype)
    set_impl(monkeypatch, impl)
    ids = _ids(2, 40)
    with torch.no_grad():
        before = model(ids).logits
        ids[:, 25] = (ids[:, 25] + 1) % 65
        after = model(ids).logits
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.equal(before[:, 25], after[:, 25])


@EVERY_FAMILY
def test_D8_C6_a_packed_document_equals_the_same_document_alone(monkeypatch, family):
    """Also with learned positions, which therefore begin again in every document."""
    model = _noisy(_config(family), torch.float64)
    ids, documents = _ids(1, 40), torch.tensor([[3] * 15 + [1] * 25])
    with torch.no_grad():
        for impl in ("sdpa", "eager"):
            set_impl(monkeypatch, impl)
            packed = model(ids, documents_BT=documents).hidden
            for part in (slice(0, 15), slice(15, 40)):
                alone = model(ids[:, part]).hidden
                torch.testing.assert_close(packed[:, part], alone, rtol=1e-11, atol=1e-11)


@EVERY_FAMILY
@pytest.mark.parametrize("isolated", [False, True])
def test_D8_implementations_agree_through_the_whole_model(monkeypatch, family, isolated):
    model = _noisy(_config(family), torch.float64)
    ids = _ids(2, 41)
    documents = _ids(2, 40, vocab=4, seed=1).sort(dim=1).values if isolated else None
    gradients = []
    for impl in ("sdpa", "eager"):
        set_impl(monkeypatch, impl)
        model.zero_grad()
        out = model(ids[:, :-1], documents_BT=documents)
        cross_entropy(out.hidden, out.head, ids[:, 1:])[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-12 * gradients[1].norm()


def test_autocast_keeps_normed_queries_in_half_precision(monkeypatch):
    """Otherwise they would choose the kernel, and the memory, of float32."""
    model, seen = _noisy(_config("qwen3")), []
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, k, v, *rest: seen.extend([q, k, v]) or attend(q, k, v, *rest))
    with torch.no_grad():
        exact = model(_ids(2, 40)).hidden
        seen.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(_ids(2, 40)).hidden
    assert {tensor.dtype for tensor in seen} == {torch.bfloat16}
    assert (half.float() - exact).norm() < 0.1 * exact.norm()


def test_a_token_sees_exactly_its_window(monkeypatch):
    """In one layer, a changed token reaches the `window` - 1 tokens behind it and none after."""
    model = _noisy(_config("mistral", depth=1))
    ids = _ids(1, 40)
    for impl in ("sdpa", "eager"):
        set_impl(monkeypatch, impl)
        with torch.no_grad():
            before = model(ids).hidden
            changed = ids.clone()
            changed[:, 10] = (ids[:, 10] + 1) % 65
            after = model(changed).hidden
        differs = (before != after).any(dim=-1)[0]
        assert differs.nonzero().flatten().tolist() == list(range(10, 10 + 11))


def test_a_window_as_long_as_the_row_is_no_window():
    narrow = _config("mistral", window=40)
    models = [build(config, seed=0) for config in (narrow, narrow.model_copy(update={"window": None}))]
    with torch.no_grad():
        first, second = (model(_ids(2, 40)).hidden for model in models)
    assert torch.equal(first, second)


def test_learned_positions_are_a_table_of_the_context():
    model = _noisy(_config("gpt2"))
    ids = _ids(1, 64)
    with torch.no_grad():
        before = model(ids).hidden
        model.position_embedding.weight[30] += 1
        after = model(ids).hidden
    assert torch.equal(before[:, :30], after[:, :30])
    assert (before[:, 30:] != after[:, 30:]).any(dim=-1).all()
    with pytest.raises(AssertionError, match="65 tokens exceed the context of 64"):
        model(_ids(1, 65))


@EVERY_FAMILY
def test_positions_of_the_row_are_those_that_are_not_given(family):
    """Learned ones are not looked up then; their gradients are added up in another order."""
    model, ids = _noisy(_config(family)), _ids(3, 40)
    found = []
    for positions in (None, torch.arange(40)[None], torch.arange(40).expand(3, 40)):
        hidden = model(ids, positions_BT=positions).hidden
        found.append(
            [hidden, *torch.autograd.grad(hidden.square().sum(), list(model.parameters()), materialize_grads=True)]
        )
    for others in found[1:]:
        assert torch.equal(found[0][0], others[0])
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@EVERY_FAMILY
def test_dropout_is_off_in_evaluation_and_seeded_in_training(monkeypatch, family):
    model, plain = _noisy(_config(family, dropout=0.2)), _noisy(_config(family))
    ids = _ids(2, 40)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).hidden, plain(ids).hidden)
        model.train()
        for impl in ("sdpa", "eager"):
            set_impl(monkeypatch, impl)
            outputs = []
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                outputs.append(model(ids).hidden)
            assert torch.equal(outputs[0], outputs[1])
            assert not torch.equal(outputs[0], outputs[2])


def test_dropout_reaches_the_embedding_and_both_branches():
    torch.manual_seed(0)
    model = _noisy(_config("gpt2", dropout=0.25, depth=1)).train()
    kept = []
    for branch in (model.layers["0"].attention, model.layers["0"].ffn):
        branch.register_forward_hook(lambda *a: kept.append(a[2][0] if isinstance(a[2], tuple) else a[2]))
    with torch.no_grad():
        taps = model(_ids(8, 40), taps=frozenset({"hidden.0", "hidden.1"})).taps
    first, last = taps["hidden.0"], taps["hidden.1"]
    count = first.numel()
    assert abs((first == 0).float().mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / count)
    added = last - first  # 0 where both branches were dropped; elsewhere one or both, scaled up
    assert abs((added == 0).float().mean() - 0.25**2) < 4 * math.sqrt(0.0625 / count)
    assert len(kept) == 2


@pytest.mark.parametrize("tied", [True, False])
@EVERY_FAMILY
@pytest.mark.parametrize(
    "shape",
    [
        {"width": 128, "depth": 4, "heads": 4},
        {"width": 128, "depth": 16, "heads": 4},
        {"width": 1024, "depth": 2, "heads": 16, "head_size": 32, "ffn": 256},
        {"width": 4096, "depth": 1, "heads": 8, "head_size": 32, "ffn": 256},
    ],
)
def test_D1_first_loss_is_ln_V_in_every_family(family, shape, tied):
    shape = {"head_size": None, "kv_heads": 1, "context": 64, **shape}
    config = _config(family, **shape, tied=tied).model_copy(update={"vocab": 2048})
    model = build(config, seed=1)
    ids = _ids(4, 65, vocab=2048)
    with torch.no_grad():
        out = model(ids[:, :-1])
        nll, count = cross_entropy(out.hidden, out.head, ids[:, 1:])
    assert (nll / count).item() == pytest.approx(math.log(2048), abs=0.05)


def test_biases_start_at_zero_and_gains_at_one():
    model = build(_config("all at once"), seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std() > 0, name


def _configs():
    heads = st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 6)])
    return st.builds(
        lambda heads, half, context, **rest: ModelConfig(
            **{**rest, "heads": heads[0], "kv_heads": heads[1], "head_size": 2 * half, "context": context},
            **{"rope_theta": 1e4, "rope_scaling": None, "norm_eps": 1e-5, "dropout": 0.0},
        ),
        heads=heads,
        half=st.integers(1, 5),
        context=st.integers(1, 40),
        vocab=st.integers(1, 50),
        depth=st.integers(1, 3),
        width=st.integers(1, 30),
        ffn=st.integers(1, 40),
        tied=st.booleans(),
        positions=st.sampled_from(["rope", "learned"]),
        window=st.none() | st.integers(1, 9),
        norm=st.sampled_from(["rms", "layer"]),
        qk_norm=st.booleans(),
        activation=st.sampled_from(["swiglu", "gelu", "gelu-tanh"]),
        bias=st.sampled_from(["none", "qkv", "all"]),
    )


@settings(max_examples=60, deadline=None)
@given(_configs())
def test_parameters_are_exact_by_part_for_every_combination(config):
    with torch.device("meta"):
        model = Transformer(config)
    sums = dict.fromkeys(config.parameters_by_module(), 0)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if any(part.endswith("norm") for part in parts):
            part = "norms"
        elif "attention" in parts or "ffn" in parts:
            part = "attention" if "attention" in parts else "feed-forward"
        else:
            part = "positions" if parts[0] == "position_embedding" else parts[0]
        sums[part] += parameter.numel()
    assert sums == config.parameters_by_module()
    assert sum(sums.values()) == config.parameters


@pytest.mark.parametrize(
    ("table", "vocab", "count"),
    [
        ({"depth": 6, "width": 512, "heads": 8, "context": 256}, 65, 19_079_680),
        ({"depth": 12, "context": 512}, 32_000, 110_025_216),
        ({"depth": 12, "context": 1024}, 50_257, 124_439_808),
        ({"depth": 24, "width": 1024, "context": 1024}, 50_257, 354_823_168),
        ({"depth": 48, "width": 1600, "heads": 25, "context": 1024}, 50_257, 1_557_611_200),
    ],
)
def test_G1_shapes_in_GPT2s_style(table, vocab, count):
    """000's, 002's and 003's shapes, then GPT-2 medium and XL: 354.8M and 1,557.6M as released."""
    config = ModelSettings(**table, family="gpt2").resolve(vocab)
    with torch.device("meta"):
        model = Transformer(config)
        out = model(torch.zeros(2, config.context, dtype=torch.long))
    assert out.hidden.shape == (2, config.context, config.width)
    assert out.head(out.hidden[:, -1]).shape == (2, vocab)
    assert sum(p.numel() for p in model.parameters()) == config.parameters == count


@pytest.mark.parametrize(
    ("table", "vocab", "count"),
    [
        ({"family": "llama", "depth": 32, "width": 4096, "heads": 32, "context": 2048}, 32_000, 6_738_415_616),
        (
            {"family": "mistral", "depth": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336},
            *(32_000, 7_241_732_096),
        ),
        (
            {"family": "qwen2", "depth": 24, "width": 896, "heads": 14, "kv_heads": 2, "ffn": 4864, "tied": True},
            *(151_936, 494_032_768),
        ),
        (
            {
                **{"family": "qwen3", "depth": 28, "width": 1024, "heads": 16, "kv_heads": 8, "head_size": 128},
                **{"ffn": 3072, "tied": True},
            },
            *(151_936, 596_049_920),
        ),
    ],
)
def test_G1_published_models_have_their_published_counts(table, vocab, count):
    """LLaMA-7B, Mistral-7B, Qwen2.5-0.5B, Qwen3-0.6B."""
    config = ModelSettings(**table).resolve(vocab)
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters == count


def test_F5_full_size_is_SwiGLU_of_11008_source_error():
    """001's block is GELU with a d_ff of 10,952, which is neither 8/3 x 4,096 nor a multiple of 64."""
    config = ModelSettings(depth=32, width=4096, heads=32, context=4096).resolve(128_000)
    assert (config.activation, config.ffn) == ("swiglu", 11_008)
    assert config.ffn % 64 == 0 != 10_952 % 64
    with torch.device("meta"):
        block = Transformer(config.model_copy(update={"depth": 1})).layers["0"]
    assert {n for n, _ in block.ffn.named_parameters()} == {"gate.weight", "up.weight", "down.weight"}


def test_D3_no_norm_and_no_bias_decays_source_error():
    """001's list of names misses its own norms; the rule by shape has no list to fall out of date."""
    for family in FAMILIES:
        with torch.device("meta"):
            model = Transformer(_config(family))
        for name, parameter in model.named_parameters():
            vector = "norm" in name or name.endswith(".bias")
            assert decays(name, parameter) == (not vector), name
        if family == "gpt2":
            assert not decays("position_embedding.weight", model.position_embedding.weight, embeddings=False)


def test_D13_004s_model_has_0_8_million_parameters_source_error():
    """Not "about 200k": nanoGPT's model without biases, 4 layers of 128, 64 positions, 65 symbols."""
    config = ModelSettings(family="gpt2", bias="none", depth=4, width=128, heads=4, context=64).resolve(65)
    assert config.parameters == 804_096


@EVERY_FAMILY
@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_D8_C5_padding_is_not_attended_to_source_error(monkeypatch, family, impl):
    """Both of 001's code paths ignore its attention_mask. Padding is a document of its own here, on either side."""
    model = _noisy(_config(family))
    set_impl(monkeypatch, impl)
    ids, text = _ids(1, 40), slice(9, 31)
    documents = torch.tensor([[-1] * 9 + [0] * 22 + [-2] * 9])
    with torch.no_grad():
        before = model(ids, documents_BT=documents).hidden
        ids[:, :9], ids[:, 31:] = 0, 7
        after = model(ids, documents_BT=documents).hidden
        unmasked = model(ids).hidden
    assert torch.equal(before[:, text], after[:, text])
    assert not torch.allclose(unmasked[:, 9:18], after[:, 9:18])
