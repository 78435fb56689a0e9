"""The documents: links resolve, lengths hold, recipes are legal, and the names that they mention exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.core.settings import models_in
from ingot.pipeline.graph import load_graphs
from ingot.stages.kinds import RECIPE_KINDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
MAX_LINES = {"README.md": 150, "docs/architecture.md": 120, "docs/LOG.md": 300}
STAGES = sorted((DOCS / "stages").glob("*.md"))
COMMANDS = ("compare", "generate", "lm-eval", "plan", "sweep")
"""Pages of commands, which need no recipe of their own."""
PAGES_OF_KINDS = {
    "corpus": ("corpus",),
    "tokenizer": ("tokenizer",),
    "tokens": ("tokenizer", "train"),
    "train": ("train", "adapters", "align", "forgetting", "reinforce"),
    "import": ("import",),
    "evaluate": ("evaluate", "tasks"),
    "fisher": ("forgetting",),
    "judge": ("judge",),
    "generate": ("rounds",),
    "label": ("rounds",),
}


def _links(page: Path) -> list[str]:
    """Targets of the relative links of a page, outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


def _anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    for link in _links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in _anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize(("name", "lines"), MAX_LINES.items())
def test_a_page_is_short(name: str, lines: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= lines


@pytest.mark.parametrize("page", [p for p in STAGES if p.stem not in COMMANDS], ids=lambda page: page.stem)
def test_a_page_of_a_kind_begins_with_a_complete_recipe(page: Path, tmp_path: Path) -> None:
    (first, *_) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.S)
    assert first.startswith("[run]")
    (tmp_path / "recipe.toml").write_text(first)
    (graph,) = load_graphs(tmp_path / "recipe.toml", [], tmp_path / "runs")
    assert graph.nodes


def _setting_names(model: Any) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield field.alias or name
        for inner in models_in(field.annotation):
            yield from _setting_names(inner)


@pytest.mark.parametrize("kind", RECIPE_KINDS)
def test_every_setting_of_a_kind_is_documented(kind: str) -> None:
    text = "".join((DOCS / "stages" / f"{page}.md").read_text() for page in PAGES_OF_KINDS[kind])
    names = dict.fromkeys(_setting_names(RECIPE_KINDS[kind]))
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)] == []


def test_the_log_has_one_claim_a_heading() -> None:
    _, *entries = re.split(r"^## ", (DOCS / "LOG.md").read_text(), flags=re.M)
    for entry in entries:
        title, _, text = entry.partition("\n")
        assert re.match(r"\n2\d{3}-\d\d-\d\d", text), f"no date: {title}"
        assert len(text.strip().splitlines()) <= 14, f"too long: {title}"


def test_source_files_that_pages_mention_exist() -> None:
    for page in PAGES:
        if page.parent.name == "archive":
            continue
        for file in re.findall(r"`([\w./]+/[\w.]+\.(?:py|h|cpp|toml))\b", page.read_text()):
            assert any((root / file).exists() for root in (ROOT, ROOT / "src/ingot", ROOT / "src")), (
                f"{page.name}: {file}"
            )


def test_the_files_and_names_of_the_dataflow_page_exist() -> None:
    rows = re.findall(r"^\| \d+ \|.*\|(.*)\|(.*)\|$", (DOCS / "dataflow.md").read_text(), re.M)
    assert len(rows) == 15
    for files, names in rows:
        defined = set[str]()
        for file in re.findall(r"`([\w/]+\.py)`", files):
            tree = ast.parse((ROOT / "src/ingot" / file).read_text())
            defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert set(re.findall(r"`(\w+)`", names)) <= defined, (files, names)
