"""The page: it holds the numbers, nothing of the data becomes code, nothing is fetched, and it can be early."""

import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ingot.core.errors import UserError
from ingot.core.events import EventLog
from ingot.report import figures, reading
from ingot.report.figures import visible
from ingot.report.html import page as page_module
from ingot.report.html.page import interruptions, write_report
from ingot.report.html.panels import panel
from ingot.stages.kinds import KINDS

VOID = {"meta", "br", "line", "rect", "circle", "path"}
IMPLIED = {"tr", "td", "th", "li", "thead"}


class Checker(HTMLParser):
    """Tags that are closed in the wrong place, and everything that names a resource."""

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.resources, self.tags, self.ids = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [v for k, v in attrs if k == "id"]
        self.resources += [v for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "action")]
        if tag not in VOID | IMPLIED:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag in VOID | IMPLIED:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append((tag, self.getpos()))


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    return checker


@pytest.fixture(scope="module")
def page(finished) -> str:
    return write_report(finished.graph).read_text()


def test_default_place(finished, page):
    assert (finished.root / "small" / "report.html").exists()
    assert not list((finished.root / "small").glob("*.tmp"))
    assert len(page) < 300_000


def test_a_run_that_was_killed_and_resumed_says_when_and_where(finished, page, tmp_path, monkeypatch):
    """Twice: once before a checkpoint, once after one; a stage that was never interrupted says nothing."""
    assert "nterrupted once" not in page
    assert "nterrupted 2 times" not in page
    for events in (
        [("step", {"step": 3})],
        [("start", {}), ("step", {"step": 2}), ("step", {"step": 7})],
        [("start", {}), ("resume", {"after": 5}), ("step", {"step": 8})],
    ):
        log = EventLog(tmp_path / "metrics.jsonl")
        for name, fields in events:
            log.write(name, **fields)
        log.close()
    lines = interruptions(tmp_path)
    assert [line.split(" after ")[1] for line in lines] == ["step 3, started over", "step 7, resumed from step 5"]
    monkeypatch.setattr(page_module, "interruptions", lambda path: lines if "train-" in path.name else [])
    html = write_report(finished.graph, tmp_path / "page.html").read_text()
    assert "· interrupted 4 times (base, chat) and resumed" in html
    assert html.count(f"Interrupted 2 times: {lines[0]}; {lines[1]}.") == 2
    monkeypatch.setattr(page_module, "interruptions", lambda path: lines[:1] * 10 if "train-" in path.name else [])
    assert "Interrupted 10 times: " in (html := write_report(finished.graph, tmp_path / "page.html").read_text())
    assert "; and 2 later ones." in html


def test_it_is_whole_and_stands_alone(page):
    checker = checked(page)
    assert checker.wrong == []
    assert checker.open == []
    assert checker.tags.count("script") == 1  # its own
    assert not re.search(r"url\((?!#)|@import", page)
    assert not re.search(r"https?://", page)


def test_every_link_leads_to_a_part_of_the_page(page):
    checker = checked(page)
    assert len(checker.resources) > 20
    assert {link.removeprefix("#") for link in checker.resources} <= set(checker.ids)
    assert len(checker.ids) == len(set(checker.ids))


def test_hostile_text_is_shown_not_run(page):
    assert page.count("&lt;script&gt;alert(&#34;owned&#34;)&lt;/script&gt;") >= 3  # removed, sampled twice
    assert page.count("<script") == 1


@pytest.mark.parametrize(
    "number",
    [
        "43 documents in, 40 kept",
        "too few words",
        "exact duplicate",
        "4,213,760",
        "4,211,712",
        "2,048",
        "ln V = 5.704",
        "400 of 400",
        "25 of 40",
        "1.5114 nats, perplexity 4.5",
        "1.8421",
        "1.9700",
        "1.6400",
        "1.2500",
        "response loss, nats",
        "7 of 8 stages done",
        "interrupted",
        "81.2 s",
        "Gradients: ",
    ],
)
def test_it_holds_the_numbers(page, number):
    assert number in page


