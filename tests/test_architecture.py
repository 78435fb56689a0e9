"""The structure that `docs/architecture.md` promises: no circles, small files, a product without its fast backends."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
MODULES = {
    ".".join(p for p in file.relative_to(SRC).with_suffix("").parts if p != "__init__"): file
    for file in SRC.rglob("*.py")
}

WITHOUT = ("kernels", "backends")
CORE = ("model", "train", "optim", "infer", "data", "objectives/test_golden_steps.py", "stages/test_forecast.py")
"""Tests that compute models, objectives and decoding, and what `ingot plan` says of them."""
SURROUNDINGS = ("train/test_signals.py", "train/test_bit_flips.py", "train/test_guard.py")
"""Slow ones among them that ask nothing of a backend."""


def imported(module: str) -> set[str]:
    """Modules of ingot that a module imports, anywhere in its code."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return (found & set(MODULES)) - {module}


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions count. What is left after taking away modules that import nothing left is a circle."""
    left = {module: imported(module) for module in MODULES}
    while leaves := {module for module, needs in left.items() if not needs & set(left)}:
        left = {module: needs for module, needs in left.items() if module not in leaves}
    assert not left, f"each of these imports another of them: {sorted(left)}"


def test_a_file_fits_a_readers_head() -> None:
    lines = {file: len(file.read_text().splitlines()) for file in SRC.rglob("*.py")}
    assert {str(file): n for file, n in lines.items() if n > 400} == {}
    model = {file: n for file, n in lines.items() if file.parent.name == "model"}
    assert sum(model.values()) <= 2000, "a student reads model/ in an hour"
    assert not [file for file in (SRC / "ingot/model").rglob("*") if file.suffix in (".cpp", ".h", ".cu")]


def test_the_questions_of_the_architecture_page_are_answered_where_it_says() -> None:
    page = ROOT / "docs/architecture.md"
    answers = re.findall(r"\| `(\w+)` in \[[^]]+\]\(([^)]+)\) \|", page.read_text())
    assert len(answers) == 3
    for name, link in answers:
        tree = ast.parse((page.parent / link).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (name, link)


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project without the folders of fast backends and their tests."""
    work = tmp_path_factory.mktemp("without")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, work / folder, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", work)
    for folder in WITHOUT:
        shutil.rmtree(work / "src" / "ingot" / folder)
        shutil.rmtree(work / "tests" / folder)
    return work


def _run(work: Path, *command: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(work / "src")}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]


@pytest.mark.slow
def test_without_fast_backends_the_core_tests_pass(without: Path) -> None:
    ignored = (f"--ignore=tests/{name}" for name in SURROUNDINGS)
    _run(without, "pytest", "-m", "not slow and not long", *ignored, *(f"tests/{name}" for name in CORE))


@pytest.mark.slow
def test_without_fast_backends_the_demo_trains(without: Path) -> None:
    """The first steps of the demo's base stage."""
    small = ("sources=['src']", "holdout={fraction=0.05,by='tail'}")
    sets = ("stage.base.duration=3 steps", "stage.bpe.vocab=400", *(f"stage.clean.{setting}" for setting in small))
    words = [word for value in sets for word in ("--set", value)]
    recipe = str(without / "src/ingot/recipes/stdlib.toml")
    _run(without, "ingot", "run", recipe, "--only", "base", *words)
    assert (without / "runs/stdlib/base/DONE").exists()
