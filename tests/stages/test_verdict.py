"""Whether a training learned: stages that can and stages that cannot, and the sentence that says which."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of, link
from ingot.report import reading
from ingot.stages import child
from ingot.train.verdict import Training, change, verdict

RECIPE = """
[run]
name = "small"
[stage.text]
kind = "corpus"
sources = ["text.jsonl"]
quality = "none"
[stage.words]
kind = "corpus"
sources = ["words.jsonl"]
quality = "none"
[stage.talk]
kind = "corpus"
sources = ["talk.jsonl"]
format = "chat"
[stage.pairs]
kind = "corpus"
sources = ["pairs.jsonl"]
format = "pairs"
[stage.shuffled]
kind = "corpus"
sources = ["shuffled.jsonl"]
format = "pairs"
[stage.ask]
kind = "corpus"
sources = ["ask.jsonl"]
format = "prompts"
[stage.bpe]
kind = "tokenizer"
from = "text"
vocab = 300
[stage.base]
kind = "train"
tokenizer = "bpe"
data = { text = 1.0 }
model = { depth = 1, width = 32, heads = 2, context = 64 }
duration = "150 steps"
batch = 8
optim = { lr = 1e-2 }
"""
TRAINED = """
[stage.tried]
kind = "train"
init = "base"
evaluate = { every = 1000, tokens = 4096, sample = false }
loop = { threads = 1 }
"""
REWARDS = """
def letters(prompts, completions):
    return [text.count("e") / max(1, len(text)) for text in completions]

def same(prompts, completions):
    return [1.0 for _ in completions]
