"""`ingot plan`: what a run would do, stage by stage, and what every train stage will take.

Rows are plain data first (`--json` prints those). A kind says which of its settings are shown (`Kind.facts`) and what
it will take (`Kind.forecast`).
"""

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from ingot.core.errors import UserError, nearest
from ingot.pipeline.graph import Graph
from ingot.pipeline.status import status
from ingot.plan.machine import GPUS, Device, this_machine
from ingot.report import figures
from ingot.report.terminal import console, state_text, table
from ingot.stages.kind import load
from ingot.stages.kinds import KINDS
from ingot.stages.training.forecast import UTILISATION

BARS = "▁▂▃▄▅▆▇█"


def device_of(name: str | None) -> Device:
    """The GPU of that name, or what this machine has.

    Raises:
        UserError: no data sheet of that GPU is known.
    """
    if name is None:
        return this_machine()
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name}: no such GPU; {nearest(name.lower(), GPUS)}")
    return GPUS[name.lower()]


def plan_rows(graph: Graph, device: Device | None = None, ranks: int = 1) -> list[dict[str, Any]]:
    """What `run` would do: {name, kind, state, why, key, inputs, facts} of every stage, in order, `missing` where its
    files cannot be read and are needed, and `forecast` of a train stage for that device (this machine's by default).
    """
    device = device or this_machine()
    rows = []
    for node in graph.nodes.values():
        now = status(graph, node)
        row: dict[str, Any] = {
            "name": node.name,
            "kind": node.kind,
            "state": now.state,
            "why": now.why,
            "key": node.key,
            "inputs": [n.name for n in node.inputs.values()],
            "facts": KINDS[node.kind].facts(node.settings),
        }
        if now.state == "MISSING":
            row["missing"] = node.missing
        if name := KINDS[node.kind].forecast:
            row["forecast"] = load(name)(node, graph.stage, device, ranks)
        rows.append(row)
    return rows


# -- printed -----------------------------------------------------------------------------------------------------------


def print_plan(rows: list[dict[str, Any]]) -> None:
    """The stages as a table, then a few lines on each train stage."""
    out, shown = console(), table("stage", "kind", "state", "why", "what", "key")
    for row in rows:
        what = ", ".join(_fact(name, value) for name, value in row["facts"].items() if value)
        shown.add_row(row["name"], row["kind"], state_text(row["state"]), row["why"], what, row["key"][:8])
    out.print(shown)
    for row in rows:
        if told := row.get("forecast"):
            out.print(Text(f"\n{row['name']}", "bold"))
            for name, line in _lines(told):
                out.print(f"  {name:<10}  {line}", soft_wrap=True)
    to_do = [row for row in rows if row["state"] != "HIT"]
    done = f"{len(rows) - len(to_do)} of {len(rows)} stages are done"
    out.print(f"\n{done}" if to_do else f"\n{done}; nothing to run")


def _fact(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return _mixture(value)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{name} {value}" if name in ("vocab", "init") else str(value)


def _mixture(shares: dict[str, float]) -> str:
    return " + ".join(name if len(shares) == 1 else f"{share:.3g} {name}" for name, share in shares.items())


def _lines(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A forecast in a few lines: (what, words)."""
    if counts := told.get("parameters"):
        parts = ", ".join(f"{name} {figures.short(n)}" for name, n in counts["parts"].items() if n)
        learned = f"all but {counts['undecayed']:,} decay"
        if counts["trained"] < counts["total"]:
            frozen = counts["total"] - counts["trained"]
            learned = f"{counts['trained']:,} trained ({counts['trained'] / frozen:.2%}), the others frozen"
        yield "parameters", f"{counts['total']:,}: {parts}; {learned}"
    if "unknown" in told:
        yield "unknown", told["unknown"]
    if "length" in told:
        yield from _length(told)
        yield from _rates(told)
        yield from _resources(told)


def _length(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    length, batch = told["length"], told["batch"]
    tokens = f"{figures.short(length['tokens'])} tokens"
    if length["epochs"] is None:
        tokens = f"about {tokens} (exact after tokenizing)"
    line = f"{length['steps']:,} steps, {tokens}, {length['flops']:.3g} FLOP"
    if hours := length["gpu_hours"]:
        days = hours / batch["ranks"] / 24
        time = f"{days:,.0f} days" if days >= 2 else figures.duration(days * 24 * 3600)
        spent = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
        line += f"; {spent} GPU-hours, {time}, at an assumed {UTILISATION:.0%} of the peak"
    yield "length", line
    if seen := ", ".join(f"{name} {n:.3g}" for name, n in (length["epochs"] or {}).items()):
        yield "epochs", seen
    split = f"micro-batch {batch['micro_batch']} x accumulation {batch['accumulation']} x {batch['ranks']} rank(s)"
    whole = batch["rows"] == batch["micro_batch"] * batch["accumulation"] * batch["ranks"]
    yield "batch", f"{batch['rows']:,} rows of {batch['context']:,} {'=' if whole else 'in at most'} {split}"


def _rates(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The curve of the rate, that of the rows where they change, and one line a phase where there are several."""
    curve, phases = told["curve"], told["phases"]
    yield "rate", f"{sparkline(curve['lr'])}  {_ends(phases[0]) if len(phases) == 1 else ''}"
    if len(set(curve["rows"])) > 1:
        yield "rows", f"{sparkline(curve['rows'])}  {curve['rows'][0]:,} -> {curve['rows'][-1]:,}"
    for phase in phases if len(phases) > 1 else ():
        rows = " to ".join(f"{n:,}" for n in dict.fromkeys((phase["rows"], phase["last_rows"])))
        steps = f"steps {phase['first_step']:,} to {phase['last_step']:,}"
        tokens = f"{rows} rows of {phase['context']:,}, {figures.short(phase['tokens'])} tokens"
        yield phase["name"], f"{steps}: {_mixture(phase['data'])}; {tokens}; rate {_ends(phase)}"


def _ends(phase: dict[str, Any]) -> str:
    return " -> ".join(f"{rate:.3g}" for rate in (phase["first_lr"], phase["peak_lr"], phase["last_lr"]))


def _resources(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory, choice = dict(told["memory"]), told["execution"]
    total, there = memory.pop("total"), memory.pop("available")
    parts = ", ".join(f"{name} {figures.size(n)}" for name, n in memory.items() if n)
    of = f"{figures.size(total)} of {figures.size(there)}{'' if total <= there else ', does not fit'}"
    yield "memory", f"{of}{' (each rank)' if told['batch']['ranks'] > 1 else ''}: {parts}"
    later = told["generation"]
    cache = f"{figures.size(later['cache'])} of keys and values a row of {later['context']:,}"
    yield "generation", f"weights {figures.size(later['weights'])}, {cache}"
    chosen = (choice["device"], choice["precision"], choice["optimizer"], f"{choice['attention']} attention")
    yield "compute", ", ".join(chosen)


def sparkline(values: list[float]) -> str:
    """A curve in one line of text, from 0 to its highest value."""
    top = max(values, default=0) or 1
    return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * value / top))] for value in values)
