"""`ingot plan`: the state of every stage, and the forecast cost of train stages.

Rows are plain data, which `--json` prints. A kind defines the settings to show (`Kind.facts`) and its forecast
(`Kind.forecast`).
"""

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from ingot.core.errors import UserError, nearest
from ingot.pipeline.graph import Graph
from ingot.pipeline.run import processes
from ingot.pipeline.status import status
from ingot.plan.machine import GPUS, Device, this_machine
from ingot.plan.stage_costs import HOUR, PARAMETERS, STAGES
from ingot.plan.stage_costs import UTILISATION as STAGE_UTILISATION
from ingot.report import figures
from ingot.report.terminal import console, state_text, table
from ingot.stages.kind import load
from ingot.stages.kinds import KINDS
from ingot.stages.training.forecast import UTILISATION
from ingot.stages.training.timeline import overshoot

BARS = "▁▂▃▄▅▆▇█"
"""Heights of a sparkline."""


def device_of(name: str | None) -> Device:
    """The GPU of that name; None stands for this machine.

    Raises:
        UserError: the GPU is unknown.
    """
    if name is None:
        return this_machine()
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name}: no such GPU; {nearest(name.lower(), GPUS)}")
    return GPUS[name.lower()]


def plan_rows(
    graph: Graph,
    device: Device | None = None,
    ranks: int | None = None,
    only: list[str] | None = None,
    here: bool = True,
    per_hour: float | None = None,
) -> list[dict[str, Any]]:
    """A row for every stage that `run` would visit, in the same order.

    Args:
        device: the device of the forecast; default: this machine's.
        ranks: processes of the forecast; default: those of a stage's mesh.
        only: as for `run`: the named stages and what they need; default: all.
        here: whether the device is this machine's, whose measured speed applies.
        per_hour: price of an hour of a device.

    Returns:
        {name, kind, state, why, key, inputs, facts}; with `missing`, an error message, if required files cannot be
        read; with `forecast` for kinds that have one.
    """
    device = device or this_machine()
    rows = []
    for node in graph.needed(only or []):
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
            row["forecast"] = load(name)(node, graph.stage, device, processes(node, ranks), here, per_hour)
        rows.append(row)
    return rows


# -- printing ----------------------------------------------------------------------------------------------------------


def print_plan(rows: list[dict[str, Any]]) -> None:
    """Print the stages as a table, and the forecasts below it."""
    out, stages = console(), table("stage", "kind", "state", "why", "what", "key")
    for row in rows:
        facts = ", ".join(_fact(name, value) for name, value in row["facts"].items() if value)
        stages.add_row(row["name"], row["kind"], state_text(row["state"]), row["why"], facts, row["key"][:8])
    out.print(stages)
    for row in rows:
        if forecast := row.get("forecast"):
            out.print(Text(f"\n{row['name']}", "bold"))
            for name, line in _forecast_lines(forecast):
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


def _mixture(fractions: dict[str, Any]) -> str:
    """Names with their fractions, if there are several; of other tables the names alone."""
    if len(fractions) == 1 or not all(isinstance(fraction, int | float) for fraction in fractions.values()):
        return " + ".join(fractions)
    return " + ".join(f"{fraction:.3g} {name}" for name, fraction in fractions.items())


def _forecast_lines(forecast: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, text) of each line of a forecast."""
    if counts := forecast.get("parameters"):
        parts = ", ".join(f"{name} {figures.short(n)}" for name, n in counts["parts"].items() if n)
        trained = f"all but {counts['undecayed']:,} decay"
        if counts["trained"] < counts["total"]:
            frozen = counts["total"] - counts["trained"]
            trained = f"{counts['trained']:,} trained ({counts['trained'] / frozen:.2%}), the others frozen"
        yield "parameters", f"{counts['total']:,}: {parts}; {trained}"
    if "unknown" in forecast:
        yield "unknown", forecast["unknown"]
    if "length" in forecast:
        yield from _length_lines(forecast)
        yield from _schedule_lines(forecast)
        yield from _cost_lines(forecast)
        yield from _resource_lines(forecast)


def _length_lines(forecast: dict[str, Any]) -> Iterator[tuple[str, str]]:
    length, batch = forecast["length"], forecast["batch"]
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
    if epochs := ", ".join(f"{name} {n:.3g}" for name, n in (length["epochs"] or {}).items()):
        yield "epochs", epochs
    for phase in forecast["phases"]:
        for name, wanted in phase["capped"].items():
            now = phase["data"].get(name, 0.0)
            yield (
                "used up",
                (
                    f"{name} has {100 * now:.3g} % of the tokens of {phase['name']}, not {100 * wanted:.3g} %, because "
                    "max_epochs allows no more; the others share the rest"
                ),
            )
    for problem in filter(None, (overshoot(phase, length["epochs"]) for phase in forecast["phases"])):
        yield "overshoot", problem
    split = f"micro-batch {batch['micro_batch']} x accumulation {batch['accumulation']} x {batch['ranks']} rank(s)"
    exact = batch["rows"] == batch["micro_batch"] * batch["accumulation"] * batch["ranks"]
    why = f"; {batch['why']}" if "why" in batch else ""
    yield "batch", f"{batch['rows']:,} rows of {batch['context']:,} {'=' if exact else 'in at most'} {split}{why}"


def _schedule_lines(forecast: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The learning rate, the batch size if it changes, and each phase if there are several."""
    curve, phases = forecast["curve"], forecast["phases"]
    yield "rate", f"{sparkline(curve['lr'])}  {_lr_range(phases[0]) if len(phases) == 1 else ''}"
    if len(set(curve["rows"])) > 1:
        yield "rows", f"{sparkline(curve['rows'])}  {curve['rows'][0]:,} -> {curve['rows'][-1]:,}"
    for phase in phases if len(phases) > 1 else ():
        rows = " to ".join(f"{n:,}" for n in dict.fromkeys((phase["rows"], phase["last_rows"])))
        steps = f"steps {phase['first_step']:,} to {phase['last_step']:,}"
        tokens = f"{rows} rows of {phase['context']:,}, {figures.short(phase['tokens'])} tokens"
        yield phase["name"], f"{steps}: {_mixture(phase['data'])}; {tokens}; rate {_lr_range(phase)}"


