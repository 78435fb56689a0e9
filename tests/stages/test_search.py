"""Search of training data: planted sentences with their documents, offsets and steps, against what batches contain."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.chat import print_record, with_sources
from ingot.core.artifact import RECORD, atomic_json
from ingot.core.errors import UserError
from ingot.core.events import Display, read_events
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.pipeline.without import without
from ingot.report.places import found_lines, marked
from ingot.stages import child
from ingot.stages.job import MODEL, TOKENIZER
from ingot.stages.training.search import TrainingSearch
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.trace import trace
from ingot.tokenizer.byte_bpe import load_tokenizer

RECIPE = """
[run]
name = "planted"

[stage.notes]
kind = "corpus"
sources = ["notes"]
quality = "none"
holdout = { fraction = 0.25 }

[stage.talk]
kind = "corpus"
sources = ["talk.jsonl"]
format = "chat"
holdout = { fraction = 0.0 }

[stage.likes]
kind = "corpus"
sources = ["likes.jsonl"]
format = "pairs"
holdout = { fraction = 0.0 }

[stage.bpe]
kind = "tokenizer"
from = "notes"
vocab = 290

[stage.base]
kind = "train"
data = { notes = 1.0 }
tokenizer = "bpe"
model = { depth = 1, width = 16, heads = 2, context = 40 }
batch = 4
duration = "12 steps"
precision = "fp32"
evaluate = { tokens = 1, sample = false }
loop = { threads = 1 }

