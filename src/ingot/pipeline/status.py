"""The state of a stage before it runs, and the reason: HIT, RESUME, FAILED, RUN, RUNNING, WAIT or MISSING.

A FAILED stage resumes like an interrupted one. The state differs only in that the stage ended with an error, which it
shows.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.core.artifact import CHECKPOINTS, RECORD, StageDir, checkpoint_steps
from ingot.core.errors import shortened
from ingot.core.events import METRICS, read_events
from ingot.pipeline.graph import Graph
from ingot.stages.kind import Node
from ingot.stages.kinds import KINDS

_MAX_VALUE_LENGTH = 40
"""Most characters of a value in a reason."""
_MAX_FILES = 3
"""Most changed files that a reason names."""


@dataclass(frozen=True)
class Status:
    """A stage's state and the reason as text."""

    state: str
    why: str


def status(graph: Graph, node: Node) -> Status:
    """The status of one node."""
    out = graph.stage(node)
    if out.is_done():
        done = directory_status(out)
        return Status(done.state, f"{done.why}, its source files are gone") if node.missing else done
    if node.missing:
        return Status("MISSING", "its source files cannot be read")
    waiting_for = KINDS[node.kind].waiting_for
    if waiting_for and (why := waiting_for(node.settings)):
        return Status("WAIT", why)
    now = directory_status(out)
    return now if now.state != "RUN" else Status("RUN", _changes(graph.link(node), node))


def directory_status(out: StageDir) -> Status:
    """The status that a stage's directory shows without its recipe: HIT, RUNNING, FAILED, RESUME or RUN."""
    if out.is_done():
        return Status("HIT", f"took {out.read_done().get('seconds', 0):.1f} s")
    if out.is_locked():
        return Status("RUNNING", "another process is running it")
    if out.exists():
        last = read_events(out / METRICS)[-1:]
        if last and last[0]["event"] == "failed":
            return Status("FAILED", ", ".join([last[0]["why"], *_resume_point(out)]))
        return Status("RESUME", next(iter(_resume_point(out)), "interrupted before its first checkpoint"))
    return Status("RUN", "first run")


def _resume_point(out: StageDir) -> list[str]:
    """The step of the newest checkpoint as text; empty if there is none."""
    return [f"from step {step:,}" for step in checkpoint_steps(out / CHECKPOINTS)[:1]]


def _changes(link: Path, node: Node) -> str:
    """Settings and inputs that differ from the result that the run links to."""
    try:
        before = json.loads((link / RECORD).read_text())
    except (OSError, ValueError, RecursionError):
        return "first run"
    changes = _differences(before["canonical"], node.canonical)
    if before["version"] != KINDS[node.kind].version:
        changes.append(f"code version {before['version']} -> {KINDS[node.kind].version}")
    if before["seed"] != node.seed:
        changes.append(f"seed {before['seed']} -> {node.seed}")
    if before["raw"] != node.raw:
        changes += _file_changes(before.get("files") or {}, node.files) or ["source files changed"]
    old_keys = {role: i["key"] for role, i in before["inputs"].items()}
    changes += [f"input {n.name} changed" for role, n in node.inputs.items() if old_keys.get(role) != n.key]
    return ", ".join(dict.fromkeys(changes)) or "its directory was deleted"


def _file_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The raw files that differ; empty where their digests were not recorded."""
    if not before:
        return []
    changes = [f"{name} {'changed' if name in before else 'is new'}" for name in now if before.get(name) != now[name]]
    changes += [f"{name} is gone" for name in before if name not in now]
    more = [f"{len(changes) - _MAX_FILES:,} more files changed"] if len(changes) > _MAX_FILES else []
    return [*changes[:_MAX_FILES], *more]


def _differences(before: Any, now: Any, name: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        changes = []
        for key in [*now, *(k for k in before if k not in now)]:
            changes += _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
        return changes
    if isinstance(before, list) and isinstance(now, list | tuple) and list(now) == before:
        return []
    return [] if before == now else [f"{name} {' -> '.join(_excerpts(before, now))}"]


def _excerpts(before: Any, now: Any) -> list[str]:
    """Both values as text; long ones from 8 characters before the first difference."""
    texts = [json.dumps(value, ensure_ascii=False, default=str) for value in (before, now)]
    pairs = enumerate(zip(*texts, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(map(len, texts))) - 8
    if max(map(len, texts)) > _MAX_VALUE_LENGTH and start > 0:
        texts = [f"...{text[start:]}" for text in texts]
    return [shortened(text, _MAX_VALUE_LENGTH) for text in texts]
