"""`ingot scaling`: a scaling law of a sweep's runs, what it predicts, and the best model for a budget.

The series is the train stage that the sweep varies. Every other train stage on the same tokens that all points share
is held out: the fit does not see it, and its loss is predicted. N counts all parameters, embeddings included and a tied
head once; D the trained tokens; FLOPs are 6 N D. The loss is the one on held-out text after the last step.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ingot.core.errors import UserError, nearest
from ingot.pipeline.graph import Graph
from ingot.plan.scaling import LAWS, Allocation, best_in_time
from ingot.plan.scaling_fit import EXPONENTS, LEAST_EXPONENT, Fit, TrainedModel, fit, undetermined
from ingot.report import figures, reading
from ingot.report.compare.compare import LOSS
from ingot.report.html.charts import Series, line_chart
from ingot.stages.kind import Node
from ingot.stages.training.settings import TrainSettings

FAR = 100
"""A budget of this many times the FLOPs of the largest run is far from what was measured."""
SIZES = {"size", "depth", "width", "heads", "kv_heads", "head_size", "ffn"}
"""Settings of a model that make its size."""
MAX_LEFT_OUT = 0.1
"""Fraction of the bootstrap samples that may leave the law undetermined; with 2 % noise on a real law at most 0.015."""
MAX_SIZES = 5
"""Sizes with a colour of their own in the chart."""


@dataclass(frozen=True)
class Scaling:
    """A law and the runs behind it."""

    stage: str
    runs: list[TrainedModel]
    held_out: dict[str, TrainedModel]
    """Name of a train stage that the fit does not see -> its run."""
    fit: Fit
    token_seconds: Mapping[float, float]
    """Parameters -> seconds of a trained token on this machine, the median of the series."""
    unique: float
    """Tokens of a run until the first of its corpora repeats; infinite if that is not known."""
    family: Mapping[str, Any]
    """Settings that all models of the series share, but for their size."""


@dataclass(frozen=True)
class Answer:
    """The best model for a budget."""

    budget: str
    best: Allocation
    sizes: tuple[float, float]
    """95 % interval of its parameters."""
    left_out: int
    """Bootstrap samples that do not determine the law; the interval is of the others."""
    flops: float
    served: tuple[float, Allocation] | None
    """Tokens that the model will read and write, and the model that reaches the same loss with the least compute."""


def scaling_of(graphs: list[Graph], stage: str | None = None) -> Scaling:
    """Fit a law to the finished runs of a sweep.

    Args:
        graphs: the points.
        stage: the train stage of the series; default: the only one that the sweep varies.

    Raises:
        UserError: there is no such series, or it has too few finished runs.
    """
    name = series(graphs, stage)
    nodes = {graph.nodes[name].key: (graph, graph.nodes[name]) for graph in graphs}.values()
    runs = {node.key: run for graph, node in nodes if (run := _run(graph, node))}
    seconds: dict[float, list[float]] = {}
    unique = math.inf
    for graph, node in nodes:
        if node.key in runs:
            result = reading.result(graph.stage(node).path)
            if speed := result.get("tok_s"):  # a run whose last attempt made no two steps has none
                seconds.setdefault(result["parameters"], []).append(1 / speed)
            epochs = max((value for metric, value in result.items() if metric.startswith("epochs/")), default=0)
            unique = result["tokens"] / epochs if epochs else unique
    found, held_out = fit(list(runs.values())), _held_out(graphs, name)
    token_seconds = {n: statistics.median(each) for n, each in seconds.items()}
    return Scaling(name, list(runs.values()), held_out, found, token_seconds, unique, _family(graphs, name))


def answer(scaling: Scaling, flops: float | None, seconds: float | None, served: float | None) -> Answer:
    """The best model for FLOPs of training or, on this machine, for a time.

    Raises:
        UserError: the runs do not determine the law.
    """
    law, drawn = scaling.fit.law, scaling.fit.samples
    samples = [sample for sample in drawn if not undetermined(sample)]
    unclear, left_out = undetermined(law), len(drawn) - len(samples)
    if unclear or left_out > MAX_LEFT_OUT * len(drawn):
        unclear = unclear.union(*map(undetermined, drawn))
        raise UserError(
            f"sweep: these runs do not tell how the loss depends on {' and '.join(sorted(unclear, reverse=True))} "
            f"(found exponents of {law.alpha:.3g} for size and {law.beta:.3g} for length, and {left_out} of "
            f"{len(drawn)} samples of the runs outside {LEAST_EXPONENT} to {EXPONENTS[1]:g}); add runs of other sizes "
            "and lengths to [sweep]"
        )
    if seconds is not None:
        if not scaling.token_seconds:
            raise UserError(
                "--budget: found a time, but no run of the sweep whose speed is known, expected one that made two "
                "steps without a break; name FLOPs, such as 1e17"
            )
        best = best_in_time(law, scaling.token_seconds, seconds)
        sizes = [best_in_time(sample, scaling.token_seconds, seconds).parameters for sample in samples]
        budget = figures.duration(seconds)
    else:
        assert flops is not None
        best, sizes = law.optimum(flops), [sample.optimum(flops).parameters for sample in samples]
        budget = f"{flops:.3g} FLOPs"
    sizes.sort()
    edges = sizes[round(0.025 * (len(sizes) - 1))], sizes[round(0.975 * (len(sizes) - 1))]
    cheapest = (served, law.cheapest(best.loss, served)) if served else None
    return Answer(budget, best, edges, left_out, best.flops, cheapest)


def sentences(scaling: Scaling) -> Iterator[str]:
    """The law, its constants with intervals, and its predictions of runs that it has not seen."""
    law, runs = scaling.fit.law, scaling.runs
    sizes, lengths = [r.parameters for r in runs], [r.tokens for r in runs]
    yield (
        f"{len(runs)} runs of {scaling.stage}: {figures.short(min(sizes))} to {figures.short(max(sizes))} parameters "
        f"(embeddings counted), {figures.short(min(lengths))} to {figures.short(max(lengths))} tokens"
    )
    yield (
        f"L(N, D) = {law.E:.3f} + {law.A:.4g} / N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f} nats per token; "
        f"mean error on these runs {100 * scaling.fit.error:.2f} %"
    )
    intervals = ((name, *scaling.fit.interval(name)) for name in ("E", "alpha", "beta"))
    yield "95 % intervals: " + ", ".join(f"{name} {low:.3f} to {high:.3f}" for name, low, high in intervals)
    for name, run in scaling.held_out.items():
        predicted = law.loss(run.parameters, run.tokens)
        low, high = scaling.fit.loss_interval(run.parameters, run.tokens)
        yield (
            f"held out: {name}, {figures.short(run.parameters)} parameters, {figures.short(run.tokens)} tokens: "
            f"predicted {predicted:.4f} ({low:.4f} to {high:.4f}), measured {run.loss:.4f}, "
            f"off by {100 * (predicted / run.loss - 1):+.2f} %"
        )


def answer_lines(scaling: Scaling, found: Answer) -> Iterator[str]:
    """What to train for a budget, beside what published laws would train."""
    best = found.best
    yield (
        f"for {found.budget}: {figures.short(best.parameters)} parameters ({figures.short(found.sizes[0])} to "
        f"{figures.short(found.sizes[1])}), {figures.short(best.tokens)} tokens, "
        f"{_ratio(best)} a parameter; predicted loss {best.loss:.4f}"
    )
    if found.left_out:
        yield (
            f"  the interval leaves out {found.left_out:,} of {len(scaling.fit.samples):,} samples of the runs, "
            "which do not determine a law; more runs would"
        )
    model = {"size": _unit(best.parameters), **scaling.family}
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in model.items())
    yield f'  model = {{ {table} }}, duration = "{_unit(best.tokens)} tokens"'
    published = ((name, law.optimum(found.flops)) for name, law in LAWS.items())
    yield "  published laws for the same FLOPs: " + ", ".join(
        f"{name} {figures.short(a.parameters)} with {figures.short(a.tokens)}" for name, a in published
    )
    if found.served:
        tokens, cheap = found.served
        yield (
            f"  to serve {figures.short(tokens)} tokens at that loss, least compute in all: "
            f"{figures.short(cheap.parameters)} parameters, {figures.short(cheap.tokens)} tokens, "
            f"{_ratio(cheap)} a parameter"
        )
    if (passes := best.tokens / scaling.unique) > 1:
        yield (
            f"  that reads a text {passes:.1f} times, since the first is read once after "
            f"{figures.short(scaling.unique)} tokens, and the law is about new text"
        )
    largest = max(6 * run.parameters * run.tokens for run in [*scaling.runs, *scaling.held_out.values()])
    if found.flops > FAR * largest:
        yield f"  that is {found.flops / largest:,.0f} times the compute of the largest run, far from what was measured"


def data(scaling: Scaling, found: Answer | None) -> dict[str, Any]:
    """All numbers as plain data."""
    law = scaling.fit.law
    names = ("E", "A", "B", "alpha", "beta")
    return {
        "stage": scaling.stage,
        "runs": [vars(run) for run in scaling.runs],
        "law": {name: getattr(law, name) for name in names},
        "intervals": {name: scaling.fit.interval(name) for name in names},
        "mean_error": scaling.fit.error,
        "held_out": {
            name: {**vars(run), "predicted": law.loss(run.parameters, run.tokens)}
            | {"interval": scaling.fit.loss_interval(run.parameters, run.tokens)}
            for name, run in scaling.held_out.items()
        },
        "answer": found
        and {
            "budget": found.budget,
            **_allocation(found.best),
            "parameters_interval": found.sizes,
            "flops": found.flops,
            "cheapest": found.served and {"served": found.served[0], **_allocation(found.served[1])},
        },
    }


def chart(scaling: Scaling) -> Markup:
    """The losses of all runs by compute, with the law's curve for each size."""
    sizes = sorted({run.parameters for run in scaling.runs})
    series, curves = [], []
    for size in sizes:
        runs = [run for run in scaling.runs if run.parameters == size]
        name = f"{figures.short(size)} parameters" if len(sizes) <= MAX_SIZES else "runs"
        series += [Series(name, [(_flops(run), run.loss)], dots=True) for run in runs]
        low, high = min(r.tokens for r in runs), max(r.tokens for r in runs)
        lengths = [low * (high / low) ** (i / 20) for i in range(21)]
        points = [(6 * size * tokens, scaling.fit.law.loss(size, tokens)) for tokens in lengths]
        curves.append(Series("the law", points))
    for run in scaling.held_out.values():
        predicted = scaling.fit.law.loss(run.parameters, run.tokens)
        series.append(Series("held out, measured", [(_flops(run), run.loss)], dots=True))
        curves.append(Series("held out, predicted", [(_flops(run), predicted)], dots=True))
    return line_chart("Loss by compute", [*series, *curves], "FLOPs (6 N D)", "nats per token", log_x=True)


