"""The page in a browser: it fits three widths, in light and dark; its charts answer to the mouse and the keyboard."""

import json
import re
import shutil
import struct
import subprocess
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ingot.report.compare.compare import compare
from ingot.report.compare.page import write_comparison
from ingot.report.html.page import write_report

from .conftest import Run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
DARK = "--blink-settings=preferredColorScheme=0"
WIDTHS = (500, 1000, 1400)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

REPORT_TO_TITLE = """
window.onerror = (message) => { document.title = JSON.stringify({ error: message }); };
window.onload = async () => { document.title = JSON.stringify(await (async () => { %s })()); };
"""
LAYOUT = """
const box = (element) => element.getBoundingClientRect();
const isWide = (element) => box(element).right > innerWidth + 1 && !element.closest(".scroll");
const wide = [...document.querySelectorAll("main *, nav *, header *")].filter(isWide).map((e) => e.outerHTML);
const [nav, main] = ["nav", "main"].map((name) => box(document.querySelector(name)));
return { inner: innerWidth, page: document.documentElement.scrollWidth, wide, atLeft: nav.right <= main.left,
         background: getComputedStyle(document.body).backgroundColor };
"""
CHART = """
const figure = document.querySelector("#base figure[data-chart]"), svg = figure.querySelector("svg");
const box = svg.getBoundingClientRect(), output = figure.querySelector("output");
svg.setPointerCapture = () => {};  // which refuses the pointers of a script
const at = (type, part) =>
  svg.dispatchEvent(new PointerEvent(type, { clientX: box.left + part * box.width, clientY: box.top + 50 }));
const ticks = () => [...svg.querySelectorAll(".tick + text")].map((t) => t.textContent);
const found = { all: ticks() };
at("pointermove", 0.5); found.hover = output.textContent;
at("pointerdown", 0.5); at("pointermove", 0.6); at("pointerup", 0.75); found.zoomed = ticks();
figure.querySelector("[name=all]").click(); found.again = ticks();
figure.querySelector("[name=logX]").click(); found.log = ticks();
svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" })); found.key = output.textContent;
return found;
"""
AXE = """
document.querySelectorAll("details").forEach((details) => { details.open = true; });
const { violations } = await axe.run();
return { violations: violations.map((violation) => violation.id) };
"""
REFRESH = """
const source = "<!doctype html>" + document.documentElement.outerHTML;
const more = [...document.querySelectorAll("#base details")].find((d) => d.textContent.includes("more charts"));
more.open = true;
document.querySelector("#base [name=logY]").click();
const untouched = document.getElementById("clean"), changed = document.getElementById("base");
const fresh = new DOMParser().parseFromString(source, "text/html");
const part = (id) => fresh.getElementById(id);
for (const section of fresh.querySelectorAll("header, nav, main > section"))
  section.outerHTML = sources.get(section.id).replace("400 of 400", "401 of 800");
const added = part("base").cloneNode(true);
added.id = "later";
part("base").after(added);
window.fetch = async () => ({ ok: true, text: async () => fresh.documentElement.outerHTML });
await refresh();
const base = document.getElementById("base");
const found = {
  kept: document.getElementById("clean") === untouched,
  replaced: base !== changed,
  text: base.textContent.includes("401 of 800"),
  open: [...base.querySelectorAll("details[open]")].map((d) => d.firstElementChild.textContent),
  logY: base.querySelector("[name=logY]").ariaPressed,
  order: [...document.querySelectorAll("main > section")].map((s) => s.id),
};
window.fetch = async () => { throw new TypeError("connection refused"); };
await refresh();
return { ...found, status: document.getElementById("live").textContent };
"""


def browser(*arguments: str, directory: Path) -> str:
    command = [CHROMIUM or "", *OPTIONS, f"--user-data-dir={directory / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def ask(page: Path, script: str, directory: Path, *options: str) -> dict[str, Any]:
    """What a script returns in the page."""
    copy = directory / "copy.html"
    copy.write_text(page.read_text().replace("<script>", f"<script>{REPORT_TO_TITLE % script}</script><script>", 1))
    dom = browser(*options, "--virtual-time-budget=2000", "--dump-dom", copy.as_uri(), directory=directory)
    title = re.search("<title>(.*?)</title>", dom, re.S)
    return json.loads(unescape(title[1])) if title else {}


@pytest.fixture(scope="module")
def pages(finished: Run) -> dict[str, Path]:
    comparison = write_comparison(compare([finished.root / "small"]), finished.root / "compare.html", "small")
    return {"report": write_report(finished.graph), "comparison": comparison}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "comparison"])
def test_nothing_overflows(pages: dict[str, Path], name: str, width: int, tmp_path: Path) -> None:
    layout = ask(pages[name], LAYOUT, tmp_path, f"--window-size={width},900")
    assert layout["page"] <= layout["inner"] == width
    assert layout["wide"] == []
    assert layout["atLeft"] == (width > 860)


@pytest.mark.parametrize(("options", "brightness"), [((), 246), ((DARK,), 17)])
def test_light_and_dark(pages: dict[str, Path], options: tuple[str, ...], brightness: int, tmp_path: Path) -> None:
    assert ask(pages["report"], LAYOUT, tmp_path, *options)["background"].startswith(f"rgb({brightness},")
    for width in WIDTHS:
        picture = tmp_path / f"{width}.png"
        size = f"--window-size={width},2400"
        browser(*options, size, f"--screenshot={picture}", pages["report"].as_uri(), directory=tmp_path)
        assert struct.unpack(">I", picture.read_bytes()[16:20]) == (width,)


@pytest.mark.parametrize("options", [(), (DARK,)])
@pytest.mark.parametrize("name", ["report", "comparison"])
def test_nobody_is_shut_out(pages: dict[str, Path], name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """axe-core's rules on contrast, names, order and roles, with everything unfolded; an image without a name fails."""
    script = (files("axe_core_python") / "axe.min.js").read_text() + AXE
    page = tmp_path / "page.html"
    page.write_text(pages[name].read_text())
    assert ask(page, script, tmp_path, *options)["violations"] == []
    page.write_text(page.read_text().replace("</main>", "<img src='data:,'></main>"))
    assert "image-alt" in ask(page, script, tmp_path, *options)["violations"]


def test_a_chart_answers_to_mouse_and_keyboard(pages: dict[str, Path], tmp_path: Path) -> None:
    found = ask(pages["report"], CHART, tmp_path, "--window-size=1000,900")
    assert found["all"] == found["again"] == ["0", "100", "200", "300", "400"]
    assert re.search(r"step 18[12]: train [\d.]+", found["hover"])
    assert len(found["zoomed"]) > 2
    assert all(180 < float(tick) < 320 for tick in found["zoomed"])
    assert found["log"] == ["1", "10", "100"]
    assert re.search(r"step [23]: train [\d.]+", found["key"])


def test_a_live_page_replaces_what_has_changed_and_keeps_the_rest(pages: dict[str, Path], tmp_path: Path) -> None:
    found = ask(pages["report"], REFRESH, tmp_path)
    assert (found["kept"], found["replaced"], found["text"], found["logY"]) == (True, True, True, "true")
    assert "2 more charts" in found["open"]
    assert found["order"][found["order"].index("base") + 1] == "later"
    assert found["status"] == "the server has ended; this page no longer updates"
