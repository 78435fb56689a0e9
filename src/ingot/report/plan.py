"""`ingot plan`: what a run would do, stage by stage, and what every train stage will take.

Rows are plain data first (`--json` prints those). Figures of a train stage come from `stages/training/forecast.py`;
here is only what is known of its inputs: the vocabulary from the tokenizer's result (or its settings before that), the
shape of a model to start from, the sizes of the corpora where they are encoded.
"""

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from ingot.core.errors import UserError, nearest
from ingot.corpus.settings import CorpusSettings
from ingot.model.config import ModelConfig
from ingot.pipeline.graph import Graph
from ingot.pipeline.resolve import Node
from ingot.pipeline.status import status
from ingot.plan.machine import GPUS, Device, cpu, this_machine
from ingot.report import figures, reading
from ingot.report.terminal import console, state_text, table
from ingot.stages.evaluation.settings import EvaluateStageSettings, JudgeSettings
from ingot.stages.job import MODEL, TOKENIZER, Input, in_role, read_config
from ingot.stages.models.imports import read_shape
from ingot.stages.synthesis.settings import GenerateSettings, LabelSettings
from ingot.stages.training.data import open_data
from ingot.stages.training.forecast import UTILISATION, Known, forecast
from ingot.stages.training.phases import longest
from ingot.stages.training.settings import ImportSettings, TrainSettings
from ingot.stages.training.timeline import Extents
from ingot.tokenizer.byte_bpe import load_tokenizer
from ingot.tokenizer.settings import SMALLEST_VOCAB, TokenizerSettings

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
            "facts": _facts(node),
        }
        if now.state == "MISSING":
            row["missing"] = node.missing
        if isinstance(node.settings, TrainSettings):
            row["forecast"] = _forecast(node, graph, device, ranks)
        rows.append(row)
    return rows


def _facts(node: Node) -> dict[str, Any]:
    """A few settings that tell stages apart."""
    settings = node.settings
    if isinstance(settings, CorpusSettings):
        return {"sources": [s.path for s in settings.sources], "format": settings.format}
    if isinstance(settings, TokenizerSettings):
        return {"type": settings.type} | ({"vocab": settings.vocab} if settings.vocab else {})
    if isinstance(settings, TrainSettings):
        facts: dict[str, Any] = {"duration": settings.duration or "", "data": settings.data or settings.corpora}
        facts |= {"init": settings.init} if settings.init else {}
        return facts | ({"adapter": settings.adapter.kind} if settings.adapter else {})
    if isinstance(settings, EvaluateStageSettings):
        return {"models": settings.models}
    if isinstance(settings, JudgeSettings):
        return {"models": settings.models, "against": settings.against, "by": settings.by}
    if isinstance(settings, GenerateSettings):
        return {"model": settings.model, "data": settings.data, "samples": settings.samples}
    if isinstance(settings, LabelSettings):
        return {"data": settings.data, "by": settings.by, "format": settings.format}
    return {}


# -- what is known of a train stage's inputs ---------------------------------------------------------------------------


def _forecast(node: Node, graph: Graph, device: Device, ranks: int) -> dict[str, Any]:
    settings = node.settings
    assert isinstance(settings, TrainSettings)
    if settings.loop.device == "cpu" and device.is_gpu:
        device = cpu()
    try:
        config = _start(node, graph)
        if config is None:
            made_by = node.inputs.get("init", node.inputs["tokenizer"]).name
            return {"unknown": f"its size is known once {made_by} has run"}
        extents = _extents(node, graph, config)
        return forecast(settings, Known(config, device, ranks, extents, _isolated(node), _frozen(node, graph, config)))
    except UserError as error:
        return {"unknown": str(error)}


def _start(node: Node, graph: Graph) -> ModelConfig | None:
    """The shape that a train stage begins with, at the context of phases that set none."""
    settings = node.settings
    assert isinstance(settings, TrainSettings)
    if "init" in node.inputs:
        return _trained(node.inputs["init"], graph)
    vocab = _vocab(node.inputs["tokenizer"], graph)
    assert settings.model
    return settings.model.resolve(vocab) if vocab else None


def _vocab(node: Node, graph: Graph) -> int | None:
    """Ids of a tokenizer that was made, or will be: subword types end at what is set, others at what their text has."""
    settings = node.settings
    assert isinstance(settings, TokenizerSettings)
    made = reading.result(graph.stage(node).path).get("vocab")
    return made or (settings.vocab if settings.type in SMALLEST_VOCAB else None)


def _trained(node: Node, graph: Graph) -> ModelConfig | None:
    """The shape of the model that a stage leaves behind."""
    stage = graph.stage(node).path
    if (stage / MODEL).exists():
        return read_config(stage)
    if isinstance(node.settings, TrainSettings) and (start := _start(node, graph)):
        return longest(node.settings, start)
    if isinstance(node.settings, ImportSettings) and not node.missing:
        return read_shape(node.settings.path)
    return None


def _extents(node: Node, graph: Graph, config: ModelConfig) -> Extents | None:
    """Sizes of the corpora, where all of them are encoded."""
    assert isinstance(node.settings, TrainSettings)
    stores = in_role(node.inputs, "data")
    if not all(graph.stage(n).is_done() for n in (*stores.values(), node.inputs["tokenizer"])):
        return None
    inputs = {name: Input(n.name, n.key, graph.stage(n).path) for name, n in stores.items()}
    tokenizer = load_tokenizer(graph.stage(node.inputs["tokenizer"]).path / TOKENIZER)
    return open_data(node.settings, inputs, config, tokenizer).extent


def _frozen(node: Node, graph: Graph, config: ModelConfig) -> int:
    """Parameters of the models that are loaded beside it, each for its role; of a size that is not known yet, its own.

    What an adapter lies on is its reference too, and in memory already.
    """
    assert isinstance(node.settings, TrainSettings)
    roles = in_role(node.inputs, "companion")
    if node.settings.adapter and roles.get("reference") is node.inputs.get("init"):
        del roles["reference"]
    return sum((_trained(companion, graph) or config).parameters for companion in roles.values())


def _isolated(node: Node) -> bool:
    """Whether rows hold documents that do not see each other: as set, else where conversations are packed whole. Pairs
    and prompts have a row each."""
    assert isinstance(node.settings, TrainSettings)
    corpora = [n.inputs["corpus"].settings for role, n in node.inputs.items() if role.startswith("data:")]
    return any(node.settings.packing.isolates(getattr(corpus, "format", "text")) for corpus in corpora)


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
