"""D1, D8, G1: first loss, causality, documents, shapes, initialisation, taps and the cache of the decoder."""

import math

import pytest
import torch

from ingot.model.attention import document_mask
from ingot.model.config import ModelSettings
from ingot.model.losses import IGNORE, cross_entropy
from ingot.model.transformer import Transformer, build
from tests.model.helpers import set_impl

SMALL = {"depth": 3, "width": 48, "heads": 6, "kv_heads": 2, "context": 64}


def _ids(vocab, *shape, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def _first_loss(config, seed):
    model = build(config, seed)
    rows = max(1, 256 // config.context)
    ids = _ids(config.vocab, rows, min(config.context, 256) + 1, seed=seed)
    with torch.no_grad():
        out = model(ids[:, :-1])
        nll, count = cross_entropy(out.hidden, out.head, ids[:, 1:])
    return (nll / count).item()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("vocab", "nats", "shape"),
    [
        (65, 4.174, {"depth": 4, "width": 128, "heads": 4, "context": 64}),
        (65, 4.174, {"depth": 6, "width": 384, "heads": 6, "context": 256}),
        (65, 4.174, {"depth": 1, "width": 768}),
        (65, 4.174, {"depth": 16, "width": 64}),
        (10, 2.303, {"depth": 1, "width": 128}),
        (256, 5.545, {"depth": 4, "width": 128}),
        (1024, 6.931, {"depth": 4, "width": 256}),
        (4096, 8.318, {"depth": 4}),
        (50_257, 10.825, {"depth": 2, "width": 64}),
        (50_257, 10.825, {"depth": 1, "width": 768, "context": 64}),
    ],
)
def test_D1_first_loss_is_ln_V(vocab, nats, shape, tied):
    assert math.log(vocab) == pytest.approx(nats, abs=1e-3)
    assert _first_loss(ModelSettings(**shape, tied=tied).resolve(vocab), seed=1) == pytest.approx(nats, abs=0.05)


@pytest.mark.parametrize("vocab", [65, 32_000, 128_000])
def test_D1_source_error_the_loss_before_training_is_no_2_to_4(vocab):
    """001's "typical loss before training 2.0-4.0" is ln V of 7 to 55 symbols."""
    assert (round(math.exp(2)), round(math.exp(4))) == (7, 55)
    first = _first_loss(ModelSettings(depth=1, width=64, context=64).resolve(vocab), seed=1)
    assert first == pytest.approx(math.log(vocab), abs=0.05)
    assert first > 4.1


@pytest.mark.parametrize("impl", [None, "sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_G1_a_changed_future_token_leaves_earlier_logits_bit_identical(monkeypatch, impl, dtype):
    model = build(ModelSettings(**SMALL).resolve(65), seed=0, dtype=dtype)
    set_impl(monkeypatch, impl)
    ids = _ids(65, 2, 40)
    with torch.no_grad():
        before = model(ids).logits
        ids[:, 25] = (ids[:, 25] + 1) % 65
        after = model(ids).logits
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.equal(before[:, 25:], after[:, 25:])


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_D8_a_changed_token_in_one_document_leaves_another_bit_identical(monkeypatch, impl):
    model = build(ModelSettings(**SMALL).resolve(65), seed=0)
    set_impl(monkeypatch, impl)
    ids, documents = _ids(65, 2, 40), torch.tensor([[0] * 15 + [1] * 25, [3] * 30 + [7] * 10])
    with torch.no_grad():
        before = model(ids, documents_BT=documents).logits
        ids[:, 5] = (ids[:, 5] + 1) % 65
        after = model(ids, documents_BT=documents).logits
        leaky = model(ids).logits
    assert torch.equal(before[0, 15:], after[0, 15:])
    assert torch.equal(before[1, 30:], after[1, 30:])
    assert not torch.equal(before[0, 5:15], after[0, 5:15])
    assert not torch.allclose(leaky[0, 15:], after[0, 15:])


def test_D8_a_packed_document_equals_the_same_document_alone():
    model = build(ModelSettings(**SMALL).resolve(65), seed=0, dtype=torch.float64)
    ids, documents = _ids(65, 1, 40), torch.tensor([[0] * 15 + [1] * 25])
    positions = torch.tensor([[*range(15), *range(25)]])
    with torch.no_grad():
        alone = model(ids[:, 15:]).hidden
        for given in (None, positions):
            packed = model(ids, documents_BT=documents, positions_BT=given).hidden
            torch.testing.assert_close(packed[:, 15:], alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("isolated", [False, True])
def test_D8_implementations_agree_through_the_whole_model(monkeypatch, dtype, tolerance, isolated):
    model = build(ModelSettings(**SMALL).resolve(65), seed=0, dtype=dtype)
    ids = _ids(65, 2, 41)
    documents = _ids(4, 2, 40, seed=1).sort(dim=1).values if isolated else None
    gradients = []
    for impl in ("sdpa", "eager"):
        set_impl(monkeypatch, impl)
        model.zero_grad()
        out = model(ids[:, :-1], documents_BT=documents)
        cross_entropy(out.hidden, out.head, ids[:, 1:])[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() <= tolerance * gradients[1].norm()


@pytest.mark.parametrize(
    ("table", "vocab", "millions"),
    [
        ({"depth": 6, "width": 512, "heads": 8, "context": 256, "tied": True}, 65, 19.3),
        ({"depth": 12, "width": 768, "heads": 12, "context": 512, "tied": True}, 32_000, 109.5),
        ({"depth": 12, "width": 768, "heads": 12, "context": 1024, "tied": True}, 50_257, 123.6),
        ({"depth": 32, "width": 4096, "heads": 32, "context": 4096, "tied": False}, 128_000, 7524.8),
        ({"depth": 4, "width": 256, "kv_heads": 2, "tied": True}, 4096, 4.0),
    ],
)
def test_G1_shapes(table, vocab, millions):
    config = ModelSettings(**table).resolve(vocab)
    with torch.device("meta"):
        model = Transformer(config)
        out = model(torch.zeros(2, config.context, dtype=torch.long))
    assert out.hidden.shape == (2, config.context, config.width)
    assert out.head(out.hidden[:, -1]).shape == (2, vocab)
    count = sum(p.numel() for p in model.parameters())
    assert count == config.parameters
    assert count / 1e6 == pytest.approx(millions, abs=0.06)


def test_G1_parameter_names_are_stable():
    names = [name for name, _ in Transformer(ModelSettings(depth=1, tied=False).resolve(65)).named_parameters()]
    assert names == [
        "embedding.weight",
        "layers.0.attention_norm.weight",
        *(f"layers.0.attention.{part}.weight" for part in "qkvo"),
        "layers.0.ffn_norm.weight",
        *(f"layers.0.ffn.{part}.weight" for part in ("gate", "up", "down")),
        "norm.weight",
        "head.weight",
    ]


def test_initialisation_depends_on_the_seed_alone():
    config = ModelSettings(**SMALL).resolve(65)
    first = build(config, seed=3).state_dict()
    torch.manual_seed(99)
    second = build(config, seed=3).state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name])
    assert not torch.equal(first["embedding.weight"], build(config, seed=4).embedding.weight)
    double = build(config, seed=3, dtype=torch.float64).embedding.weight
    torch.testing.assert_close(double.float(), first["embedding.weight"], rtol=1e-6, atol=0)


def test_output_projections_start_smaller_with_depth():
    for depth in (2, 8):
        model = build(ModelSettings(depth=depth, width=256).resolve(65), seed=0)
        for block in model.layers.values():
            ratio = block.ffn.down.weight.std() / block.ffn.up.weight.std()
            assert ratio.item() == pytest.approx(1 / math.sqrt(2 * depth), rel=0.05)


def test_an_unknown_parameter_is_not_left_uninitialised():
    model = Transformer(ModelSettings(**SMALL).resolve(65))
    model.layers["0"].register_module("extra", torch.nn.Linear(2, 2))
    with pytest.raises(AssertionError, match="extra"):
        list(model.initial_weights(torch.Generator()))


def test_all_ignored_gives_every_parameter_a_zero_gradient():
    for tied in (True, False):
        model = build(ModelSettings(**SMALL, tied=tied).resolve(65), seed=0)
        ids = _ids(65, 2, 10)
        out = model(ids)
        nll, _ = cross_entropy(out.hidden, out.head, torch.full_like(ids, IGNORE))
        nll.backward()
        assert nll == 0
        for parameter in model.parameters():
            assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_attention_follows_from_the_taps_of_queries_and_keys():
    model = build(ModelSettings(**SMALL).resolve(65), seed=0, dtype=torch.float64)
    ids, documents = _ids(65, 2, 10), torch.tensor([[0] * 4 + [1] * 6, [0] * 10])
    names = [f"{name}.2" for name in ("query", "key", "value", "attention")]
    q, k, v, p = (model(ids, documents_BT=documents, taps=frozenset(names)).taps[name] for name in names)
    assert (q.shape, k.shape, v.shape) == ((2, 6, 10, 8), (2, 2, 10, 8), (2, 2, 10, 8))
    scores = q @ k.repeat_interleave(3, 1).transpose(2, 3) / 8**0.5
    mask = document_mask(documents)[:, None]
    torch.testing.assert_close(scores.masked_fill(~mask, -torch.inf).softmax(-1), p)


def test_taps_return_what_they_name_and_change_nothing():
    model = build(ModelSettings(**SMALL).resolve(65), seed=0)
    ids = _ids(65, 2, 10)
    with torch.no_grad():
        out = model(ids, taps=frozenset({"hidden.0", "hidden.3", "attention.1"}))
        torch.testing.assert_close(out.hidden, model(ids).hidden, rtol=1e-5, atol=1e-5)
        assert torch.equal(out.taps["hidden.0"], model.embedding(ids))
        assert torch.equal(model.norm(out.taps["hidden.3"]), out.hidden)
    assert out.taps["attention.1"].shape == (2, 6, 10, 10)
    torch.testing.assert_close(out.taps["attention.1"].sum(-1), torch.ones(2, 6, 10))
    for name in ("attention.3", "hidden.4", "value.3", "logits"):
        with pytest.raises(ValueError, match=f"tap '{name}' does not exist in a model of 3 layers"):
            model(ids, taps=frozenset({name}))
