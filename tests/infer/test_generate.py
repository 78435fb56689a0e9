"""G2: generation with a cache against the full forward, and rows that do not notice their neighbours."""

import numpy as np
import pytest
import torch

from ingot.core.errors import UserError
from ingot.infer.generate import generate, uniforms
from ingot.model.ops import token_logps
from ingot.model.settings import ModelSettings
from ingot.model.transformer import build

VOCAB = 37


@pytest.fixture(scope="module")
def model():
    config = ModelSettings(depth=3, width=48, heads=6, kv_heads=2, context=64, tied=False).resolve(VOCAB)
    model = build(config, seed=0)
    with torch.no_grad():  # as if trained: at initialisation all tokens are nearly equally likely
        model.head.weight.mul_(12)
        model.embedding.weight.mul_(8)
        for block in model.layers.values():
            block.attention.o.weight.mul_(8)
            block.ffn.down.weight.mul_(8)
    return model


def _prompts(lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(VOCAB, size=n) for n in lengths]


def _logps(model, ids, temperature=1.0):
    ids = torch.as_tensor(np.asarray(ids))[None]
    with torch.inference_mode():
        out = model(ids[:, :-1])
        return token_logps(out.hidden, out.head, ids[:, 1:], temperature=temperature)[0].numpy()


def test_G2_greedy_with_a_cache_equals_the_full_forward(model):
    prompts = _prompts([1, 7, 3, 20])
    completions = generate(model, prompts, max_new=44, temperature=0)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.ids) == min(44, 64 - len(prompt))
        ids = [*prompt, *completion.ids]
        with torch.inference_mode():
            out = model(torch.tensor([ids[:-1]]))
            greedy = out.head(out.hidden[0, len(prompt) - 1 :]).argmax(dim=-1)
        assert completion.ids.tolist() == greedy.tolist()
        np.testing.assert_allclose(completion.logps, _logps(model, ids)[len(prompt) - 1 :], atol=1e-5)
    assert len({tuple(c.ids) for c in completions}) == 4
    assert len(set(completions[0].ids.tolist())) > 3


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_G2_sampled_log_probabilities_are_the_models(model, temperature, top_p):
    prompts = _prompts([5, 2, 9])
    for prompt, completion in zip(
        prompts, generate(model, prompts, max_new=30, temperature=temperature, top_p=top_p, seed=3), strict=True
    ):
        expected = _logps(model, [*prompt, *completion.ids], temperature)[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logps, expected, atol=1e-5)


def test_G2_a_row_does_not_depend_on_its_batch(model):
    prompts = _prompts([5, 2, 9, 14])
    together = generate(model, prompts, max_new=30, seed=3, step=2)
    for row, prompt in enumerate(prompts):
        (alone,) = generate(model, [prompt], max_new=30, seed=3, step=2, keys=[(row, 0)])
        assert alone.ids.tolist() == together[row].ids.tolist()
        np.testing.assert_allclose(alone.logps, together[row].logps, atol=1e-5)


def test_G2_rows_that_stop_leave_the_others_alone(model):
    prompts = _prompts([5, 2, 9, 14, 1, 1, 1, 1])
    free = generate(model, prompts, max_new=40, seed=1)
    stop = frozenset({1, 2, 3})
    for whole, cut in zip(free, generate(model, prompts, max_new=40, seed=1, stop=stop), strict=True):
        ends = [i for i, token in enumerate(whole.ids.tolist()) if token in stop]
        kept = ends[0] + 1 if ends else len(whole.ids)
        assert cut.ids.tolist() == whole.ids[:kept].tolist()
        assert cut.stopped == bool(ends)
    assert any(c.stopped for c in generate(model, prompts, max_new=40, seed=1, stop=stop))


