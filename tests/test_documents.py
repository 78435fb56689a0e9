"""The documents: links resolve, lengths hold, recipes are legal, and the names that they mention exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from ingot.core.settings import models_in
from ingot.model.adapter_config import AdapterSettings
from ingot.objectives.settings import OBJECTIVES
from ingot.pipeline.graph import load_graphs
from ingot.report.html.page import STATES
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
    "token-files": ("token-files",),
    "train": ("train", "adapters", "align", "distill", "forgetting", "reinforce"),
    "annotate": ("distill",),
    "import": ("import",),
    "evaluate": ("evaluate", "tasks"),
    "fisher": ("forgetting",),
    "judge": ("judge",),
    "generate": ("rounds",),
    "label": ("rounds",),
    "scorer": ("select",),
    "score": ("select",),
    "select": ("select",),
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


@pytest.mark.parametrize("page", sorted((DOCS / "howto").glob("*.md")), ids=lambda page: page.stem)
def test_a_how_to_is_a_page_whose_recipe_is_legal(page: Path, tmp_path: Path) -> None:
    assert len(page.read_text().splitlines()) <= 75
    for recipe in re.findall(r"```toml\n(\[run\].*?)```", page.read_text(), re.S):
        (tmp_path / "recipe.toml").write_text(recipe)
        assert all(graph.nodes for graph in load_graphs(tmp_path / "recipe.toml", [], tmp_path / "runs"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_table_begins_with_its_head(page: Path) -> None:
    """A row below an empty line is no part of the table above."""
    lines = ["", *re.sub(r"```.*?```", "", page.read_text(), flags=re.S).splitlines(), ""]
    first = [n for n, line in enumerate(lines) if line.startswith("|") and not lines[n - 1].startswith("|")]
    assert [lines[n] for n in first if not re.match(r"\| ?:?--", lines[n + 1])] == []


def test_index_and_site_have_every_page() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    pages = {page for page in pages if not page.startswith("archive/")} - {"index.md"}
    assert {link for link in _links(DOCS / "index.md") if link.endswith(".md")} == pages
    assert set(re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)) == pages | {"index.md"}


def test_the_glossary_has_what_recipes_and_terminal_name() -> None:
    """Kinds, objectives, adapters and states from the code, and words that a newcomer may not know."""
    glossary = (DOCS / "glossary.md").read_text().lower()
    names = {*RECIPE_KINDS, *OBJECTIVES, *get_args(AdapterSettings.model_fields["kind"].annotation), *STATES}
    assert [word for word in sorted(names) + NEWCOMER if not re.search(rf"\b{re.escape(word.lower())}", glossary)] == []


NEWCOMER = (
    """
adapter, advantage, attention, backend, base model, batch, beta, bits per byte, BPE, calibration, checkpoint,
chosen, clip fraction, column, companion, context, corpus, dropout, EMA, embedding, entropy, epoch, ETA,
explained variance, fine-tuning, FLOPs, forgetting, funnel, gold reward, gradient norm, group, held-out,
holdout, interval, judge, key, KL, KV cache, learning rate, lineage, LM head, logits, loss, margin, mask,
merge, micro-batch, mixture, nat, objective, optimizer, orphan, overfitting, overshoot, packing, parameters,
penalty, perplexity, phase, PII, policy, precision, prompt, quarantined, rank, recipe, reference, rejected,
replay, reward hacking, reward model, rollout, RoPE, row, safetensors, schedule, seed, sink, stage, step, stop
string, store, sweep, task, temperature, tok/s, token, tokenizer, top-k, top-p, min-p, validation, verdict,
vocabulary, warmup, weight decay, win rate, yardstick
""".replace("\n", " ")
    .strip()
    .split(", ")
)


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
