"""G2: generation with a cache against the full forward pass, and rows that do not depend on their neighbours.

By PyTorch's operations and by the CPU's.
"""

import numpy as np
import pytest
import torch

from ingot.core.errors import UserError
from ingot.infer.generate import Generation, generate
from ingot.infer.sampling import Sampling, uniforms
from ingot.model.backend import TORCH, Backend
from ingot.model.config import FAMILIES, ModelSettings
from ingot.model.losses import token_logps
from ingot.model.transformer import build
from tests.infer.cpu import HAS_BACKENDS, cpu_backend

VOCAB = 37


@pytest.fixture(scope="module", params=[TORCH, *([cpu_backend()] if HAS_BACKENDS else [])], ids=lambda b: b.name)
def backend(request) -> Backend:
    return request.param


@pytest.fixture(scope="module")
def model(backend):
    config = ModelSettings(depth=3, width=48, heads=6, kv_heads=2, context=64, tied=False).resolve(VOCAB)
    model = build(config, seed=0)
    with torch.no_grad():  # as if trained: at initialisation all tokens are nearly equally likely
        model.head.weight.mul_(12)
        model.embedding.weight.mul_(8)
        for block in model.layers.values():
            block.attention.o.weight.mul_(8)
            block.ffn.down.weight.mul_(8)
    model.backend = backend
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
    completions = generate(model, prompts, Sampling(max_new=44, temperature=0))
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


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new=30),
        Sampling(max_new=30, temperature=0.7, top_k=9, top_p=0.9, min_p=0.05),
        Sampling(max_new=30, temperature=1.4, repetition_penalty=1.5),
        Sampling(max_new=30, temperature=0, repetition_penalty=1.5),
    ],
)
def test_G2_log_probabilities_are_the_models_whatever_truncates_or_penalises(model, sampling):
    prompts = _prompts([5, 2, 9])
    for prompt, completion in zip(prompts, generate(model, prompts, sampling, seed=3), strict=True):
        expected = _logps(model, [*prompt, *completion.ids], sampling.temperature or 1.0)[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logps, expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_G2_every_family_with_a_cache_equals_its_full_forward(family, backend):
    window = {"window": 6} if FAMILIES[family].window else {}
    config = ModelSettings(family=family, depth=2, width=32, heads=4, context=24, **window).resolve(VOCAB)
    model = build(config, seed=1)
    model.backend = backend
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    prompts = _prompts([2, 11, 5])
    completions = generate(model, prompts, Sampling(temperature=1.0, repetition_penalty=1.2), samples=2, seed=4)
    for place, completion in enumerate(completions):
        prompt = prompts[place // 2]
        assert completion.stop_reason == "context"
        expected = _logps(model, [*prompt, *completion.ids])[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logps, expected, atol=2e-5)


def test_G2_a_row_does_not_depend_on_its_batch(model):
    prompts = _prompts([5, 2, 9, 14])
    sampling = Sampling(max_new=30, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.3)
    together = generate(model, prompts, sampling, samples=3, seed=3, step=2)
    assert len({tuple(c.ids) for c in together}) == 12
    for row, prompt in enumerate(prompts):
        for sample in range(3):
            (alone,) = generate(model, [prompt], sampling, seed=3, step=2, keys=[(row, sample)])
            assert alone.ids.tolist() == together[3 * row + sample].ids.tolist()
            np.testing.assert_allclose(alone.logps, together[3 * row + sample].logps, atol=1e-5)


def test_G2_a_batch_may_be_split_over_prompts_and_over_samples(model):
    prompts, sampling = _prompts([5, 2]), Sampling(max_new=12, temperature=1.2)
    together = [c.ids.tolist() for c in generate(model, prompts, sampling, samples=4, seed=1)]
    first, second = (
        generate(model, prompts, sampling, samples=2, seed=1, keys=[(0, sample), (1, sample)]) for sample in (0, 2)
    )
    parts = [*first[:2], *second[:2], *first[2:], *second[2:]]
    assert [c.ids.tolist() for c in parts] == together


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_G2_rows_that_stop_leave_the_others_alone(model, penalty):
    prompts = _prompts([5, 2, 9, 14, 1, 1, 1, 1])
    free = generate(model, prompts, Sampling(max_new=12, repetition_penalty=penalty), seed=1)
    stop = frozenset({1, 2, 3})
    stopped = generate(model, prompts, Sampling(max_new=12, repetition_penalty=penalty, stop=stop), seed=1)
    for complete, cut in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(complete.ids.tolist()) if token in stop]
        length = ends[0] + 1 if ends else len(complete.ids)
        assert cut.ids.tolist() == complete.ids[:length].tolist()
        assert cut.stop_reason == ("stop" if ends else "length")
    assert {c.stop_reason for c in stopped} == {"stop", "length"}


def test_G2_keys_make_the_randomness(model):
    prompt = _prompts([4])[0]

    def sample(**options):
        return generate(model, [prompt], Sampling(max_new=20), **options)[0].ids.tolist()

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
    drawn = {int(c.ids[0]) for c in generate(model, [prompt], Sampling(max_new=1, top_p=0.5), samples=400)}
    assert drawn <= nucleus
    assert {int(c.ids[0]) for c in generate(model, [prompt], Sampling(max_new=1, top_p=1e-9), samples=5)} == {
        int(order[0])
    }


def test_uniforms_are_uniform_and_uncorrelated():
    keys = np.array([(row, sample) for row in range(100) for sample in range(10)])
    grid = np.stack([uniforms(0, 0, keys, np.full(len(keys), position)) for position in range(50)])
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = np.histogram(grid, bins=20, range=(0, 1))[0]
    expected = grid.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 60  # 19 degrees of freedom
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert len(np.unique(grid)) == grid.size


def test_steps_give_tokens_as_they_come_and_the_caller_may_end_a_row(model):
    prompts = _prompts([3, 5, 2])
    complete = generate(model, prompts, Sampling(max_new=6), seed=2)
    model.eval()
    generation, seen = Generation(model, prompts, Sampling(max_new=6), seed=2), []
    while generation.active:
        rows, ids = generation.step()
        seen += zip(rows.tolist(), ids.tolist(), strict=True)
        if len([row for row, _ in seen if row == 1]) == 3:
            generation.end(1, "stop_string")
    assert [c.stop_reason for c in map(generation.completion, range(3))] == ["length", "stop_string", "length"]
    for row, length in enumerate((6, 3, 6)):
        assert [token for r, token in seen if r == row] == generation.completion(row).ids.tolist()
        assert generation.completion(row).ids.tolist() == complete[row].ids[:length].tolist()


def test_the_mode_stays_and_no_prompts_give_no_completions(model):
    model.train()
    generate(model, _prompts([3]), Sampling(max_new=2))
    assert model.training
    with pytest.raises(UserError):
        generate(model, [[]])
    assert model.training
    model.eval()
    assert generate(model, []) == []


def test_greedy_takes_the_lowest_of_equal_ids(backend):
    config = ModelSettings(depth=1, width=16, heads=2, context=16, tied=False).resolve(11)
    model = build(config, seed=0)
    model.backend = backend
    with torch.no_grad():
        model.head.weight.fill_(0.0)
    for sampling in (Sampling(max_new=3, temperature=0), Sampling(max_new=3, temperature=0, repetition_penalty=1.5)):
        (completion,) = generate(model, [[5, 7]], sampling)
        assert completion.ids.tolist() == [0, 0, 0]
        np.testing.assert_allclose(completion.logps, -np.log(11), rtol=1e-6)


def test_weights_that_are_not_numbers_are_an_error_not_a_token(backend):
    broken = build(ModelSettings(depth=1, width=16, heads=2, context=16).resolve(11), seed=0)
    broken.backend = backend
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match="NaN"):
            generate(broken, [[1, 2]], Sampling(temperature=temperature, top_k=3, top_p=0.9, min_p=0.1))


@pytest.mark.parametrize(
    ("prompts", "samples", "words"),
    [
        ([[1] * 64], 1, ["prompt 1", "64 tokens", "context of 64"]),
        ([[1], []], 1, ["prompt 2", "empty"]),
        ([[1, VOCAB]], 1, [str(VOCAB), "vocabulary"]),
        ([[1]], 0, ["samples", "0"]),
    ],
)
def test_bad_input_is_one_sentence(model, prompts, samples, words):
    with pytest.raises(UserError) as caught:
        generate(model, prompts, samples=samples)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_G2_rows_end_at_max_new_or_where_the_context_is_full():
    model = build(ModelSettings(depth=1, width=16, heads=2, context=16).resolve(11), seed=0)
    prompts = [[1], list(range(1, 10)), [1, 2]]
    found = generate(model, prompts, Sampling(max_new=14, temperature=0))
    assert [len(c.ids) for c in found] == [14, 7, 14]
    assert [c.stop_reason for c in found] == ["length", "context", "length"]  # the last one ends for both reasons