def series(graphs: list[Graph], stage: str | None) -> str:
    """The train stage that the sweep varies."""
    varied = [
        name
        for name, node in graphs[0].nodes.items()
        if isinstance(node.settings, TrainSettings)
        and node.settings.objective.kind == "lm"
        and len({graph.nodes[name].key for graph in graphs}) > 1
    ]
    if stage is None and len(varied) == 1:
        return varied[0]
    if stage in varied:
        return stage
    if not varied:
        raise UserError(
            "sweep: found no train stage with objective lm whose model and duration vary, expected a series to fit a "
            "law to; `ingot init DIR` writes scaling.toml as an example"
        )
    if stage is None:
        raise UserError(f"found {len(varied)} series, {', '.join(varied)}; name one with --stage")
    raise UserError(f"--stage {stage}: the sweep does not vary such a train stage; {nearest(stage, varied)}")


def _held_out(graphs: list[Graph], series: str) -> dict[str, TrainedModel]:
    """Finished train stages that all points share, from random weights, on the tokens of the series."""
    graph, tokens = graphs[0], _tokens(graphs[0].nodes[series])
    return {
        name: run
        for name, node in graph.nodes.items()
        if isinstance(node.settings, TrainSettings)
        and len({g.nodes[name].key for g in graphs}) == 1
        and _tokens(node) == tokens
        and (run := _run(graph, node))
    }


