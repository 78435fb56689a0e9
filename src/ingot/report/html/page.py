"""The report of a run as one self-contained HTML file, which fetches nothing.

`ingot run` writes it at its end, and `ingot report` at any time; it shows the results that exist by then.
"""

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ingot.core.artifact import DONE, atomic_write
from ingot.core.recipe import REPORT, dump_toml
from ingot.core.settings import settings_tree
from ingot.pipeline.graph import Graph
from ingot.pipeline.status import status
from ingot.report import figures, reading
from ingot.report.html.graph_picture import Box, draw
from ingot.report.html.panels import panel
from ingot.report.html.rendering import render
from ingot.stages.job import EXECUTION_FILE
from ingot.stages.kind import Node
from ingot.stages.kinds import KINDS

STATES = {
    "HIT": "done",
    "RUNNING": "running",
    "RESUME": "interrupted",
    "FAILED": "failed",
    "RUN": "not run",
    "WAIT": "waiting",
    "MISSING": "not run",
}
"""Status of a stage -> its name on the page."""


def write_report(graph: Graph, to: Path | None = None) -> Path:
    """Write the page of a run, finished or not.

    Args:
        graph: the recipe's stages.
        to: file to write; default: `report.html` in the run's directory.

    Returns:
        the file written.
    """
    run = graph.recipe.run
    stages = [_stage(graph, node) for node in graph.nodes.values()]
    done = [s for s in stages if s["state"] == "done"]
    html = render(
        "page.html",
        name=graph.recipe.home,
        recipe=graph.recipe.path.name,
        seed=run.seed,
        summary=f"{len(done)} of {len(stages)} stages done, {figures.duration(sum(s['seconds'] for s in done))} in all",
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        style=Markup(files("ingot.report").joinpath("templates/style.css").read_text()),
        headline=headline(graph),
        picture=draw([_box(stage) for stage in stages]),
        stages=stages,
        environment=_environment(graph),
    )
    target = to or graph.home / REPORT
    atomic_write(target, str(html))
    return target


def _stage(graph: Graph, node: Node) -> dict[str, Any]:
    out, now = graph.stage(node), status(graph, node)
    done = reading.read_json(out / DONE)
    outputs = done.get("outputs", {}).values()
    seconds = done.get("seconds", 0.0)
    state = STATES[now.state]
    return {
        "name": node.name,
        "kind": node.kind,
        "version": KINDS[node.kind].version,
        "state": state,
        "css": state.replace(" ", "-"),
        "seconds": seconds,
        "note": figures.duration(seconds) if done else now.why,
        "panel": panel(node.kind, out.path),
        "toml": dump_toml({"stage": {node.name: {"kind": node.kind, **settings_tree(node.settings)}}}),
        "key": node.key,
        "seed": node.seed,
        "raw": node.raw,
        "inputs": [(role.split(":")[0], n.name, n.key) for role, n in node.inputs.items()],
        "outputs": f"{len(outputs)} files, {figures.size(sum(o['bytes'] for o in outputs))}" if done else "–",
        "reads": tuple(n.name for n in node.inputs.values()),
    }


def _box(stage: Mapping[str, Any]) -> Box:
    seconds = stage["note"] if stage["state"] == "done" else ""
    return Box(stage["name"], stage["kind"], stage["state"], seconds, stage["reads"])


def headline(graph: Graph) -> list[dict[str, str]]:
    """The main numbers of the finished stages: {label, value, note}."""
    return [
        {"label": label, "value": value, "note": note}
        for node in graph.nodes.values()
        for label, value, note in HEADLINES.get(node.kind, _no_headlines)(node, graph.stage(node).path)
    ]


Headlines = Iterator[tuple[str, str, str]]
"""(label, value, note)"""


def _no_headlines(node: Node, stage: Path) -> Headlines:
    yield from ()


def _corpus_headlines(node: Node, stage: Path) -> Headlines:
    result = reading.result(stage)
    if "documents" in result:
        size = figures.size(result.get("bytes", 0))
        yield f"{node.name}: documents", figures.count(result["documents"]), f"{size} of clean text"


def _train_headlines(node: Node, stage: Path) -> Headlines:
    result = reading.result(stage)
    if "val_loss_nats" in result:
        note = f"{figures.describe_loss(result)}, {figures.short(result['parameters'])} parameters, "
        note += f"{figures.short(result['tokens'])} tokens"
        yield f"{node.name}: validation loss, nats", figures.nats(result["val_loss_nats"]), note
    if "val_reward" in result:
        note = f"mean of fresh samples on held-out prompts; {figures.short(result['tokens'])} tokens trained on"
        yield f"{node.name}: reward", figures.nats(result["val_reward"]), note


def _label_headlines(node: Node, stage: Path) -> Headlines:
    result = reading.result(stage)
    if "score" in result:
        note = f"mean over the answers, {figures.count(result['documents'])} {node.settings.format} kept"  # pyright: ignore
        yield f"{node.name}: score", figures.nats(result["score"]), note


def _evaluate_headlines(node: Node, stage: Path) -> Headlines:
    """The model with the fewest bits per byte on each corpus; the note has the baselines."""
    for task, rows in reading.bits_per_byte(stage).items():
        models = [r for r in rows if not r["reference"]]
        baselines = ", ".join(f"{r['model']} {r['value']:.2f}" for r in rows if r["reference"])
        if models:
            best = min(models, key=lambda r: r["value"])
            yield f"bits per byte on {task}: {best['model']}", figures.nats(best["value"]), baselines
        else:
            yield f"bits per byte on {task}", "–", baselines


HEADLINES: dict[str, Callable[[Node, Path], Headlines]] = {
    "corpus": _corpus_headlines,
    "train": _train_headlines,
    "label": _label_headlines,
    "evaluate": _evaluate_headlines,
}
"""Kind -> (stage, its directory) -> the stage's numbers at the top of the page."""


def _environment(graph: Graph) -> list[tuple[str, str]]:
    """(label, text) of the software, this machine, and how each train stage was executed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = [
        ("ingot", _version("ingot")),
        ("python", platform.python_version()),
        *((name, _version(name)) for name in ("torch", "numpy", "polars", "pyarrow", "tiktoken")),
        ("platform", platform.platform()),
        ("cores", f"{cores} usable"),
    ]
    for node in graph.nodes.values():
        execution = reading.read_json(graph.stage(node) / EXECUTION_FILE)
        if execution:
            text = f"{figures.execution(execution)} ({execution.get('reason', 'as set')})"
            lines.append((f"{node.name} ran with", text))
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
