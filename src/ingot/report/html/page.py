"""The report of a run as one self-contained HTML file, which fetches nothing.

`ingot run` writes it at its end, and `ingot report` at any time; it shows the results that exist by then.
"""

import platform
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from ingot.core.artifact import DONE, atomic_write
from ingot.core.events import METRICS, attempts
from ingot.core.process import usable_cores
from ingot.core.recipe import REPORT, dump_toml
from ingot.core.settings import settings_tree
from ingot.pipeline.graph import Graph
from ingot.pipeline.status import status
from ingot.report import figures, reading
from ingot.report.html.conclusions import HEADINGS, Conclusion, conclusions, group, unfinished
from ingot.report.html.graph_picture import Box, draw
from ingot.report.html.panels import panel
from ingot.report.html.rendering import assets, render
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
MAX_INTERRUPTIONS = 8
"""Interruptions of a stage that are listed, the first ones."""


def write_report(graph: Graph, to: Path | None = None) -> Path:
    """Write the page of a run, finished or not.

    Args:
        graph: the recipe's stages.
        to: file to write; default: `report.html` in the run's directory.

    Returns:
        the file written.
    """
    stages = [_stage(graph, node) for node in graph.nodes.values()]
    started = [s for s in stages if s["started"]]
    states = [s["state"] for s in stages]
    html = render(
        "page.html",
        **assets(),
        name=graph.recipe.home,
        recipe=graph.recipe.path.name,
        seed=graph.recipe.run.seed,
        state=run_state(states),
        summary=_summary(stages),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        conclusions={heading: lines for heading in HEADINGS if (lines := _under(heading, started))},
        picture=draw([_box(stage) for stage in stages]),
        stages=started,
        not_started=[s["name"] for s in stages if not s["started"]],
        environment=_environment(graph),
    )
    target = to or graph.home / REPORT
    atomic_write(target, str(html))
    return target


def _summary(stages: list[dict[str, Any]]) -> str:
    """How many stages are done, their time, and how often they were interrupted."""
    done = [s for s in stages if s["state"] == "done"]
    line = f"{len(done)} of {len(stages)} stages done in {figures.duration(sum(s['seconds'] for s in done))}"
    interrupted = {s["name"]: len(times) for s in stages if (times := s.get("interruptions"))}
    if not interrupted:
        return line
    return f"{line} · interrupted {_times(sum(interrupted.values()))} ({', '.join(interrupted)}) and resumed"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n:,} times"


def run_state(states: list[str]) -> str:
    """The state of a run, from the states of its stages (values of `STATES`)."""
    unfinished = next((s for s in ("failed", "running", "interrupted") if s in states), None)
    return unfinished or ("done" if "done" in states else "not run")


def _under(heading: str, stages: list[dict[str, Any]]) -> list[Conclusion]:
    return [c for stage in stages if group(stage["kind"]) == heading for c in stage["conclusions"]]


def _stage(graph: Graph, node: Node) -> dict[str, Any]:
    out, now = graph.stage(node), status(graph, node)
    visited = graph.visited(node)
    state = "not run" if out.exists() and not visited else STATES[now.state]
    stage: dict[str, Any] = {"name": node.name, "kind": node.kind, "reads": _reads(node)}
    stage |= {"state": state, "css": state.replace(" ", "-"), "started": visited, "seconds": 0.0, "note": now.why}
    if not visited:  # the run leaves it out (`--only`), or has not come to it: it is in the picture alone
        return stage
    done = reading.read_json(out / DONE)
    interrupted = interruptions(out.path)
    outputs, seconds = done.get("outputs", {}).values(), done.get("seconds", 0.0)
    return stage | {
        "version": KINDS[node.kind].version,
        "seconds": seconds,
        "note": figures.duration(seconds) if done else now.why,
        "interruptions": interrupted,
        "interrupted": _interrupted(interrupted),
        "conclusions": _conclusions(node, state, now.why, out.path),
        "panel": panel(node.kind, out.path),
        "toml": dump_toml({"stage": {node.name: {"kind": node.kind, **settings_tree(node.settings)}}}),
        "key": node.key,
        "seed": node.seed,
        "raw": node.raw,
        "directory": graph.link(node),
        "inputs": [(role.split(":")[0], n.name, n.key) for role, n in node.inputs.items()],
        "outputs": f"{len(outputs)} files, {figures.size(sum(o['bytes'] for o in outputs))}" if done else "–",
    }


def interruptions(stage: Path) -> list[str]:
    """When and where each attempt before the last one at a stage ended, and where the next one began."""
    lines = []
    for ended, following in pairwise(attempts(stage / METRICS)):
        when = datetime.fromtimestamp(ended.end).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        where = "" if ended.last_step is None else f" after step {ended.last_step:,}"
        again = "started over" if following.resumed_from is None else f"resumed from step {following.resumed_from:,}"
        lines.append(f"{when}{where}, {again}")
    return lines


def _interrupted(lines: list[str]) -> str:
    """The sentence about interruptions; empty for none."""
    if not lines:
        return ""
    more = f"; and {len(lines) - MAX_INTERRUPTIONS:,} later ones" if len(lines) > MAX_INTERRUPTIONS else ""
    return f"Interrupted {_times(len(lines))}: {'; '.join(lines[:MAX_INTERRUPTIONS])}{more}."


def _reads(node: Node) -> tuple[str, ...]:
    return tuple(dict.fromkeys(n.name for n in node.inputs.values()))


def _conclusions(node: Node, state: str, why: str, stage: Path) -> list[Conclusion]:
    if state == "done":
        return conclusions(node.kind, node.name, stage)
    return [unfinished(node.name, state, why, stage)]


def _box(stage: Mapping[str, Any]) -> Box:
    seconds = stage["note"] if stage["state"] == "done" else ""
    return Box(stage["name"], stage["kind"], stage["state"], seconds, stage["reads"], stage["started"])


def _environment(graph: Graph) -> list[tuple[str, str]]:
    """(label, text) of the software, this machine, and how each train stage was executed."""
    lines = [
        ("ingot", _version("ingot")),
        ("python", platform.python_version()),
        *((name, _version(name)) for name in ("torch", "numpy", "polars", "pyarrow", "tiktoken")),
        ("platform", platform.platform()),
        ("cores", f"{usable_cores()} usable"),
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