def test_G2_keys_make_the_randomness(model):
    prompt = _prompts([4])[0]

    def sample(**options):
        return generate(model, [prompt], max_new=20, **options)[0].ids.tolist()

    base = sample(seed=1, step=1, keys=[(0, 0)])
    assert base == sample(seed=1, step=1, keys=[(0, 0)])
    others = [(2, 1, (0, 0)), (1, 2, (0, 0)), (1, 1, (1, 0)), (1, 1, (0, 1))]
    drawn = {tuple(sample(seed=seed, step=step, keys=[key])) for seed, step, key in others}
    assert len(drawn | {tuple(base)}) == 5


def test_G2_top_p_keeps_the_nucleus(model):
    prompt = _prompts([4])[0]
    with torch.inference_mode():
        out = model(torch.as_tensor(prompt)[None])
        p = torch.softmax(out.head(out.hidden[0, -1]), dim=-1)
    order = p.argsort(descending=True)
    nucleus = set(order[: int((p[order].cumsum(0) < 0.5).sum()) + 1].tolist())
    assert 1 <= len(nucleus) < VOCAB / 2
    keys = [(0, sample) for sample in range(400)]
    drawn = {int(c.ids[0]) for c in generate(model, [prompt] * 400, max_new=1, top_p=0.5, keys=keys)}
    assert drawn <= nucleus
    assert {int(c.ids[0]) for c in generate(model, [prompt] * 5, max_new=1, top_p=1e-9)} == {int(order[0])}


def test_G2_sampled_frequencies_are_the_probabilities(model):
    prompt = _prompts([4])[0]
    keys = [(0, sample) for sample in range(4000)]
    drawn = [int(c.ids[0]) for c in generate(model, [prompt] * 4000, max_new=1, keys=keys)]
    with torch.inference_mode():
        out = model(torch.as_tensor(prompt)[None])
        p = torch.softmax(out.head(out.hidden[0, -1]), dim=-1).double().numpy()
    counts = np.bincount(drawn, minlength=VOCAB)
    assert (((counts - 4000 * p) ** 2) / (4000 * p)).sum() < 80  # chi-squared, 36 degrees of freedom: p = 3e-5


def test_uniforms_are_uniform_and_uncorrelated():
    keys = [(row, sample) for row in range(100) for sample in range(10)]
    grid = np.stack([uniforms(0, 0, keys, [position] * len(keys)) for position in range(50)])
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = np.histogram(grid, bins=20, range=(0, 1))[0]
    expected = grid.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 60  # 19 degrees of freedom
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert len(np.unique(grid)) == grid.size


def test_tokens_are_reported_as_they_appear_and_the_mode_is_restored(model):
    seen = []
    model.train()
    completions = generate(model, _prompts([3, 5]), max_new=4, on_token=lambda row, token: seen.append((row, token)))
    assert model.training
    model.eval()
    for row, completion in enumerate(completions):
        assert [token for r, token in seen if r == row] == completion.ids.tolist()
    assert generate(model, [], max_new=4) == []


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[1] * 64], {}, ["64 tokens", "context of 64"]),
        ([[1], []], {}, ["prompt 1", "empty"]),
        ([[1, VOCAB]], {}, [str(VOCAB), "vocabulary"]),
        ([[1]], {"max_new": 0}, ["max_new", "0"]),
        ([[1]], {"temperature": -1.0}, ["temperature", "-1"]),
        ([[1]], {"top_p": 0.0}, ["top_p", "0"]),
    ],
)
def test_bad_input_is_one_sentence(model, prompts, options, words):
    with pytest.raises(UserError) as caught:
        generate(model, prompts, **{"max_new": 3, **options})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_G2_short_prompts_go_on_when_a_long_one_has_filled_the_context():
    from ingot.infer.generate import generate

    model = build(ModelSettings(depth=1, width=16, heads=2, context=16).resolve(11), seed=0)
    short, long = generate(model, [[1], list(range(1, 10))], max_new=14, temperature=0)
    assert (len(short.ids), len(long.ids)) == (14, 7)