def _family(graphs: list[Graph], series: str) -> dict[str, Any]:
    """The plain settings that the models of all points share, without those that make a size; none with `init`."""
    models = [g.nodes[series].settings.model for g in graphs]  # pyright: ignore[reportAttributeAccessIssue]
    tables = [model.model_dump(mode="json", exclude_unset=True, exclude=SIZES) for model in models if model]
    if len(tables) < len(models):
        return {}
    shared = {name: value for name, value in tables[0].items() if all(t.get(name) == value for t in tables)}
    return {name: value for name, value in shared.items() if isinstance(value, bool | int | float | str)}


def _tokens(node: Node) -> dict[str, str]:
    """The keys of what a train stage reads: its tokens, its initial model, its tokenizer."""
    return {role: source.key for role, source in node.inputs.items()}


def _run(graph: Graph, node: Node) -> TrainedModel | None:
    """A finished run."""
    if not graph.stage(node).is_done():
        return None
    result = reading.result(graph.stage(node).path)
    if LOSS not in result:
        raise UserError(f"{node.name}: found no held-out loss, which a law is fitted to; set holdout.fraction above 0")
    return TrainedModel(result["parameters"], result["tokens"], result[LOSS])


def _flops(run: TrainedModel) -> float:
    return 6 * run.parameters * run.tokens


def _allocation(found: Allocation) -> Mapping[str, float]:
    ratio = {"tokens_per_parameter": found.tokens_per_parameter}
    return {"parameters": found.parameters, "tokens": found.tokens, "loss": found.loss, **ratio}


def _ratio(found: Allocation) -> str:
    """Tokens a parameter."""
    ratio = found.tokens_per_parameter
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def _unit(amount: float) -> str:
    """A count as recipes have it: 1426752 -> 1.4M."""
    amount = float(f"{amount:.3g}")
    unit, scale = next((u, s) for u, s in (("B", 1e9), ("M", 1e6), ("K", 1e3)) if amount >= s or s == 1e3)
    return f"{amount / scale:.6f}".rstrip("0").rstrip(".") + unit
