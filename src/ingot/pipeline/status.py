"""What `plan` says of a stage before anything runs, and why: HIT, RESUME, FAILED, RUN, RUNNING, WAIT or MISSING.

A FAILED stage goes on like an interrupted one; the state only says that it ended by itself, and with which words.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.core.artifact import CHECKPOINTS, RECORD, StageDir, checkpoint_steps
from ingot.core.errors import shortened
from ingot.core.events import METRICS, read_events
from ingot.pipeline.graph import Graph
from ingot.stages.kind import Node
from ingot.stages.kinds import KINDS

_LONGEST = 40
"""Characters of a value that are shown."""


@dataclass(frozen=True)
class Status:
    """A stage's state and the reason in words."""

    state: str
    why: str


def status(graph: Graph, node: Node) -> Status:
    """The state of one node."""
    out = graph.stage(node)
    if out.is_done():
        gone = ", from files that are not there now" if node.missing else ""
        return Status("HIT", f"{out.done().get('seconds', 0):.1f} s when it was made{gone}")
    if node.missing:
        return Status("MISSING", "its files cannot be read")
    waits = KINDS[node.kind].waits
    if waits and (why := waits(node.settings)):
        return Status("WAIT", why)
    if out.is_locked():
        return Status("RUNNING", "another process holds it")
    if out.exists():
        last = read_events(out / METRICS)[-1:]
        if last and last[0]["event"] == "failed":
            return Status("FAILED", ", ".join([last[0]["why"], *_saved(out)]))
        return Status("RESUME", next(iter(_saved(out)), "interrupted before anything was saved"))
    return Status("RUN", _changes(graph.link(node), node))


def _saved(out: StageDir) -> list[str]:
    """Where the run goes on, if it has saved anything."""
    return [f"from step {step:,}" for step in checkpoint_steps(out / CHECKPOINTS)[:1]]


def _changes(link: Path, node: Node) -> str:
    """Which setting or input differs from the result that the run's link points to."""
    try:
        before = json.loads((link / RECORD).read_text())
    except (OSError, ValueError):
        return "first run"
    changes = _differences(before["canonical"], node.canonical)
    if before["version"] != KINDS[node.kind].version:
        changes.append(f"code version {before['version']} -> {KINDS[node.kind].version}")
    if before["seed"] != node.seed:
        changes.append(f"seed {before['seed']} -> {node.seed}")
    if before["raw"] != node.raw:
        changes.append("source files changed")
    old = {role: i["key"] for role, i in before["inputs"].items()}
    changes += [f"input {n.name} changed" for role, n in node.inputs.items() if old.get(role) != n.key]
    return ", ".join(dict.fromkeys(changes)) or "its directory is gone"


def _differences(before: Any, now: Any, name: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in [*now, *(k for k in before if k not in now)]:
            inner = f"{name}.{key}" if name else key
            found += _differences(before.get(key), now.get(key), inner)
        return found
    if isinstance(before, list) and isinstance(now, list | tuple) and list(now) == before:
        return []
    return [] if before == now else [f"{name} {' -> '.join(_short(before, now))}"]


def _short(before: Any, now: Any) -> list[str]:
    """Both values, from shortly before the first sign in which they differ where they are long."""
    texts = [json.dumps(value, ensure_ascii=False, default=str) for value in (before, now)]
    pairs = enumerate(zip(*texts, strict=False))
    cut = next((place for place, (a, b) in pairs if a != b), min(map(len, texts))) - 8
    if max(map(len, texts)) > _LONGEST and cut > 0:
        texts = [f"...{text[cut:]}" for text in texts]
    return [shortened(text, _LONGEST) for text in texts]
