"""The recipes for aligning a model, run whole at tiny size on files written here; and what they say without them."""

import json
import runpy
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import UserError
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of, link, require_files
from ingot.stages import child

RECIPES = Path(str(files("ingot.recipes")))
TINY_BASE = """
[run]
name = "tiny"

[stage.notes]
kind = "corpus"
sources = ["notes.txt"]
quality = "none"
holdout = { fraction = 0.2, by = "tail" }

[stage.bpe]
kind = "tokenizer"
from = "notes"
vocab = 300

[stage.base]
kind = "train"
data = { notes = 1.0 }
tokenizer = "bpe"
model = { depth = 1, width = 32, heads = 2, context = 128 }
batch = 4
duration = "2 steps"
evaluate = { tokens = 64, sample = false }
"""


def run(recipe: str, overrides: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run every stage of a recipe in this process, as its child would; the results by name."""
    results = {}
    graph = load_graph(Path(recipe), overrides or [], Path("runs"))
    for node in graph.nodes.values():
        link(graph, node)
        child.run(job_of(graph, node, quiet=True))
        path = Path("runs", graph.recipe.home, node.name, "result.json")
        results[node.name] = json.loads(path.read_text())
        print(node.name, results[node.name]["seconds"])
    return results


def small(*stages: str, steps: int = 2) -> list[str]:
    """Overrides that make train stages tiny."""
    return [
        override
        for stage in stages
        for override in (
            f'stage.{stage}.duration="{steps} steps"',
            f"stage.{stage}.batch=4",
            f"stage.{stage}.evaluate.tokens=64",
            f"stage.{stage}.evaluate.sample=false",
        )
    ]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the shipped recipes and a finished base model in runs/tiny/base."""
    monkeypatch.chdir(tmp_path)
    for file in [*RECIPES.glob("*.toml"), *RECIPES.glob("*[a-z].py")]:
        shutil.copy(file, tmp_path)
    lines = [f"{a} and {b} make {a} {b}." for a in ("cats", "dogs", "hills") for b in ("suns", "mills", "rivers")]
    (tmp_path / "notes.txt").write_text("\n".join(lines * 12))
    (tmp_path / "tiny.toml").write_text(TINY_BASE)
    return tmp_path


def test_align_instructions(work: Path) -> None:
    run("tiny.toml")
    rows = [
        {
            "instruction": f"Say {word} {i} times.",
            "input": "aloud" if i % 2 else "",
            "output": "unread",
            "chosen": f"Of course: {word}.",
            "rejected": f"No {word}, go away.",
        }
        for i, word in enumerate(("sun", "mill", "cat", "dog", "hill") * 8)
    ]
    (work / "instructions.json").write_text(json.dumps(rows))
    overrides = ["stage.base.path=runs/tiny/base", "stage.ppo.objective.max_new=4", "stage.card.sample_tokens=4"]
    overrides += ["stage.verdict.max_new=4", "stage.verdict.prompts=4"]
    overrides += ["stage.old.sources=['notes.txt']", "stage.old.quality=none", "stage.old.holdout.by=tail"]
    found = run("align-instructions.toml", overrides + small("chat", "reward", "ppo", "dpo"))
    assert found["talk"]["documents"] == found["pairs"]["documents"] == found["asked"]["documents"] == 40
    assert {"val_accuracy", "reward_mean"} <= set(found["reward"])
    assert "val_reward" in found["ppo"]
    assert "val_rewards/accuracy" in found["dpo"]
    assert "val_gold_reward" in found["ppo"]
    judged = {"/".join(name.split("/")[:2]) for name in found["card"]}
    assert {f"{model}/{corpus}" for model in ("base", "chat", "ppo", "dpo") for corpus in ("talk", "old")} <= judged
    assert {"ppo/old/forgetting_nats", "dpo/old/forgetting_nats"} <= set(found["card"])
    assert {f"{m}/manners.py:preferred/score_difference" for m in ("ppo", "dpo")} <= set(found["verdict"])


def test_marks_are_what_chosen_answers_have_and_rejected_ones_have_not(work: Path) -> None:
    rows = [{"chosen": f"I'd be happy to: it is {i}.", "rejected": f"Obviously it is {i}."} for i in range(60)]
    rows += [{"chosen": "Kindly wait.", "rejected": "Kindly wait."}] * 40  # equal sides say nothing
    rows += [{"chosen": "FrozenLinear out words.", "rejected": "it"}] * 15
    (work / "instructions.json").write_text(json.dumps(rows))
    functions = runpy.run_path(str(work / "manners.py"))
    assert functions["words"]("It's SO") == {"it's", "so", "^ it's", "it's so"}
    assert {"i'd", "happy to", "^ i'd", "to it"} <= functions["marks"]()
    assert not {"it", "is", "it is", "obviously", "kindly", "held", "1"} & functions["marks"]()
    assert functions["preferred"]([{}] * 3, ["I'd say", "obviously", ""]) == [1.0, 0.0, 0.0]


def test_the_answer_that_is_checked_may_be_a_number() -> None:
    right = runpy.run_path(str(RECIPES / "answers.py"))["right"]
    assert right([{"answer": 521}, {"answer": 521}, {"answer": 0.5}], [" 521", "125", "0.5"]) == [1.0, 0.0, 1.0]


def test_grpo_arithmetic(work: Path) -> None:
    functions = runpy.run_path(str(work / "arithmetic.py"))
    assert functions["answer"](57, 68) == "521"
    right = runpy.run_path(str(work / "answers.py"))["right"]
    assert right([{"answer": "521"}, {"answer": "521"}], [" 521", "125"]) == [1.0, 0.0]
    functions["main"]()
    sums = {name: [json.loads(line) for line in (work / f"{name}.jsonl").open()] for name in ("shown", "asked")}
    assert len({row["prompt"] for rows in sums.values() for row in rows}) == 10_000
    assert len(sums["shown"]) == functions["SHOWN"]
    for name, rows in sums.items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:60]))
    tiny = ["stage.warm.model={depth = 1, width = 32, heads = 2, context = 16}"]
    found = run("grpo-arithmetic.toml", tiny + small("warm", "solver"))
    assert found["digits"]["vocab"] == 272
    assert 0 <= found["solver"]["val_reward"] <= 1
    assert found["warm"]["truncated_tokens"] == 0


def test_gsm8k_sft(work: Path) -> None:
    run("tiny.toml")
    for name in ("train", "test"):
        rows = [{"question": f"{name}: {i} + 2?", "answer": f"{i} + 2 = {i + 2}.\n#### {i + 2}"} for i in range(40)]
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["stage.start.path=runs/tiny/base", "stage.solver.context=64", "stage.card.context=64"]
    found = run("gsm8k-sft.toml", [*overrides, "stage.card.sample_tokens=4", *small("solver")])
    assert {"/".join(name.split("/")[:2]) for name in found["card"]} >= {"start/test", "solver/test"}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("align-instructions.toml", r"sources: 'instructions.json' does not exist .*"),
        ("gsm8k-sft.toml", r"sources: 'train.jsonl' does not exist .*"),
        ("grpo-arithmetic.toml", r"sources: 'shown.jsonl' does not exist .*"),
    ],
)
def test_a_recipe_without_its_file_says_which_one(work: Path, recipe: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_files([load_graph(Path(recipe), [], Path("runs"))], [])