def _lr_range(phase: dict[str, Any]) -> str:
    return " -> ".join(f"{lr:.3g}" for lr in (phase["first_lr"], phase["peak_lr"], phase["last_lr"]))


def _cost_lines(forecast: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Time, price and disk."""
    if time := forecast["time"]:
        parts = ", ".join(
            f"{name} {figures.duration(time[name])}" for name in ("start", "steps", "evaluations", "checkpoints")
        )
        by = f"as {time['by']} on this machine showed"
        yield "time", f"{figures.duration(time['total'])}: {parts}; {_step_time(time['step'])} a step, {by}"
        if "mfu" in time:
            yield "", figures.mfu_line(time["mfu"], time)
    elif forecast["here"]:
        yield "time", "not known: this machine has not been measured; add --measure"
    if "price" in forecast:
        amount = forecast["price"]
        yield "price", "not known: it is that of the time" if amount is None else f"{amount:,.2f}"
    disk = forecast["disk"]
    yield (
        "disk",
        f"{figures.size(disk['total'])}: checkpoints of {figures.size(disk['checkpoint'])} and the best weights",
    )


def _step_time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _resource_lines(forecast: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory, choice, generation = dict(forecast["memory"]), forecast["execution"], forecast["generation"]
    total, available = memory.pop("total"), memory.pop("available")
    parts = ", ".join(f"{name} {figures.size(n)}" for name, n in memory.items() if n)
    use = f"{figures.size(total)} of {figures.size(available)}{'' if total <= available else ', does not fit'}"
    yield "memory", f"{use}{' (each rank)' if forecast['batch']['ranks'] > 1 else ''}: {parts}"
    if measured := (forecast["time"] or {}).get("peak_bytes"):
        yield "", f"measured: {figures.size(measured)} of tensors"
    if forecast["fits"] is not None:
        yield "fits", f"micro-batches of at most {forecast['fits']:,} rows"
    mesh = forecast["mesh"]
    if forecast["batch"]["ranks"] > 1:
        stage = f", ZeRO-{mesh['zero']}" if mesh["shard"] > 1 else ""
        shape = f"replicate {mesh['replicate']} x shard {mesh['shard']}{stage}"
        yield "mesh", f"{shape}: a rank sends {figures.size(mesh['wire'])} in an update"
    published = {name: figures.size(n) for name, n in forecast["published"].items()}
    yield (
        "",
        (
            f"for comparison, GPT-3's blocks in 16 bits (arXiv:2205.05198): activations {published['activations']}, "
            f"and {published['attention']} without fused attention"
        ),
    )
    cache = f"{figures.size(generation['cache'])} of keys and values per row of {generation['context']:,}"
    yield "generation", f"weights {figures.size(generation['weights'])}, {cache}"
    compute = (choice["device"], choice["precision"], choice["optimizer"], f"{choice['attention']} attention")
    yield "compute", ", ".join(compute)
    if why := choice.get("why_backend"):
        yield "backend", f"{choice['backend']}: {why}"


def sparkline(values: list[float]) -> str:
    """A curve as one line of text, scaled from 0 to its maximum."""
    top = max(values, default=0) or 1
    return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * value / top))] for value in values)


def stage_cost_rows(hour: float | None = None) -> list[dict[str, Any]]:
    """What the stages of a large model cost, by compute and by people, beside what the sources print.

    Args:
        hour: dollars of an hour of an A100; default: `stage_costs.HOUR`.
    """
    hour = HOUR if hour is None else hour
    return [
        {
            "stage": stage.name,
            "tokens": list(stage.tokens),
            "compute": [stage.compute(tokens, hour) for tokens in stage.tokens],
            "people": stage.people,
            "total": [stage.compute(tokens, hour) + stage.people for tokens in stage.tokens],
            "printed": stage.printed,
            "hour": hour,
        }
        for stage in STAGES
    ]


def print_stage_costs(rows: list[dict[str, Any]]) -> None:
    """Print the stages as a table, with the assumptions below it."""
    shown = table("stage", "tokens", "compute", "people", "total", "sources")
    for row in rows:
        dollars = [" to ".join(map(_dollars, pair)) for pair in (row["compute"], row["total"])]
        tokens = " to ".join(map(figures.short, row["tokens"]))
        shown.add_row(row["stage"], tokens, dollars[0], _dollars(row["people"]), dollars[1], _dollars(row["printed"]))
    out = console()
    out.print(shown)
    out.print(
        f"{figures.short(PARAMETERS)} parameters on A100s at {STAGE_UTILISATION:.0%} of their peak and "
        f"${rows[0]['hour']:g} an hour. Compute alone explains the first line only; people write or compare "
        + " and ".join(f"{stage.rows:,} rows at ${stage.row:g} ({stage.name})" for stage in STAGES if stage.rows)
        + ", which are assumptions.",
        soft_wrap=True,
    )


def _dollars(amount: float) -> str:
    """Two digits: 31.3 -> "$31", 1043530 -> "$1M"."""
    return f"${figures.short(float(f'{amount:.2g}'))}"