[stage.chat]
kind = "train"
init = "base"
data = { talk = 0.7, notes = 0.3 }
batch = 6
duration = "5 steps"
precision = "fp32"
evaluate = { tokens = 1, sample = false }
loop = { threads = 1 }
"""
ALIGN = """
[stage.align]
kind = "train"
init = "chat"
objective = "dpo"
data = { likes = 1.0 }
batch = 2
duration = "2 steps"
precision = "fp32"
evaluate = { tokens = 1, sample = false }
loop = { threads = 1 }
"""
STEPS = {"base": 12, "chat": 5}
SECRET = "write to Zoë at zoe.b@example.com before the mill\r\nopens on the red hill"
MASKED = "write to Zoë at [EMAIL] before the mill\nopens on the red hill"


def _planted() -> list[str]:
    """Twenty sentences of 8 to 40 words that stand nowhere else."""
    return [" ".join(f"w{number}x{word}" for word in range(8 + number * 32 // 19)) for number in range(20)]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Notes in files and in rows of JSON, with a planted sentence each; conversations with one of their own."""
    path, draw = tmp_path_factory.mktemp("planted"), random.Random(0)
    words = ["cat", "dog", "hill", "sun", "mill", "red", "old", "sea"]

    def around(sentence: str) -> str:
        before, after = (" ".join(draw.choices(words, k=draw.randrange(30))) for _ in range(2))
        return f"{before} {sentence} {after}."

    sentences = _planted()
    (path / "notes").mkdir()
    for number, sentence in enumerate(sentences[:10]):
        (path / "notes" / f"{number}.txt").write_text(around(sentence))
    rows = [{"text": around(sentence)} for sentence in [*sentences[10:], SECRET]]
    (path / "notes" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    talk = [
        [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i} is the sea"}]
        for i in range(12)
    ]
    (path / "talk.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talk))
    pair = {"prompt": "which way to the sea", "chosen": "over the red hill, please", "rejected": "ask the old dog"}
    (path / "likes.jsonl").write_text(json.dumps(pair) + "\n")
    (path / "planted.toml").write_text(RECIPE + ALIGN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        graph = load_graph(Path("planted.toml"), [], Path("runs"))
        for node in graph.needed(["align"]):
            job = job_of(graph, node, quiet=True)
            if node.kind == "train":
                _start(job)
            else:
                child.run(job)
    return path


def _start(job: dict[str, Any]) -> None:
    """Leave in a train stage's directory what it has before its first step, which is all that a search reads."""
    stage, settings = Path(job["dir"]), TrainSettings.model_validate(job["settings"])
    atomic_json(stage / RECORD, job)
    (tokenizer,) = stage.parent.glob(f"tokenizer-*/{TOKENIZER}")
    shutil.copy(tokenizer, stage / TOKENIZER)
    if settings.model:
        atomic_json(stage / MODEL, settings.model.resolve(load_tokenizer(tokenizer).vocab).model_dump(mode="json"))
    else:
        shutil.copy(next(stage.parent.glob(f"train-*/{MODEL}")), stage / MODEL)


@pytest.fixture(scope="module")
def stages(work: Path) -> dict[str, Path]:
    records = {file.parent: json.loads(file.read_text()) for file in work.glob("runs/stages/train-*/inputs.json")}
    return {record["name"]: path for path, record in records.items()}


@pytest.fixture(scope="module")
def search(stages: dict[str, Path]) -> TrainingSearch:
    return TrainingSearch(stages["chat"], Display(quiet=True))


Batches = dict[str, list[tuple[int, dict[str, Any]]]]


@pytest.fixture(scope="module")
def batches(stages: dict[str, Path]) -> Batches:
    """Stage -> (step, piece of a document) of all its batches."""
    return {
        name: [(step, piece) for step in range(1, end + 1) for row in trace(stages[name], step) for piece in row.pieces]
        for name, end in STEPS.items()
    }


def _steps(batches: Batches, place: dict[str, Any]) -> dict[str, list[int]]:
    """Stage -> the steps whose batch contains some of the tokens of a place."""
    first, last = place["first_token"], place["first_token"] + place["tokens"]

    def overlaps(piece: dict[str, Any]) -> bool:
        same = (piece["path"], piece["offset"]) == (place["path"], place["offset"])
        return same and piece["first_token"] < last and piece["first_token"] + piece["tokens"] > first

    return {name: sorted({step for step, piece in pieces if overlaps(piece)}) for name, pieces in batches.items()}


def test_planted_sentences(work: Path, search: TrainingSearch, batches: Batches) -> None:
    held_out = seen = 0
    for sentence in _planted():
        found = search.find(sentence, 5, None)
        assert (found["count"], len(found["places"]), found["parts"]) == (1, 1, [])
        (place,) = found["places"]
        file = work / place["path"]
        line = file.read_bytes()[place["offset"] :].partition(b"\n")[0].decode()
        assert sentence in line
        assert f"{place['before']}{place['text']}{place['after']}" in line
        held_out += place["held_out"]
        assert place["steps"] == ({} if place["held_out"] else _steps(batches, place))
        seen += len(place["steps"].get("base", []))
    assert 0 < held_out < 12
    assert seen > 10


def test_a_sentence_that_is_not_there_gives_its_longest_parts(search: TrainingSearch) -> None:
    first, second = _planted()[3].split(), _planted()[15].split()
    text = " ".join(["Nobody", *first[2:9], "said,", *second[:4], "or", *second[6:20], "and", "w3x2"])
    found = search.find(text, 5, None)
    assert (found["count"], found["places"]) == (0, [])
    assert [part["text"] for part in found["parts"]] == [" ".join(first[2:9]), " ".join(second[6:20])]
    assert [part["words"] for part in found["parts"]] == [7, 14]
    assert all(text[part["first"] : part["last"]] == part["text"] for part in found["parts"])
    assert [search.find(" ".join(one), 5, None)["places"][0]["path"] for one in (first, second)] == [
        part["places"][0]["path"] for part in found["parts"]
    ]
    assert [part["words"] for part in search.find(text, 4, None)["parts"]] == [7, 4, 14]
    assert search.find("nothing of this is there at all, nor anywhere", 5, None)["parts"] == []
    lines = [line.plain for line in found_lines(found)]
    assert lines[0] == "the text is not in the training data; its longest parts:"
    assert lines[1] == f'"{" ".join(first[2:9])}": 7 words, 1 place'


def test_parts_may_overlap_and_end_with_words(search: TrainingSearch) -> None:
    """Two sentences share words; a part is not cut inside a word, though the data go on with half of it."""
    words = _planted()[19].split()
    text = " ".join([*words[:10], words[10][:-1] + "y"])
    (part,) = search.parts(text, 5)
    assert text[part.first : part.last] == " ".join(words[:10])
    assert marked("abcdefgh", [(0, 3), (2, 5), (6, 7)]) == "«abcde»f«g»h"


def test_a_text_is_searched_as_cleaning_leaves_it(search: TrainingSearch) -> None:
    found = search.find(SECRET, 5, None)
    assert found["count"] == 1
    (place,) = found["places"]
    assert (place["text"], place["masked"], place["path"]) == (MASKED, {"email": 1}, "notes/rows.jsonl")
    assert search.find(MASKED, 5, None)["places"] == found["places"]
    longer = search.find(f"Indeed, {SECRET} as before", 5, None)
    assert (longer["count"], [part["text"] for part in longer["parts"]]) == (0, [MASKED])
    assert longer["parts"][0]["places"] == found["places"]


def test_messages(search: TrainingSearch, batches: Batches) -> None:
    found = search.find("answer 7 is the sea", 5, None)
    (place,) = found["places"]
    assert (place["corpus"], place["before"], place["after"]) == ("talk", "", "")
    assert place["steps"] == {"chat": _steps(batches, place)["chat"]}
    assert search.find("question 7\nanswer 7", 2, None)["count"] == 0


def test_the_place_of_a_pair_names_its_answer(stages: dict[str, Path]) -> None:
    search = TrainingSearch(stages["align"], Display(quiet=True))
    for text, answers in {"which way to the sea": ["chosen", "rejected"], "ask the old dog": ["rejected"]}.items():
        found = search.find(text, 4, None)
        assert [(place["corpus"], place["answer"]) for place in found["places"]] == [("likes", a) for a in answers]
    assert any("likes: likes.jsonl#0, rejected, tokens " in str(line) for line in found_lines(found))


def test_answers_with_sources(stages: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    sentence = _planted()[12]
    answers = [{"prompt": "Say: ", "text": f"well, {sentence} and so on"}, {"prompt": "", "text": "no"}]
    first, second = with_sources(answers, stages["chat"], 5, all_places=True)
    (part,) = first["sources"]
    assert (first["text"][part["first"] : part["last"]], part["words"], part["count"]) == (sentence, 28, 1)
    assert second["sources"] == []
    print_record(first)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"Say: well, «{sentence}» and so on"
    assert shown[2].startswith("  notes: notes/rows.jsonl#")
    print_record(answers[0])
    assert capsys.readouterr().out == f"Say: well, {sentence} and so on\n"


def test_only_train_stages_are_searched(stages: dict[str, Path], work: Path) -> None:
    corpus = next(work.glob("runs/stages/corpus-*"))
    with pytest.raises(UserError, match="is a corpus stage, expected a train stage"):
        TrainingSearch(corpus, Display(quiet=True))
    with pytest.raises(UserError, match="--text: found only blanks"):
        TrainingSearch(stages["base"], Display(quiet=True)).find(" ", 5, None)
    with pytest.raises(UserError, match="--text: found bytes that are no UTF-8"):
        TrainingSearch(stages["base"], Display(quiet=True)).find("bad \udcff byte", 5, None)


def test_a_lost_corpus_is_named_and_the_text_found_as_it_is_stored(
    stages: dict[str, Path], work: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the index says is kept; how SECRET would be cleaned is not."""
    told: list[str] = []
    display = Display(quiet=True)
    monkeypatch.setattr(display, "notify", told.append)
    corpora = [*work.glob("runs/stages/corpus-*")]
    for corpus in corpora:
        corpus.rename(tmp_path / corpus.name)
    try:
        search = TrainingSearch(stages["base"], display)
    finally:
        for corpus in corpora:
            (tmp_path / corpus.name).rename(corpus)
    assert any("corpus-" in line and "searched for as they are written" in line for line in told)
    assert search.find(MASKED, 5, None)["count"] == 1
    assert search.find(SECRET, 5, None)["count"] == 0


def test_copies_in_other_corpora_are_left_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two corpora that have run; one that has not is named, and a run's name that is taken is refused."""
    monkeypatch.chdir(tmp_path)
    recipe, text = "", {"a": "one two three", "b": "one  two three", "c": "one two three"}
    for name, words in text.items():
        Path(f"{name}.jsonl").write_text(f'{{"text": "first of {name}"}}\n{{"text": "{words}"}}\n')
        recipe += (
            f'[stage.{name}]\nkind = "corpus"\nsources = ["{name}.jsonl"]\nquality = "none"\nholdout.fraction = 0\n'
        )
    Path("two.toml").write_text('[run]\nname = "two"\n' + recipe)
    graph = load_graph(Path("two.toml"), [], Path("runs"))
    for node in graph.needed(["a", "b"]):
        child.run(job_of(graph, node, quiet=True))
    offset = len('{"text": "first of a"}\n')
    left = without(Path("two.toml"), [f"a.jsonl#{offset}"], "left", Path("runs"))
    assert left.corpora == {"a": [f"a.jsonl#{offset}"], "b": [f"b.jsonl#{offset}"]}
    assert (left.unsearched, left.reused) == (["c"], [])
    Path("runs/two").mkdir(parents=True, exist_ok=True)
    with pytest.raises(UserError, match="runs/two: exists already, and the new run would take its name"):
        without(Path("two.toml"), [f"a.jsonl#{offset}"], "two", Path("runs"))


def _train(recipe: str, runs: str) -> Path:
    """Run `base` of a recipe with all that it needs, in this process; returns its directory."""
    Path("new.toml").write_text(recipe)
    graph = load_graph(Path("new.toml"), [], Path(runs))
    for node in graph.needed(["base"]):
        child.run(job_of(graph, node, quiet=True))
    return graph.stage(graph.nodes["base"]).path.absolute()


STORED = (
    RECIPE.replace('from = "notes"', 'from = "talk"')
    .replace("batch = 4", 'batch = 4\norder = "stored"')
    .replace("threads = 1", "threads = 1, save_every = 2, keep = 9")
)
"""Rows in the order of the documents, and a vocabulary that does not depend on the notes."""


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "goes_on"), [(RECIPE, False), (STORED, True)], ids=["shuffled", "stored"])
def test_without_a_document_the_weights_are_those_of_a_run_that_never_had_it(
    recipe: str, goes_on: bool, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    with_it = _train(recipe, "runs")
    search = TrainingSearch(with_it, Display(quiet=True))
    places = [place for sentence in _planted()[10:] for place in search.find(sentence, 5, None)["places"]]
    place = min((p for p in places if not p["held_out"]), key=lambda p: abs(min(p["steps"]["base"], default=99) - 6))
    name = f"{place['path']}#{place['offset']}"
    left_out = without(Path("new.toml"), [name], "left", Path("runs"))
    assert (left_out.corpora, "talk" in left_out.reused) == ({"notes": [name]}, True)
    (base,) = [reader for reader in left_out.readers if reader.name == "base"]
    assert base.last == 12
    assert set(place["steps"]["base"]) <= set(base.steps)
    with pytest.raises(UserError, match=r"notes/rows\.jsonl#1: found no such document, expected .* of notes, talk"):
        without(Path("new.toml"), ["notes/rows.jsonl#1"], "left", Path("runs"))
    left = _train(left_out.recipe, "runs")
    (plan,) = read_events(left / "metrics.jsonl", "plan")
    assert plan.get("earlier_run") == (with_it.name if goes_on else None)
    assert 0 < plan.get("earlier_step", 1) < base.steps[0]

    never = tmp_path / "never"
    shutil.copytree(work, never, ignore=shutil.ignore_patterns("runs"))
    rows = never / "notes" / "rows.jsonl"
    rows.write_text("".join(line for line in rows.read_text().splitlines(True) if place["text"] not in line))
    monkeypatch.chdir(never)
    weights = [
        {file.name: file.read_bytes() for file in stage.glob("checkpoints/00000012/*.safetensors")}
        for stage in (left, _train(recipe, "runs"), with_it)
    ]
    assert weights[0]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2], "the document changes the weights"
