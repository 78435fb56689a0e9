"""The Python interface: results, progress, log-probabilities; equal to what the command line gives."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ingot
from ingot import api
from ingot.cli.app import main
from ingot.core.errors import StageFailed, UserError
from ingot.evaluate.likelihood import likelihood
from ingot.infer.streaming import prompt_ids
from ingot.results import StageResult
from tests.infer.conftest import babbler, stage  # noqa: F401  (fixtures)

TEXT = "ab€ba ab"


def test_log_probs_sum_to_the_models_loss(babbler: api.LanguageModel, make_store: Any) -> None:  # noqa: F811
    """The loss of the store that has the text as its only document, without the token that ends it."""
    tokenizer = babbler.loaded.tokenizer
    logps = babbler.log_probs(TEXT)
    assert len(logps) == len(tokenizer.encode(TEXT))
    ids = prompt_ids(tokenizer, TEXT)
    held_out = likelihood(babbler.loaded.model, make_store([ids], vocab=tokenizer.vocab), 0.5, 4)
    assert -logps.sum() == pytest.approx(held_out.nats.sum(), rel=1e-6)
    assert babbler.log_probs("ab ab").sum() > babbler.log_probs("zq zq").sum()  # it babbles a and b
    assert babbler.log_probs("").shape == (0,)


def test_log_probs_are_those_of_generation(babbler: api.LanguageModel) -> None:  # noqa: F811
    """The decoder with its cache computes the same numbers for the tokens that it draws."""
    tokenizer, checked = babbler.loaded.tokenizer, 0
    for answer in babbler.complete([""], samples=64, max_new=2, temperature=1.0):
        ids = answer.completion.ids
        if tokenizer.encode(answer.text).tolist() == ids.tolist():  # not another spelling of the text in tokens
            assert babbler.log_probs(answer.text) == pytest.approx(answer.completion.logps, abs=1e-4)
            checked += 1
    assert checked >= 3


def test_a_text_beyond_the_context_is_refused(babbler: api.LanguageModel) -> None:  # noqa: F811
    most = babbler.loaded.config.context
    assert len(babbler.log_probs("z" * most)) == most
    with pytest.raises(UserError, match=f"text: found {most + 1} tokens, expected at most {most}; shorten it"):
        babbler.log_probs("z" * (most + 1))


def test_generate_equals_the_command_line(
    stage: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--max-new", "9", "--seed", "5", "--temperature", "0.9", "--json")
    monkeypatch.setattr(sys, "argv", ["ingot", "generate", str(stage), "ab", *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    (shown,) = json.loads(capsys.readouterr().out)
    model = ingot.load(StageResult(stage))
    assert model.generate("ab", max_new=9, seed=5, temperature=0.9) == shown["text"]
    assert model.generate("ab", max_new=9, seed=6, temperature=0.9) != shown["text"]


def test_metrics_have_a_row_for_each_step(tmp_path: Path) -> None:
    """Evaluations stand in the rows of their steps; of a step that a resumed run repeated the last attempt counts."""
    events: list[dict[str, Any]] = [
        {"event": "evaluation", "step": 0, "val_loss_nats": 5.5},
        {"event": "step", "step": 1, "loss_nats": 5},
        {"event": "step", "step": 2, "loss_nats": 9.0},
        {"event": "step", "step": 2, "loss_nats": 4.0, "attempt": 2},
        {"event": "evaluation", "step": 2, "val_loss_nats": 4.5},
    ]
    lines = [json.dumps({"time": 1.0, "attempt": 1, **event}) for event in events]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    metrics = StageResult(tmp_path).metrics
    assert metrics.rows(named=True) == [
        {"step": 0, "val_loss_nats": 5.5, "loss_nats": None},
        {"step": 1, "val_loss_nats": None, "loss_nats": 5.0},
        {"step": 2, "val_loss_nats": 4.5, "loss_nats": 4.0},
    ]
    (tmp_path / "table.jsonl").write_text('{"model": "base", "metric": "bits_per_byte", "value": 1.5}\n')
    assert StageResult(tmp_path).metrics["value"].to_list() == [1.5]


@pytest.mark.slow
def test_a_run_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error has no descriptor there. A running stage has one line; a failed one says why in the exception."""
    monkeypatch.chdir(tmp_path)
    for n in range(4):
        Path(f"{n}.txt").write_text(f"note {n}\n" * 20)
    notebook = ModuleType("IPython")
    notebook.get_ipython = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)

    corpus = {
        "kind": "corpus",
        "sources": [Path(f"{n}.txt") for n in range(4)],
        "quality": "none",
        "holdout": {"by": "tail"},
    }
    recipe = {"run": {"name": "notes"}, "stage": {"clean": corpus}}
    results = ingot.run(recipe)
    assert results["clean"].numbers["documents"] > 0
    assert results.report.read_text().startswith("<!doctype html>")
    assert results["clean"].checkpoint is None
    first, *_, last = shown.getvalue().split("\r")[1:]
    assert first == "clean: RUN, first run"
    assert last.startswith("clean: done in ")
    assert last.endswith("\n")

    assert ingot.run(recipe)["clean"].directory == results["clean"].directory
    assert "clean: HIT, took " in shown.getvalue()
    before = shown.getvalue()
    ingot.run(recipe, quiet=True)
    assert shown.getvalue() == before

    Path("keep.py").write_text("def none(text):\n    raise ValueError('no')\n")
    with pytest.raises(StageFailed, match=r"^clean: filters: 'none' raised ValueError: no"):
        ingot.run(recipe, set="stage.clean.filters=['keep.py:none']", quiet=True)


NOTEBOOK = Path(__file__).parents[1] / "docs/notebook.ipynb"
CHECKS = """
losses = validation["val_loss_nats"].to_list()
assert losses[-1] < 1.0 < 5.0 < losses[0], losses
assert continued.startswith(" five, six"), continued
assert in_order > shuffled + 5, (in_order, shuffled)
assert results.report.exists()
"""


@pytest.mark.slow
def test_the_notebook_does_what_it_says(tmp_path: Path) -> None:
    """Its cells in order, in a process of their own; the model that they train has learned to count."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)  # which would be of another version
    program = "\n\n".join([*code, CHECKS])
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
