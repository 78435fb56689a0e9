"""The shipped recipe self-instruct.toml on its stand-in for a teacher: tasks, answers, filters, and a student."""

import importlib.util
import json
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ingot.core.errors import UserError
from ingot.corpus.documents import read_documents
from ingot.corpus.scores.text_measures import TextMeasures, measured_texts
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of, link
from ingot.plan.machine import GPUS
from ingot.report.plan import plan_rows, print_plan
from ingot.stages import child
from ingot.stages.synthesis.instructions import read_list, request, shown
from ingot.stages.synthesis.majority import agreement, final_answer
from tests.stages.endpoint_stub import Stub, completion
from tests.stages.test_endpoint import allow_this_machine

RECIPES = Path(str(files("ingot.recipes")))
BASE = """
[stage.base]
kind = "train"
data = { notes = 1.0 }
tokenizer = "bpe"
model = { depth = 1, width = 32, heads = 2, context = 64 }
duration = "2 steps"
batch = 4
precision = "fp32"
evaluate = { every = 9, tokens = 64, sample = false }
loop = { threads = 1, backend = "torch" }  # kernels would be built anew in the cache of the test

[stage.notes]
kind = "corpus"
sources = ["notes.txt"]
quality = "none"
holdout = { fraction = 0.2, by = "tail" }

[stage.bpe]
kind = "tokenizer"
from = "notes"
vocab = 280
"""
SMALL = (
    'stage.student.duration="2 steps"',
    "stage.student.loop.threads=1",
    "stage.student.evaluate.tokens=64",
    "stage.student.evaluate.sample=false",
    'stage.student.loop.backend="torch"',
    'stage.student.precision="fp32"',
    "stage.tasks.prompts=6",
    "stage.tasks.samples=1",
)


