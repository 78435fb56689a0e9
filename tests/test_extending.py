"""`docs/extending.md`: each addition works as the page writes it, in a copy of the source."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(?:python|toml)\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.S)

RECIPE = """
[run]
name = "x"
[stage.text]
kind = "corpus"
sources = ["notes"]
quality = "none"
holdout = { fraction = 0.2, by = "document" }
[stage.characters]
kind = "tokenizer"
from = "text"
type = "char"
[stage.base]
kind = "train"
data = { text = 1.0 }
tokenizer = "characters"
model = { depth = 1, width = 32, heads = 2, context = 32 }
batch = 8
duration = "40 steps"
precision = "fp32"
evaluate = { every = 20, tokens = 256, sample_tokens = 1 }
loop = { log_every = 1, threads = 1 }
"""


def block(beginning: str) -> str:
    """The block of the page that begins so."""
    return next(b for b in BLOCKS if b.lstrip().startswith(beginning))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory with a recipe, its text, and a copy of the source in `src`."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "notes").mkdir()
    for i in range(40):
        words = " ".join(f"word{i * j % 17 + j} tells" for j in range(80))
        (tmp_path / "notes" / f"{i}.txt").write_text(words)
    (tmp_path / "r.toml").write_text(RECIPE)
    return tmp_path


def add_file(work: Path, beginning: str) -> None:
    code = block(beginning)
    path = work / code.splitlines()[0].removeprefix("# ")
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)


def add_line(file: Path, table: str, beginning: str) -> None:
    """Put a block's line under the first line of a table."""
    text = file.read_text()
    (first,) = re.findall(rf"^{table}.*\{{\n", text, re.M)
    file.write_text(text.replace(first, first + block(beginning)))


def run(work: Path, recipe: str = "r.toml") -> Path:
    """Run the recipe with the copied source; the run's directory."""
    environment = os.environ | {"PYTHONPATH": str(work / "src")}
    command = [sys.executable, "-m", "ingot", "run", recipe]
    result = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return work / "runs" / "x"


def numbers(stage: Path) -> dict[str, float]:
    return json.loads((stage / "result.json").read_text())


def events(stage: Path, name: str) -> list[dict[str, float]]:
    lines = map(json.loads, (stage / "metrics.jsonl").read_text().splitlines())
    found = [event for event in lines if event["event"] == name]
    assert found
    return found


def test_a_filter_of_ones_own(work: Path) -> None:
    (work / "my_filters.py").write_text(block("# my_filters.py"))
    (work / "notes" / "7.txt").write_text("!" * 30 + " ".join(f"word{j}" for j in range(150)))
    (work / "r.toml").write_text(f'[run]\nname = "x"\n{block("[stage.clean]")}')
    funnel = json.loads((run(work) / "clean" / "funnel.json").read_text())
    assert funnel["dropped"]["too_shouty"]["documents"] == 1


def test_an_objective_is_one_file_and_one_line(work: Path) -> None:
    add_file(work, "# src/ingot/objectives/last_token.py")
    add_line(work / "src/ingot/objectives/settings.py", "OBJECTIVES: dict", '"last_token"')
    (work / "r.toml").write_text(RECIPE + 'objective = "last_token"\n')
    stage = run(work) / "base"
    assert {step["tokens"] for step in events(stage, "step")} == {8}, "one target a row"


@pytest.mark.slow
def test_an_objective_with_a_mentor_a_token_column_and_a_head(work: Path) -> None:
    """One file and one line bring a companion of a new role, a column per token and a trained module."""
    add_file(work, "# src/ingot/objectives/mentored.py")
    add_line(work / "src/ingot/objectives/settings.py", "OBJECTIVES: dict", '"mentored"')
    student = RECIPE[RECIPE.index("[stage.base]") :].replace("stage.base", "stage.student")
    student += 'objective = { kind = "mentored", mentor = "base", head_weight = 1.0 }\n'
    (work / "r.toml").write_text(RECIPE + student)
    stage = run(work) / "student"
    result = numbers(stage)
    assert 0 < result["val_loss_nats"] < 5
    assert "bits_per_byte" not in result, "the reported loss is weighted, so it is no likelihood"
    errors = [step["mentor_head"] for step in events(stage, "step")]
    assert errors[-1] < errors[0] / 10, "the head learns to predict the mentor"


def test_a_kind_is_one_package_and_one_line(work: Path) -> None:
    add_file(work, "# src/ingot/stages/words/kind.py")
    add_file(work, "# src/ingot/stages/words/build.py")
    kinds = work / "src/ingot/stages/kinds.py"
    add_line(kinds, "KINDS: dict", '"words"')
    kinds.write_text(kinds.read_text().replace("\nKINDS:", "from ingot.stages.words.kind import WORDS\n\nKINDS:", 1))
    recipe = RECIPE[: RECIPE.index("[stage.characters]")] + '[stage.top]\nkind = "words"\ncorpus = "text"\ntop = 3\n'
    (work / "r.toml").write_text(recipe)
    stage = run(work) / "top"
    assert next(iter(json.loads((stage / "words.json").read_text()))) == "tells", "the most frequent word"
    assert numbers(stage)["words"] > 1000
