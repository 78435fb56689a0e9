"""The record of a run: found without arguments, with the overrides that it was run with; what a run leaves out."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ingot.cli.app import app
from ingot.core.errors import UserError
from ingot.pipeline.run import job_of
from ingot.stages import child

RECIPE = """
[run]
name = "tiny"

[stage.clean]
kind = "corpus"
sources = ["notes.txt"]
quality = "none"
holdout = { fraction = 0.2, by = "tail" }

[stage.bpe]
kind = "tokenizer"
from = "clean"
vocab = 285

[stage.more]
kind = "corpus"
sources = ["notes.txt"]
quality = "none"
pii = false
holdout = { fraction = 0.2, by = "tail" }
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # and stages run in this process, which is faster than starting one for each
    monkeypatch.setattr("ingot.pipeline.run._run_child", lambda *job: child.run(job_of(*job[:3])))
    (tmp_path / "notes.txt").write_text("The cat sat on the mat.\n" * 50)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path


def _ingot(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def _rows(*arguments: str) -> dict[str, str]:
    return {row["name"]: row["state"] for row in json.loads(_ingot(*arguments, "--json").stdout)}


@pytest.fixture
def ran(work: Path) -> Path:
    """One stage and its input, with a vocabulary of 280."""
    _ingot("run", "tiny.toml", "--only", "bpe", "--set", "stage.bpe.vocab=280", "--json")
    return work


def test_a_run_is_found_with_its_overrides(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By nothing, its directory or its recipe; from a directory below it too, and after the recipe is gone."""
    expected = {"clean": "HIT", "bpe": "HIT", "more": "RUN"}
    without = _ingot("status", "--json")
    assert {row["name"]: row["state"] for row in json.loads(without.stdout)} == expected
    assert "last run: runs/tiny" in without.stderr
    assert _rows("status", "tiny.toml") == _rows("status", "runs/tiny") == _rows("plan", "runs/tiny") == expected
    assert json.loads(_ingot("verify", "--json").stdout) == {"stages": 2, "problems": []}
    assert _rows("plan", "tiny.toml")["bpe"] == "RUN"  # a plan of the recipe is of the recipe as it stands
    (ran / "tiny.toml").unlink()
    (ran / "below" / "deeper").mkdir(parents=True)
    monkeypatch.chdir(ran / "below" / "deeper")
    assert _rows("status") == expected
    monkeypatch.chdir(ran / "below" / "deeper")
    report = json.loads(_ingot("report", "--to", "page.html", "--json").stdout)
    assert report == {"report": str(ran / "below" / "deeper" / "page.html")}


def test_status_says_which_stages_the_last_run_left_out(ran: Path) -> None:
    def why() -> str:
        return {row["name"]: row["why"] for row in json.loads(_ingot("status", "--json").stdout)}["more"]

    assert why() == "not asked for: the last run was --only bpe"
    _ingot("run", "tiny.toml", "--set", "stage.bpe.vocab=280", "--json")
    more = (ran / "runs" / "tiny" / "more").resolve()
    assert why().startswith("took ")
    shutil.rmtree(more)
    assert why() == "first run"  # the last run was of all stages
    _ingot("run", "tiny.toml", "--only", "clean", "--only", "bpe", "--json")
    assert why() == "not asked for: the last run was --only clean --only bpe"


def test_a_changed_recipe_is_noticed(ran: Path) -> None:
    (ran / "tiny.toml").write_text(RECIPE.replace("pii = false", ""))
    with pytest.warns(UserWarning, match=r"tiny.toml has changed since runs.tiny was run; `ingot plan tiny.toml`"):
        assert _rows("status", "tiny.toml")["bpe"] == "HIT"


def test_plan_and_run_visit_the_same_stages(ran: Path) -> None:
    plan = _rows("plan", "tiny.toml", "--only", "bpe")
    assert plan == {"clean": "HIT", "bpe": "RUN"}
    run = json.loads(_ingot("run", "tiny.toml", "--only", "bpe", "--json").stdout)
    assert list(run) == list(plan)
    for command in ("plan", "run"):
        with pytest.raises(UserError, match=r"--only bqe: no such stage in tiny\.toml; did you mean 'bpe'"):
            _ingot(command, "tiny.toml", "--only", "bqe")


def test_stages_that_a_run_leaves_out_have_no_panel(ran: Path) -> None:
    """Even if another run has made the same result."""
    (ran / "other.toml").write_text(RECIPE.replace('"tiny"', '"other"'))
    _ingot("run", "other.toml", "--only", "more", "--json")
    _ingot("run", "tiny.toml", "--only", "bpe", "--json")
    page = (ran / "runs" / "tiny" / "report.html").read_text()
    assert 'id="bpe"' in page
    assert 'id="more"' not in page
    assert "Not run: more." in page
    _ingot("run", "tiny.toml", "--json")
    assert 'id="more"' in (ran / "runs" / "tiny" / "report.html").read_text()


def test_runs_are_listed_the_newest_first(ran: Path) -> None:
    (ran / "other.toml").write_text(RECIPE.replace('"tiny"', '"other"'))
    _ingot("run", "other.toml", "--json")
    (ran / "runs" / "stages" / (ran / "runs" / "other" / "bpe").readlink().name / "DONE").unlink()
    rows = json.loads(_ingot("runs", "--json").stdout)
    listed = [(row["name"], row["state"], row["done"], row["stages"]) for row in rows]
    assert listed == [("other", "interrupted", 2, 3), ("tiny", "done", 2, 2)]
    assert rows[0]["started"] >= rows[1]["started"]
    assert "2 of 3" in _ingot("runs").stdout
    assert "no runs" in _ingot("runs", "--out", "nowhere").stdout


def test_without_a_run_the_commands_say_so(work: Path) -> None:
    for command in ("status", "report", "compare", "chat"):
        with pytest.raises(UserError, match="no run here or in a parent directory, expected one; name a recipe"):
            _ingot(command)


def test_chat_names_what_a_run_lacks(ran: Path) -> None:
    with pytest.raises(UserError, match="runs/tiny: found no stage that is done and was trained on conversations"):
        _ingot("chat")


def test_version() -> None:
    assert _ingot("--version").stdout.startswith("ingot 0.")