def _teacher() -> Any:
    """The module teacher.py."""
    spec = importlib.util.spec_from_file_location("teacher", RECIPES / "teacher.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _table(url: str) -> str:
    """The recipe with a base that is trained here, and the stub's address."""
    text = (RECIPES / "self-instruct.toml").read_text()
    before, _, after = text.partition("[stage.base]")
    return before + BASE + after[after.index("[stage.seeds]") :].replace("http://127.0.0.1:8000/v1", url)


def _build(names: list[str], *overrides: str, recipe: str = "recipe.toml") -> None:
    graph = load_graph(Path(recipe), [*SMALL, *overrides], Path("runs"))
    for node in graph.needed(names):
        link(graph, node)
        child.run(job_of(graph, node, quiet=True))


def _rows(name: str) -> list[dict[str, Any]]:
    path = Path("runs/self-instruct") / name
    columns = ["text", "split", "cluster", "path", "offset", "extra", "source"]
    return [row for batch in read_documents(path, None, columns) for row in batch.to_pylist()]


def _result(name: str) -> dict[str, Any]:
    return json.loads((Path("runs/self-instruct") / name / "result.json").read_text())


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe up to the student, with the rules of teacher.py."""
    path, teacher = tmp_path_factory.mktemp("self-instruct"), _teacher()

    def answer(body: dict[str, Any], number: int) -> dict[str, Any]:
        text, finish = teacher.reply(body)
        return completion(text, finish=finish)

    with pytest.MonkeyPatch.context() as patch, Stub(answer) as stub:
        patch.chdir(path)
        allow_this_machine(patch, path / "cache")
        teacher.write_seeds(path / "seeds.jsonl")
        (path / "notes.txt").write_text("\n".join(f"the {word} is here" for word in teacher.WORDS * 5))
        (path / "recipe.toml").write_text(_table(stub.url))
        _build(["student"])
    return path


@pytest.fixture
def _there(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)


def _said(row: dict[str, Any]) -> tuple[str, str]:
    question, answer = json.loads(row["text"])
    return question["content"], answer["content"]


@pytest.mark.usefixtures("_there")
def test_new_tasks_are_prompts_of_their_own_in_the_split_of_their_seed() -> None:
    seeds = {(row["path"], row["offset"]): row for row in _rows("seeds")}
    tasks, result = _rows("tasks"), _result("tasks")
    assert result["documents"] == len(tasks) == result["answers"] * 8
    assert {row["split"] for row in tasks} == {"train", "val"}
    for row in tasks:
        path, _, offset = row["path"].rpartition(":")
        assert row["split"] == seeds[path, int(offset)]["split"]
        assert row["extra"] is None, "the seed's answer is not the new task's"
    assert len({row["offset"] for row in tasks}) == len(tasks)
    texts = {row["text"] for row in tasks}
    assert len({row["cluster"] for row in tasks}) == len(texts)


@pytest.mark.usefixtures("_there")
def test_tasks_that_are_there_already_are_dropped() -> None:
    before = {row["text"] for row in _rows("seeds")}
    different = [row["text"] for row in _rows("different")]
    assert len(set(different)) == len(different) < len(_rows("tasks"))
    assert not before & set(different)


@pytest.mark.usefixtures("_there")
def test_the_majority_is_right_more_often_than_one_answer() -> None:
    teacher = _teacher()

    def right(name: str) -> float:
        return float(np.mean([teacher.answer(question) == answer for question, answer in map(_said, _rows(name))]))

    assert right("answers") < 0.9
    assert right("lessons") > 0.97
    lessons = _rows("lessons")
    assert len(lessons) > 0.9 * len(_rows("different")), "hardly any task is lost"
    assert all(count == 1 for count in Counter(question for question, _ in map(_said, lessons)).values())
    assert {row["source"] for row in lessons} == {"label:majority"}


@pytest.mark.usefixtures("_there")
def test_a_student_is_trained_on_the_samples_of_its_teacher() -> None:
    """Distillation at the level of sequences: plain fine-tuning on what the teacher has written."""
    student = json.loads(Path("runs/self-instruct/student/inputs.json").read_text())
    assert student["inputs"]["data:lessons"]["name"] == "lessons@bpe"
    assert _result("student")["steps"] == 2


@pytest.mark.usefixtures("_there")
def test_the_plan_says_which_stages_call_out(capsys: pytest.CaptureFixture[str]) -> None:
    """And prints bounds of several scores."""
    print_plan(plan_rows(load_graph(Path("recipe.toml"), [*SMALL], Path("runs")), GPUS["a100"]))
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "calls http://127.0.0.1" in lines["answers"]
    assert "(teacher)" in lines["tasks"]
    assert "words + similarity" in lines["different"]


@pytest.mark.usefixtures("_there")
def test_a_model_of_ours_is_asked_in_the_same_way() -> None:
    """One that knows nothing writes no list, which is said."""
    recipe = Path("recipe.toml").read_text()
    table = recipe[recipe.index("[stage.tasks]") : recipe.index("[stage.compared]")]
    own = "\n".join(line for line in table.splitlines() if not line.startswith("endpoint"))
    Path("own.toml").write_text(recipe.replace(table, own + "\n\n").replace("context = 64", "context = 512"))
    ours = ['stage.tasks.model="base"', "stage.tasks.max_new=4", "stage.tasks.examples=1", "stage.tasks.prompts=2"]
    with pytest.raises(UserError, match=r"found no usable answer to 3 prompts \(3 without a numbered list\); lower"):
        _build(["tasks"], *ours, recipe="own.toml")


def test_lists_are_read_from_their_numbers() -> None:
    text = "Sure:\n5. Name a\nred thing.\n6) Say it.\n**7.** Count to 3. Then stop.\nTask 8: Go"
    assert read_list(text, 8, True) == ["Name a\nred thing.", "Say it.", "Count to 3. Then stop.", "Go"]
    assert read_list(text, 8, False) == ["Name a\nred thing.", "Say it.", "Count to 3. Then stop."]
    assert read_list(text, 2, True) == ["Name a\nred thing.", "Say it."]
    assert read_list("<think>1. no\n2. no</think>3. yes", 8, True) == ["yes"]
    assert read_list("no list", 8, True) == []
    text = "5. Round this number:\n3.14159\n6. At which time?\n12:30 or 13:00\n7. Explain:\n   1. one\n   2. two\n8. Go"
    items = ["Round this number:\n3.14159", "At which time?\n12:30 or 13:00", "Explain:\n   1. one\n   2. two", "Go"]
    assert read_list(text, 8, True) == items
    (message,) = request(["Do a.", "Do b."], 3)
    assert "1. Do a.\n2. Do b." in message["content"]
    assert "tasks 3 to 5" in message["content"]


def test_a_prompt_is_shown_with_others_of_its_split() -> None:
    for index in range(9):
        numbers = shown(index, 9, 4, seed=1, split=0)
        assert numbers[0] == index
        assert len(set(numbers)) == len(numbers) == 4
    assert shown(0, 2, 4, seed=1, split=0) in ([0, 1], [0])
    assert len({tuple(shown(0, 50, 4, seed=s, split=0)) for s in range(20)}) > 15


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 x 7\n#### 42", "42"),
        ("So \\boxed{41}, no, \\boxed{42}.", "42"),
        ("The answer is **1,042**.", "1042"),
        ("Answer: Paris\nIt is in France.", "paris"),
        ("First this.\n\nThen 42 \n", "then 42"),
        ("**Answer:**\n17", "17"),
        ("#### \n42", "42"),
        ("The final answer is:\n\n$$17$$", "17"),
        ("The answer is $\\boxed{42}$.", "42"),
        ("Answer: \\(42\\)", "42"),
        ("So \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("The answer is $\\boxed{\\sqrt{\\frac{1}{2}}}$.", "\\sqrt{\\frac{1}{2}}"),
        ("\\boxed{4} and \\boxed{{5} is not closed", "4"),
        ("\\boxed" + "{" * 20_000 + "\n4", "4"),
        ("", ""),
    ],
)
def test_the_final_answer_is_what_is_compared(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_agreement_is_the_fraction_with_the_same_final_answer() -> None:
    assert agreement(["It is\n4", "4", "#### 4", "5"]) == [0.75, 0.75, 0.75, 0.25]


def test_measures_of_text_are_what_they_say() -> None:
    texts = ["a b c a b c", "One two three four.", "one, TWO three five", "hi", "", "Hi!", "x y z"]
    found = TextMeasures()(pl.Series(texts))
    assert found["words"].tolist() == [6, 4, 4, 1, 0, 1, 3]
    assert found["repetition"].tolist()[:4] == [0.25, 0.0, 0.0, 0.0], "one of four runs was there before"
    np.testing.assert_array_equal(found["similarity"], [0, 0, 0.5, 0, np.nan, 1, 0])
    measures = TextMeasures()
    measures.compare_with(pl.Series(["x y z", "x y w"]))
    assert measures(pl.Series(["x y z w"]))["similarity"].tolist() == [0.5], "the most like one, not all together"
    talk = json.dumps([{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}])
    assert measured_texts(pl.Series([talk]), "chat").to_list() == ["c"]


def test_the_same_documents_in_other_batches_have_the_same_similarity() -> None:
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(list("abcdef"), 9)) for _ in range(40)]
    whole = TextMeasures()(pl.Series(texts))["similarity"]
    parts = TextMeasures()
    split = [parts(pl.Series(texts[i : i + 7]))["similarity"] for i in range(0, 40, 7)]
    np.testing.assert_array_equal(np.concatenate(split), whole)
    assert whole.max() > 0
