"""The adapter for lm-eval: each call against its definition, with a stub of the base class."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from ingot.core.errors import UserError
from ingot.evaluate.harness import adapter
from ingot.infer.streaming import prompt_ids
from ingot.model.config import ModelSettings
from ingot.model.transformer import build
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.chat import render

CONTEXT = 24


class _LM:
    """Stands in for lm_eval.api.model.LM."""

    def __init__(self):
        self.based = True


@pytest.fixture
def bpe():
    return ByteBPE([*(bytes([b]) for b in range(256)), b" a", b"ab", b" b"], r" ?\w+|\s+|[^\w\s]+")


@pytest.fixture
def harness(bpe, monkeypatch):
    model = ModuleType("lm_eval.api.model")
    model.LM = _LM  # type: ignore[attr-defined]
    for name, module in (("lm_eval", ModuleType("x")), ("lm_eval.api", ModuleType("y")), ("lm_eval.api.model", model)):
        monkeypatch.setitem(sys.modules, name, module)
    made = adapter(build(ModelSettings(depth=2, width=32, heads=2, context=CONTEXT).resolve(bpe.vocab), seed=1), bpe)
    assert isinstance(made, _LM)
    assert made.based
    return made


def _logps(harness, ids):
    """ln p of every id after the first, one forward of the whole row."""
    row = torch.tensor([list(map(int, ids))])
    with torch.no_grad():
        logp = torch.log_softmax(harness._model(row[:, :-1]).logits[0], -1)
    return logp.gather(1, row[0, 1:, None])[:, 0].double().numpy(), logp.argmax(-1).numpy() == row[0, 1:].numpy()


def _request(*arguments):
    return SimpleNamespace(args=arguments)


@pytest.mark.parametrize(("context", "continuation"), [("the sum", " of it"), ("x ", "ab"), ("", "ab a")])
def test_likelihoods_are_those_of_prompt_and_continuation_encoded_together(harness, bpe, context, continuation):
    ((logp, greedy),) = harness.loglikelihood([_request(context, continuation)])
    whole = prompt_ids(bpe, context + continuation) if context else [*prompt_ids(bpe, ""), *bpe.encode(continuation)]
    n = len(whole) - len(prompt_ids(bpe, context.rstrip()))
    logps, best = _logps(harness, whole)
    assert logp == pytest.approx(logps[-n:].sum(), rel=1e-5)
    assert greedy == best[-n:].all()


def test_whole_texts_count_every_token_once_in_disjoint_windows(harness, bpe):
    text = "one text that is a good deal longer than one window of context"
    ids = [*prompt_ids(bpe, "")[-1:], *bpe.encode(text).tolist()]
    n = len(ids) - 1
    assert n > 2 * CONTEXT
    expected = 0.0
    for start in range(0, n, CONTEXT):
        stop = min(start + CONTEXT, n)
        window = ids[max(0, stop - CONTEXT) : stop + 1]
        expected += _logps(harness, window)[0][-(stop - start) :].sum()
    short = "one"
    found = harness.loglikelihood_rolling([_request(text), _request(short)])
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert found[1] == pytest.approx(
        _logps(harness, [*prompt_ids(bpe, "")[-1:], *bpe.encode(short)])[0].sum(), rel=1e-5
    )


class _None:
    """A run that writes nothing."""

    def answers(self):
        return [SimpleNamespace(text="")]


def test_generation_stops_at_its_text_and_is_greedy(harness, bpe, monkeypatch):
    settings = {"until": ["\n\n"], "max_gen_toks": 5, "do_sample": False, "temperature": 0.7}
    texts = harness.generate_until([_request("a b", settings), _request("x", {**settings, "max_gen_toks": 2})])
    ids = prompt_ids(bpe, "a b")
    for _ in range(5):
        with torch.no_grad():
            logits = harness._model(torch.tensor([ids])).logits[0, -1, : bpe.vocab]
        ids.append(int(logits.argmax()))
    whole = bpe.decode_bytes(np.array(ids[-5:])).decode(errors="replace")
    assert texts[0] == whole
    stopped = harness.generate_until([_request("a b", {**settings, "until": [whole[1:2]]})])
    assert stopped == [whole[: whole.index(whole[1:2])]]
    assert len(texts) == 2
    assert harness.generate_until([_request("a " * 99, settings)])  # longer than the context
    seen = []
    monkeypatch.setattr(
        "ingot.evaluate.harness.TextGeneration", lambda m, t, prompts, *a, **k: seen.append(prompts) or _None()
    )
    harness.generate_until([_request("a b a b a b", {})])  # as long an answer as a task may have that says nothing
    assert len(seen[0][0]) == min(CONTEXT // 2, len(prompt_ids(bpe, "a b a b a b")))


def test_every_way_of_drawing_that_a_task_asks_for_is_followed(harness):
    asked = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    sampling, _ = harness._sampling({**asked, "max_gen_toks": 3})
    assert {name: getattr(sampling, name) for name in asked if name != "do_sample"} == {
        name: value for name, value in asked.items() if name != "do_sample"
    }


def test_chat_prompts_are_rendered_here_and_their_words_stay_words(harness, bpe):
    messages = [{"role": "user", "content": "say <|end|>"}]
    text = harness.apply_chat_template(messages)
    ids, _ = render(messages, bpe, generation_prompt=True)
    assert harness._prompt(text) == ids.tolist()
    begun = harness.apply_chat_template(
        [*messages, {"role": "assistant", "content": "ab"}], add_generation_prompt=False
    )
    assert harness._prompt(begun) == [*ids.tolist(), *bpe.encode("ab").tolist()]
    assert harness._pair("a", "b") == (prompt_ids(bpe, "a"), bpe.encode("b").tolist())  # together they are one token
    assert harness._pair(text, " a") == (ids.tolist(), bpe.encode(" a").tolist())


def test_without_lm_eval_one_sentence_says_what_to_install(bpe, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(UserError, match=r"pip install 'ingot\[lm-eval\]'"):
        adapter(None, bpe)  # type: ignore[arg-type]
