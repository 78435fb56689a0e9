"""Tasks in a recipe: their files are part of the key, and code runs only where that was allowed."""

from pathlib import Path

import pytest

from ingot.core.errors import UserError
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import require_files


def test_F4_an_edited_task_runs_the_stage_again_and_no_other(work, monkeypatch):
    monkeypatch.chdir(work)
    kept_in = ["stage.clean.decontaminate=[]"]  # else the corpus keeps the task's items out, and is another one
    before = load_graph(Path("tiny.toml"), kept_in, Path("runs")).nodes
    task = Path("echo.jsonl")
    task.write_text(task.read_text().replace("cat mat 3", "cat mat 5"))
    after = load_graph(Path("tiny.toml"), kept_in, Path("runs")).nodes
    assert [n for n in before if before[n].key != after[n].key] == ["card"]


def test_F4_code_is_off_by_default(work, monkeypatch):
    monkeypatch.chdir(work)
    tasks = 'stage.card.tasks=["code-small"]'
    with pytest.raises(UserError, match=r"stage\.card: tasks: 'code-small' runs code that a model has written; allow"):
        _startable(tasks)
    _startable(tasks, "stage.card.run_code=true", "stage.card.sandbox='weak'")
    with pytest.raises(UserError, match=r"stage.card: tasks: no task 'icl'; "):
        _startable('stage.card.tasks=["icl"]')


def test_code_needs_bwrap_or_the_users_consent_to_less(work, monkeypatch):
    """It is refused before anything runs. A result that was made where bwrap works stays valid."""
    monkeypatch.chdir(work)
    code = ('stage.card.tasks=["code-small"]', "stage.card.run_code=true")
    monkeypatch.setattr("ingot.stages.evaluation.kind.bwrap_problem", lambda: None)
    _startable(*code)
    monkeypatch.setattr("ingot.stages.evaluation.kind.bwrap_problem", lambda: "no bwrap here; install it")
    with pytest.raises(UserError, match=r"^stage\.card: tasks: 'code-small': no bwrap here; install it$"):
        _startable(*code)
    _startable(*code, "stage.card.sandbox='weak'")
    _startable('stage.card.tasks=["icl-copy"]', "stage.card.run_code=true")
    with pytest.raises(UserError, match="sandbox"):
        _startable(*code, "stage.card.sandbox='none'")


def test_more_shots_than_a_task_has_examples_are_refused(work, monkeypatch):
    monkeypatch.chdir(work)
    tasks = 'stage.card.tasks=["cot-arithmetic"]'
    _startable(tasks, "stage.card.shots=5")
    with pytest.raises(UserError, match=r"^stage\.card: shots: found 6, expected at most 5, .* 'cot-arithmetic'; "):
        _startable(tasks, "stage.card.shots=6")


def _startable(*overrides: str) -> None:
    require_files([load_graph(Path("tiny.toml"), list(overrides), Path("runs"))], ["card"])
