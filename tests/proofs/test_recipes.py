"""The check of the shipped recipes: each has a claim, checks resume, and missing data skip them."""

from pathlib import Path

import pytest
from proofs.recipes import RECIPES, Workplace, checks, main

from proofs import recipe_runs


def test_every_shipped_recipe_states_a_claim_and_has_a_check(tmp_path: Path) -> None:
    shipped = {file.stem: file.read_text() for file in RECIPES.glob("*.toml")}
    assert {check.id for check in checks(Workplace(tmp_path, tmp_path))} == set(shipped)
    headers = {name: text.split("\n[")[0] for name, text in shipped.items()}
    assert not [name for name, header in headers.items() if "# Claim: " not in header]


def test_a_check_resumes_and_one_without_its_data_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["llama-7b", "finetune-hf", "--seeds", "2", "--data", str(tmp_path / "none")]
    words += ["--results", str(tmp_path / "results"), "--to", str(tmp_path / "CLAIMS.md")]
    assert main(words) == 0
    monkeypatch.setattr(recipe_runs, "plan_rows", None)  # nothing is planned again
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.count("skipped, no") == 2
    page = (tmp_path / "CLAIMS.md").read_text()
    assert "plan: 7.5e+09" in page
    assert "trained: not run" in page
