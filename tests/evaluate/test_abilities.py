"""Models that know score 1, models that do not score chance, and scores are those of the definition."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ingot.core.errors import UserError
from ingot.core.statistics import wilson
from ingot.evaluate.abilities import Subject, rows, run_task
from ingot.evaluate.continuations import score
from ingot.evaluate.sandbox import bwrap_problem
from ingot.evaluate.tasks import load_task
from ingot.model.config import ModelSettings
from ingot.model.lm_head import LMHead
from ingot.model.transformer import ModelOut, build
from ingot.tokenizer.byte_bpe import Char


class Rule(torch.nn.Module):
    """A language model without parameters: logits of the next token by a function of the tokens so far."""

    def __init__(self, vocab: int, next_token, context: int = 512):
        super().__init__()
        self.config = ModelSettings(depth=1, width=64, context=context).resolve(vocab)
        self.embedding = torch.nn.Embedding(1, 1)
        self.vocab, self.next_token = vocab, next_token

    def forward(self, ids_BT, **_):
        found = [[self.next_token(row[: t + 1]) for t in range(len(row))] for row in ids_BT.tolist()]
        logits = torch.stack([F.one_hot(torch.tensor(r), self.vocab + 1)[:, :-1] for r in found]).double() * 9
        return ModelOut(logits, LMHead(torch.eye(self.vocab, dtype=logits.dtype)), {})


def goes_on(row: list[int], vocab: int) -> int:
    """What followed the longest earlier run that ends like the row: in-context learning in one function."""
    text = bytes(row)
    for length in range(len(row) - 1, 0, -1):
        if (at := text.rfind(text[-length:], 0, len(row) - 1)) >= 0:
            return row[at + length]
    return vocab  # a row of zeros: knows nothing


@pytest.mark.parametrize("name", ["icl-copy", "icl-map"])
def test_F4_a_model_that_learns_in_context_scores_1_and_one_that_does_not_scores_chance(name):
    task = load_task(name)
    tokenizer = Char("".join(sorted({c for item in task.items for c in item.prompt + "".join(item.choices)})))
    table = {}
    for kind, rule in (("knows", goes_on), ("blind", lambda row, vocab: vocab)):
        model = Rule(tokenizer.vocab, lambda row, rule=rule: rule(row, tokenizer.vocab))
        answered = run_task(Subject(model, tokenizer, chats=False), task)
        table[kind] = {row["metric"]: row for row in rows(task, answered)}
    assert table["knows"]["accuracy"]["value"] == 1
    assert table["knows"]["right_probability"]["value"] > 0.9
    assert table["knows"]["accuracy"]["low"] > table["blind"]["accuracy"]["high"]
    assert table["blind"]["chance"]["value"] == 0.25
    if name == "icl-copy":  # equally long choices: a model that knows nothing finds them equally likely
        assert table["blind"]["accuracy"]["low"] < 0.25 < table["blind"]["accuracy"]["high"]
        assert table["blind"]["right_probability"]["value"] == pytest.approx(0.25)


def _tiny(vocab: int, context: int = 32, seed: int = 0):
    return build(ModelSettings(depth=2, width=32, heads=2, context=context).resolve(vocab), seed=seed)


def test_scores_are_sums_of_log_probabilities_in_any_batch():
    model = _tiny(20)
    draw = np.random.default_rng(0)
    requests = [(draw.integers(0, 20, p), draw.integers(0, 20, a)) for p, a in ((3, 2), (9, 5), (1, 1), (30, 20))]
    scored = score(model, requests)
    for (prompt, answer), one in zip(requests, scored, strict=True):
        row = torch.from_numpy(np.concatenate([prompt, answer])[-33:])  # what is too long loses its beginning
        with torch.no_grad():
            logp = torch.log_softmax(model(row[None, :-1]).logits[0].double(), -1)[-len(answer) :]
        expected = logp.gather(1, row[-len(answer) :, None]).sum()
        assert one.logp == pytest.approx(expected.item(), rel=1e-5)
        assert one.tokens == len(answer)
        assert one.greedy == bool((logp.argmax(-1) == row[-len(answer) :]).all())
    likeliest = int(model(torch.tensor([[1, 2]])).logits[0, -1].argmax())
    assert score(model, [([1, 2], [likeliest])])[0].greedy
    with pytest.raises(UserError, match="an answer has 33 tokens, more than the model's context of 32"):
        score(model, [([1], [1] * 33)])


SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(1, 5) for b in range(1, 6)]


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """A task of sums with its tokenizer, a model that was trained on the answers, and one that was not."""
    path = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    items = [{"prompt": prompt, "targets": [answer]} for prompt, answer in SUMS]
    items.append({"prompt": "2+2=", "kind": "choice", "choices": ["4", "7"], "answer": 0})
    path.write_text("\n".join(map(json.dumps, [{"task": "sums", "max_new": 3, "stop": ["."]}, *items])))
    tokenizer = Char("0123456789+=.")
    knows, blank = _tiny(tokenizer.vocab), _tiny(tokenizer.vocab)
    ids = torch.tensor([[*tokenizer.encode(f"{p}{a}." + "." * (2 - len(a))).tolist()] for p, a in SUMS])
    optimizer = torch.optim.AdamW(knows.parameters(), 1e-2)
    for _ in range(80):
        logits = knows(ids[:, :-1]).logits
        F.cross_entropy(logits[:, 3:].flatten(0, 1), ids[:, 4:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return load_task(str(path)), tokenizer, knows, blank


def test_F4_written_answers_of_a_model_that_was_taught_and_of_one_that_was_not(sums):
    task, tokenizer, knows, blank = sums
    taught = run_task(Subject(knows, tokenizer, chats=False), task)
    assert all(a.right for a in taught)
    assert [a.answer for a in taught[:-1]] == [answer for _, answer in SUMS]  # cut off at the stop text
    naive = run_task(Subject(blank, tokenizer, chats=False), task)
    assert sum(a.right for a in naive[:-1]) <= 3
    told = {row["metric"]: row for row in rows(task, taught)}
    control = {row["metric"]: row for row in rows(task, naive)}
    assert "chance" not in told  # of a mixed file there is no one chance
    assert told["accuracy"] == {"metric": "accuracy", **wilson(len(SUMS) + 1, len(SUMS) + 1)}
    assert told["target_nats_per_byte"]["value"] < 0.2 < 1 < control["target_nats_per_byte"]["value"]


def test_examples_stand_in_front_and_change_the_answer(sums, tmp_path):
    path = tmp_path / "shots.jsonl"
    items = [
        {"prompt": "1+1=", "targets": ["2"], "example": True},
        {"prompt": "1+2=", "targets": ["3"], "example": True},
        {"prompt": "2+2=", "targets": ["4"]},
    ]
    path.write_text("\n".join(map(json.dumps, [{"task": "s", "shots": 2, "between": ".", "max_new": 1}, *items])))
    _, tokenizer, knows, _ = sums
    subject = Subject(knows, tokenizer, chats=False)
    (answered,) = run_task(subject, load_task(str(path)))
    assert answered.prompt == "1+1=2.1+2=3.2+2="
    assert run_task(subject, load_task(str(path)), shots=1)[0].prompt == "1+1=2.2+2="


def test_a_question_keeps_half_of_the_context_however_long_an_answer_may_be(sums, tmp_path):
    """Each item is asked, not the last token of each; a reference that does not fit has no likelihood."""
    path = tmp_path / "long.jsonl"
    items = [{"prompt": f"{n}+{n}=", "targets": [str(2 * n)]} for n in range(1, 5)]
    items.append({"prompt": "1+1=", "targets": ["2" * 40]})
    path.write_text("\n".join(map(json.dumps, [{"task": "s", "max_new": 99, "stop": ["."]}, *items])))
    _, tokenizer, knows, _ = sums
    task = load_task(str(path))
    answered = run_task(Subject(knows, tokenizer, chats=False), task)
    assert [a.right for a in answered] == [True] * 4 + [False]
    assert [a.measure is None for a in answered] == [False] * 4 + [True]
    told = {row["metric"]: row for row in rows(task, answered)}
    assert told["target_nats_per_byte"]["n"] == 4


def test_F4_code_is_run(sums, tmp_path, monkeypatch):
    """What the model writes is put in by hand here; the programs run for real, without bwrap where there is none."""
    path = tmp_path / "code.jsonl"
    items = [{"prompt": f"def f{n}():\n", "tests": f"assert f{n}() == {n}"} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, [{"task": "c", "kind": "code"}, *items])))
    _, tokenizer, knows, _ = sums
    monkeypatch.setattr(Subject, "generate", lambda *_: ["    return 0\n", "    return 7\n", "    return ("])
    sandbox = "weak" if bwrap_problem() else "bwrap"
    answered = run_task(Subject(knows, tokenizer, chats=False), load_task(str(path)), sandbox=sandbox)
    assert [a.right for a in answered] == [True, False, False]
    assert [a.why.partition(":")[0] for a in answered] == ["", "AssertionError", "SyntaxError"]


def test_questions_are_asked_of_models_that_converse():
    from ingot.tokenizer.byte_bpe import ByteBPE
    from ingot.tokenizer.chat import render, stop_ids

    bpe = ByteBPE([bytes([b]) for b in range(256)], r".+")
    subject = Subject(_tiny(bpe.vocab), bpe, chats=True)
    assert subject.prompt("hi", chat=False) == [*bpe.start_ids, *bpe.encode("hi").tolist()]
    whole = render([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], bpe)[0].tolist()
    assert [*subject.prompt("hi", chat=True), *subject.answer(" yes", chat=True)] == whole
    assert whole[-1] == stop_ids(bpe)[0]


def test_wilson_against_the_formula_and_at_the_ends():
    """By hand for 8 of 10 with z = 1.959964: (0.490162, 0.943318)."""
    found = wilson(8, 10)
    assert (found["low"], found["high"]) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson(0, 20)["low"] == 0
    assert wilson(20, 20)["high"] == 1
    assert wilson(20, 20)["low"] == pytest.approx(20 / (20 + 1.959964**2), abs=1e-6)
    assert wilson(0, 0) == {"value": 0.0, "low": 0.0, "high": 1.0, "n": 0}


@pytest.mark.parametrize("family", ["Llama 2", "Gemma", "T5", "Llama 3"])
def test_a_text_begins_alike_in_tasks_lm_eval_generation_and_stores(family, tmp_path):
    from ingot.evaluate.harness import LMMethods
    from ingot.infer.streaming import prompt_ids
    from ingot.tokenizer.hf_files import import_tokenizer
    from tests.tokenizer.published import SHAPES

    tokenizer = import_tokenizer(SHAPES[family](tmp_path))
    subject = Subject(_tiny(tokenizer.vocab), tokenizer, chats=False)
    text = "The cat is on the mat"
    ids = [*tokenizer.start_ids, *tokenizer.encode(text).tolist()]
    assert prompt_ids(tokenizer, text) == subject.prompt(text, chat=False) == ids
    assert LMMethods(subject.model, tokenizer)._pair(text, " it has")[0] == ids
    assert LMMethods(subject.model, tokenizer)._pair("", text)[0] == tokenizer.start_ids
    # one blank between a prompt and its answer, though some of these tokenizers put one before every text
    answer = subject.answer(" of it", False, text)
    assert tokenizer.decode([*tokenizer.encode(text).tolist(), *answer]) == text + " of it"
    assert answer == LMMethods(subject.model, tokenizer)._pair(text, " of it")[1]