def test_lineage_and_settings(finished, page):
    for node in finished.graph.nodes.values():
        assert node.key in page
    assert finished.graph.nodes["clean"].raw in page
    assert "[stage.base.optim]" in page
    assert "torch" in page


def test_conclusions_come_first(page):
    top = page[page.index("<main>") : page.index("<section id=stages>")]
    text = re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", top))
    assert "base 1.5114 learned validation loss in nats on all held-out rows (perplexity 4.5); on those read " in text
    assert "while training: validation loss 5.714 → 1.513 in 400 updates: learned; " in text
    assert "on all held-out rows (perplexity 4.5)" in text  # the two losses are of different rows, and it says so
    assert "1.842 between bits per byte on held-out clean: base is below gzip -9 (1.97) and above xz -9 (1.64)" in text
    assert "chat 62 % interrupted" in text


def test_nothing_has_run(empty, tmp_path):
    target = write_report(empty.graph, tmp_path / "early.html")
    html = target.read_text()
    assert checked(html).wrong == []
    assert "0 of 8 stages done" in html
    assert "Nothing has run yet" in html
    assert 'id="base"' not in html  # a stage that has not begun is in the picture alone
    assert html.count("not run") >= 8


@pytest.mark.parametrize("torn", ["metrics", "started"])
def test_a_stage_that_has_just_started(finished, tmp_path, torn):
    stage = tmp_path / "stage"
    shutil.copytree(finished.dir("chat").path, stage)
    if torn == "metrics":
        with (stage / "metrics.jsonl").open("a") as file:
            file.write('{"event": "step", "ste')  # being written at this moment
        assert "25 of 40" in panel("train", stage)
    else:
        (stage / "metrics.jsonl").unlink()
        assert "No step logged yet" in panel("train", stage)


@pytest.mark.parametrize("kind", [*KINDS, "unheard-of"])
def test_every_kind_has_a_panel_that_bears_an_empty_directory(kind, tmp_path):
    assert "yet" in panel(kind, tmp_path)


def test_a_damaged_table_is_a_sentence(tmp_path):
    (tmp_path / "table.jsonl").write_text('{"model": "ba')
    with pytest.raises(UserError, match=r"table.jsonl: not readable, expected the JSON that the stage wrote"):
        reading.table(tmp_path)


def test_d6_verdicts_in_the_panel(finished, tmp_path):
    stage = tmp_path / "stage"
    shutil.copytree(finished.dir("chat").path, stage)
    metrics = (stage / "metrics.jsonl").read_text()
    (stage / "metrics.jsonl").write_text(re.sub(r'"grad_norm": [0-9.]+', '"grad_norm": 13.5', metrics))
    assert "always clipped" in panel("train", stage)
    (stage / "metrics.jsonl").write_text(re.sub(r'"grad_norm": [0-9.]+', '"grad_norm": NaN', metrics))
    assert "critical" in panel("train", stage)


@pytest.mark.parametrize(
    ("nats", "shown"),
    [(10.8, "49,021"), (4.0, "54.6"), (3.0, "20.1"), (2.5, "12.2"), (2.0, "7.4"), (1.5, "4.5"), (math.inf, "inf")],
)
def test_d1_d15_loss_table_in_perplexity(nats, shown):
    assert figures.perplexity(nats) == shown


def test_figures():
    assert figures.duration(81.24) == "81.2 s"
    assert figures.duration(303) == "5 min 3 s"
    assert figures.duration(8000) == "2 h 13 min"
    assert figures.size(3_200_000) == "3.2 MB"
    assert figures.short(1_115_394) == "1.1M"
    assert figures.percentage(1, 0) == "–"
    assert figures.value(1.5) == "1.5"
    assert visible(" " * 64) == '" " × 64'
    assert visible("\n\tx") == '"\\n\\tx"'


def test_no_file_of_the_report_names_a_place_outside():
    import ingot.report

    for file in Path(ingot.report.__path__[0]).rglob("*"):
        if file.suffix in (".py", ".html", ".css", ".js"):
            assert not re.search(r"https?://", file.read_text()), file