"""
LM = 'data = {{ {data} = 1.0 }}\nduration = "{steps} steps"\nbatch = 8\noptim = {{ lr = {lr} }}\n'
PAIRS = LM + 'objective = {{ kind = "{objective}" }}\n'
GRPO = (
    'data = {{ ask = 1.0 }}\nduration = "{steps} steps"\nbatch = 8\noptim = {{ lr = {lr} }}\n'
    'objective = {{ kind = "grpo", reward = "rewards.py:{reward}", group = 8, max_new = 8 }}\n'
)
CANNOT = {
    "text, tiny rate": (LM.format(data="words", steps=60, lr=1e-12), {"nothing learned"}, "raise optim.lr or duration"),
    "text, rate too high": (LM.format(data="text", steps=60, lr=0.3), {"worse"}, "lower optim.lr"),
    "text, one small update": (
        LM.format(data="words", steps=1, lr=1e-5),
        {"nothing learned"},
        "are 1 update at batch 8: lower batch, or raise duration",
    ),
    "talk, adapter, tiny rate": (
        LM.format(data="talk", steps=60, lr=1e-12) + "adapter = { rank = 4 }\n",
        {"nothing learned"},
        "raise optim.lr or duration",
    ),
    "reward, tiny rate": (
        PAIRS.format(data="pairs", steps=20, lr=1e-12, objective="reward"),
        {"nothing learned"},
        "updates at batch 8: lower batch",
    ),
    "reward, shuffled labels": (
        PAIRS.format(data="shuffled", steps=60, lr=1e-3, objective="reward"),
        {"nothing learned", "worse"},
        "",
    ),
    "reward, rate too high": (
        PAIRS.format(data="pairs", steps=20, lr=0.3, objective="reward"),
        {"worse"},
        "lower optim.lr",
    ),
    "dpo, tiny rate": (
        PAIRS.format(data="pairs", steps=20, lr=1e-12, objective="dpo"),
        {"nothing learned"},
        "updates at batch 8: lower batch",
    ),
    "dpo, shuffled labels": (
        PAIRS.format(data="shuffled", steps=60, lr=1e-3, objective="dpo"),
        {"nothing learned", "worse"},
        "",
    ),
    "dpo, one small update": (
        PAIRS.format(data="pairs", steps=1, lr=1e-7, objective="dpo"),
        {"nothing learned"},
        "1 update at batch 8",
    ),
    "grpo, constant reward": (
        GRPO.format(steps=10, lr=1e-3, reward="same"),
        {"nothing learned"},
        "every sample of a step got the same reward (1): check the reward function",
    ),
    "grpo, tiny rate": (
        GRPO.format(steps=4, lr=1e-12, reward="letters"),
        {"nothing learned"},
        "updates at batch 8: lower batch",
    ),
}
CAN = {
    "text": LM.format(data="words", steps=60, lr=3e-3),
    "text, twelve updates": LM.format(data="words", steps=12, lr=3e-3),
    "text, adapter": LM.format(data="words", steps=60, lr=1e-2) + "adapter = { rank = 4 }\n",
    "talk": LM.format(data="talk", steps=60, lr=3e-3),
    "talk, adapter": LM.format(data="talk", steps=100, lr=1e-2) + "adapter = { rank = 4 }\n",
    "reward": PAIRS.format(data="pairs", steps=40, lr=3e-3, objective="reward"),
    "dpo": PAIRS.format(data="pairs", steps=40, lr=1e-3, objective="dpo"),
    "ipo": PAIRS.format(data="pairs", steps=40, lr=1e-3, objective='dpo", loss = "ipo'),
    "simpo": PAIRS.format(data="pairs", steps=40, lr=1e-3, objective='dpo", loss = "simpo'),
    "orpo": PAIRS.format(data="pairs", steps=40, lr=1e-3, objective='dpo", loss = "orpo'),
    "kto": PAIRS.format(data="pairs", steps=40, lr=1e-3, objective="kto"),
    "grpo": GRPO.format(steps=30, lr=3e-3, reward="letters"),
}


def _write(work: Path) -> None:
    draw = random.Random(0)
    sizes, colours, animals = ("big", "small", "old"), ("red", "blue", "green"), ("cat", "dog", "owl", "fox")

    def sentence() -> str:
        return f"The {draw.choice(sizes)} {draw.choice(colours)} {draw.choice(animals)} sees the sea. "

    def lines(name: str, rows: list[dict]) -> None:
        (work / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    lines("text.jsonl", [{"text": sentence() * 3} for _ in range(300)])
    lines("words.jsonl", [{"text": " ".join(draw.choices(("one", "two", "three"), k=30))} for _ in range(300)])
    asked = [f"What does the {c} {a} number {n} see?" for c in colours for a in animals for n in range(30)]
    lines("talk.jsonl", [{"prompt": q, "completion": "It sees the sea."} for q in asked])
    both = [{"prompt": q, "chosen": "It sees the sea.", "rejected": "No idea at all."} for q in asked]
    lines("pairs.jsonl", both)
    answers = [(f"It sees {draw.randrange(99)}.", f"It sees {draw.randrange(99)}.") for _ in asked]
    mixed = [{"prompt": q, "chosen": a, "rejected": b} for q, (a, b) in zip(asked, answers, strict=True)]
    lines("shuffled.jsonl", [row for row in mixed if row["chosen"] != row["rejected"]])
    lines("ask.jsonl", [{"prompt": q} for q in asked])
    (work / "rewards.py").write_text(REWARDS)
    (work / "small.toml").write_text(RECIPE)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path, here = tmp_path_factory.mktemp("verdicts"), Path.cwd()
    _write(path)
    os.chdir(path)
    try:
        yield path
    finally:
        os.chdir(here)


def _tried(work: Path, settings: str) -> dict:
    """The result of the stage `tried` with these settings."""
    (work / "tried.toml").write_text(RECIPE + TRAINED + settings)
    graph = load_graph(work / "tried.toml", [], Path("runs"))
    for node in graph.needed(["tried"]):
        if not graph.stage(node).is_done():
            child.run(job_of(graph, node, quiet=True))
        link(graph, node)
    return reading.result(graph.stage(graph.nodes["tried"]).path)


def _some(names: dict) -> list:
    """Parameters: the first of `names` always, the others in `make test-full`."""
    return [pytest.param(name, marks=[] if n == 0 else pytest.mark.slow) for n, name in enumerate(names)]


@pytest.mark.parametrize("name", _some(CANNOT))
def test_who_cannot_learn_is_told(work: Path, name: str) -> None:
    settings, verdicts, advice = CANNOT[name]
    result = _tried(work, settings)
    assert result["verdict"] in verdicts, result["verdict_sentence"]
    assert advice in result["verdict_sentence"]
    if result["verdict"] == "worse":
        assert result["best_step"] == 0, "the start was better than any later step"


@pytest.mark.parametrize("name", _some(CAN))
def test_who_learns_is_told(work: Path, name: str) -> None:
    result = _tried(work, CAN[name])
    assert result["verdict"] == "learned", result["verdict_sentence"]
    assert " → " in result["verdict_sentence"]


def _losses(*values: float, field: str = "val_loss_nats") -> list[dict]:
    return [{"step": 100 * n, field: value} for n, value in enumerate(values)]


def test_noise_of_the_rows_is_no_learning() -> None:
    """The same change of the mean, once in all parts alike and once in parts that disagree."""
    common = {"updates": 100, "fractions": {"a": 1.0}}
    alike = {"a": ([2.0, 1.0, 3.0, 2.0], [1.9, 0.9, 2.9, 1.9])}
    apart = {"a": ([2.0, 1.0, 3.0, 2.0], [1.5, 1.4, 2.5, 2.2])}
    evaluations = _losses(2.0, 1.9)
    assert verdict(Training(evaluations, parts=alike, **common))[0] == "learned"
    assert verdict(Training(evaluations, parts=apart, **common))[0] == "nothing learned"
    rewards = [{"step": s, "val_reward": r, "val_reward_se": 0.05} for s, r in ((0, 0.3), (9, 0.4))]
    assert verdict(Training(rewards, **common))[0] == "nothing learned"
    assert verdict(Training([{**e, "val_reward_se": 0.01} for e in rewards], **common))[0] == "learned"
    pairs = {"a": ([0.1, 0.5, 0.3], [0.2, 0.61, 0.39])}  # the same prompts: their differences count, not their spread
    assert verdict(Training(rewards, parts=pairs, **common))[0] == "learned"


def test_sentences() -> None:
    common = {"updates": 200}
    assert verdict(Training(_losses(0.33, 0.2, 0.04, field="val_reward"), **common)) == (
        "worse",
        "reward 0.33 → 0.04 in 200 updates: worse than the start; lower optim.lr",
    )
    few = {"updates": 6, "batch_rows": 32, "epochs": {"talk": 3.0}}
    assert verdict(Training(_losses(7.61, 7.60), **few)) == (
        "nothing learned",
        "validation loss 7.61 → 7.6 in 6 updates: nothing was learned; 3 epochs of talk are 6 updates at batch 32: "
        "lower batch, or raise duration",
    )
    assert verdict(Training(_losses(3.0, 1.0, 2.0), **common))[1].endswith("those of step 0 are kept as the best ones")
    assert verdict(Training(_losses(3.0, 1.0, 2.0), best_step=100, **common)) == (
        "learned",
        "validation loss 3 → 2 in 200 updates: learned, but it was 1 at step 100: those weights are kept as the best "
        "ones",
    )
    by_heart = [{**e, "train_loss_nats": t} for e, t in zip(_losses(2.0, 3.0), (2.0, 0.1), strict=True)]
    assert "the training loss fell to 0.1, so it learned its rows by heart" in verdict(Training(by_heart, **common))[1]
    assert verdict(Training([], **common))[0] == "not measured"
    assert verdict(Training(_losses(2.0, float("nan")), **common))[0] == "worse"
    assert change([{"train_loss_nats": 3.0}, {"train_loss_nats": 2.0}]) is not None  # nothing is held out


def test_a_run_that_goes_on_does_not_judge_the_steps_before() -> None:
    evaluations = [{"step": 59, "val_loss_nats": 5.457}, {"step": 60, "val_loss_nats": 5.45}]
    learned, sentence = verdict(Training(evaluations, updates=1))
    assert (learned, "after step 59 of an earlier run" in sentence) == ("not measured", True)
    assert verdict(Training([{**e, "step": i} for i, e in enumerate(evaluations)], updates=1))[0] == "nothing learned"
