"""What a train stage will be, in numbers known before it runs: parameters, steps, operations, bytes, rates. No torch.

It asks the same functions as the stage itself (shape, timeline, rows at once), so a plan and the run that follows it
say the same. What stands on data that is not encoded yet is assumed (every row full, as in running text) or left out
(epochs), and says so.
"""

import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from ingot.core.errors import UserError
from ingot.model.adapter_config import (
    AdapterSettings,
    adapted_layers,
    adapter_parameters,
    correction_parameters,
    linear_layers,
    modules_to_save,
)
from ingot.model.config import EAGER_BF16_KEYS, MAX_LOGITS, ModelConfig
from ingot.optim.settings import OptimSettings
from ingot.plan.batch import accumulation
from ingot.plan.flops import training_flops_per_token
from ingot.plan.machine import Device, gpu_hours
from ingot.plan.memory import (
    Activations,
    Memory,
    adapter_activations,
    cache_bytes,
    engine_activations,
    state_bytes,
)
from ingot.stages.training.phases import longest, rows_of_a_draw, timeline
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import Phase, SourceSizes, Timeline, assumed_size

UTILISATION = 0.4
"""Share of a GPU's peak that a good run reaches (Chowdhery et al. 2022, table 3: 0.21 to 0.46); hours assume it."""
CURVE_POINTS = 40
_ELEMENT = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class ForecastInputs:
    """What can be said of a stage's inputs and of what will compute it."""

    config: ModelConfig
    """The shape at the model's own context."""
    device: Device
    ranks: int = 1
    sizes: SourceSizes | None = None
    """BatchSizes of the encoded sources; None before that."""
    isolated: bool = False
    """Whether attention stops at the borders of documents."""
    companions: int = 0
    """Parameters of the frozen models beside it: what it is held to, what rewards it."""


def forecast(settings: TrainSettings, known: ForecastInputs) -> dict[str, Any]:
    """All figures, as plain data; only `parameters`, and why, where the duration counts data of unknown size."""
    config = longest(settings, known.config)
    figures: dict[str, Any] = {"parameters": parameters(config, settings.optim, settings.adapter)}
    try:
        line = timeline(settings, known.config, known.sizes or assumed_size)
    except UserError as error:
        return figures | {"unknown": str(error)}
    flops = training_flops(settings, config, line)
    figures |= {
        "length": {
            "steps": line.steps,
            "tokens": round(line.tokens(line.steps)),
            "epochs": line.epochs(known.sizes) if known.sizes else None,
            "flops": flops,
            "gpu_hours": gpu_hours(flops, known.device.peak, UTILISATION) if known.device.peak else None,
        },
        "phases": line.summary(),
        "curve": _curve(line),
    }
    return figures | {"batch": _batch(settings, line, known.ranks)} | _machine(settings, config, line, known)


def parameters(config: ModelConfig, optim: OptimSettings, adapter: AdapterSettings | None = None) -> dict[str, Any]:
    """Counts by part, and how many of them decay: what has two dimensions does, tables only where asked.

    Where an adapter is trained, it is the last part, copies of what is trained whole among it; the others are frozen,
    and corrections do not decay.
    """
    parts = config.parameters_by_part()
    if adapter:
        parts["adapter"] = trained = adapter_parameters(adapter, config)
        whole = modules_to_save(adapter, config)
        decayed = sum(n for name, n in whole.items() if name == "head" or optim.decay_embeddings)
        total = config.parameters + trained
        return {"total": total, "parts": parts, "trained": trained, "decayed": decayed, "undecayed": trained - decayed}
    tables = parts["embedding"] + parts["positions"] if optim.decay_embeddings else 0
    decayed = _matrices(config) + parts["head"] + tables
    total = config.parameters
    return {"total": total, "parts": parts, "trained": total, "decayed": decayed, "undecayed": total - decayed}


def moments(config: ModelConfig, optim: OptimSettings, adapter: int | None = None) -> int:
    """Numbers that the optimizer keeps between steps; where an adapter of so many numbers is trained, of that alone."""
    trained = config.parameters if adapter is None else adapter
    match optim.kind:
        case "sgd":
            each = 1 if optim.momentum else 0
        case "lion":
            each = 1
        case _:
            each = 2
    # Muon keeps one for a matrix inside a block, AdamW's two for all else.
    fewer = _matrices(config) if optim.kind == "muon" and adapter is None else 0
    return (each + bool(optim.ema)) * trained - fewer


def _matrices(config: ModelConfig) -> int:
    """Parameters of the matrices inside blocks."""
    return sum(inputs * outputs for inputs, outputs in linear_layers(config).values())


def training_flops(settings: TrainSettings, config: ModelConfig, line: Timeline) -> int:
    """Of all steps, for what is trained: without sampling, and without the forward passes of the models beside it."""
    passes = rows_of_a_draw(settings) * settings.objective.passes
    corrections, whole = None, 0
    if settings.adapter:
        corrections = correction_parameters(settings.adapter, config)
        trained = modules_to_save(settings.adapter, config)
        whole = sum(n for name, n in trained.items() if name == "head" or config.tied)  # tables are looked up
    return sum(
        training_flops_per_token(config.model_copy(update={"context": p.context}), corrections, whole)
        * p.rows
        * passes
        * p.context
        for p in line.phases
    )


def _at_once(settings: TrainSettings, line: Timeline, phase: Phase, ranks: int) -> int:
    """Rows of a forward pass in a phase: as set for the longest rows, of shorter ones as many more."""
    longest_rows = line.context
    each = rows_of_a_draw(settings)
    rows = settings.loop.rows_at_once(longest_rows, math.ceil(line.largest * each / ranks))
    return min(math.ceil(line.rows(phase.last) * each / ranks), rows * (longest_rows // phase.context))


def _batch(settings: TrainSettings, line: Timeline, ranks: int) -> dict[str, Any]:
    """How the step with the most tokens is split."""
    phase = max(line.phases, key=lambda p: line.rows(p.last) * p.context)
    rows, micro = line.rows(phase.last) * rows_of_a_draw(settings), _at_once(settings, line, phase, ranks)
    passes = accumulation(rows, micro, ranks)
    return {"rows": rows, "context": phase.context, "micro_batch": micro, "accumulation": passes, "ranks": ranks}


def _machine(settings: TrainSettings, config: ModelConfig, line: Timeline, known: ForecastInputs) -> dict[str, Any]:
    """Precision, optimizer, attention, and the memory of one rank."""
    device, precision = known.device, settings.precision
    if precision == "auto":
        precision = device.half or "fp32"
    passes = [
        _pass(
            config.model_copy(update={"context": p.context}),
            _at_once(settings, line, p, known.ranks),
            precision,
            known,
            settings,
        )
        for p in line.phases
    ]
    attention, kept = max(passes, key=lambda one: one[1].total)
    number = _ELEMENT["fp64" if precision == "fp64" else "fp32"]
    state = _state(config, settings, number, _ELEMENT[precision])
    memory = {
        "weights": state.weights,
        "companions": known.companions * number,  # some may go once they have read every row, before the first step
        "gradients": state.gradients,
        "optimizer": state.moments,
        "activations": kept.layers,
        "attention": kept.scores,
        "casts": kept.casts,
        "logits": kept.logits,
    }
    choice = {"device": device.name, "precision": precision, "optimizer": settings.optim.kind, "attention": attention}
    cache = cache_bytes(config.depth, config.kv_heads * config.head_size, config.context, 1, number)
    return {
        "execution": choice,
        "memory": {**memory, "total": sum(memory.values()), "available": device.memory},
        "generation": {"weights": config.parameters * number, "cache": cache, "context": config.context},
    }


def _state(config: ModelConfig, settings: TrainSettings, number: int, element: int) -> Memory:
    """Weights, gradients and moments; under an adapter, frozen matrices are held in what they are multiplied in."""
    if not settings.adapter:
        return state_bytes(config.parameters, number, moments(config, settings.optim) / config.parameters, number)
    trained = adapter_parameters(settings.adapter, config)
    own = state_bytes(trained, number, moments(config, settings.optim, trained) / trained, number)
    frozen = config.parameters * number - _matrices(config) * max(0, number - element)
    return replace(own, weights=own.weights + frozen)


def _pass(
    config: ModelConfig, rows: int, precision: str, known: ForecastInputs, settings: TrainSettings
) -> tuple[str, Activations]:
    """How attention is computed in a forward pass, and what the pass keeps."""
    adapter = settings.adapter
    if kept := _cpu_backend(config, rows, precision, known, settings):
        return "fused", kept
    few_keys = precision == "bf16" and config.context <= EAGER_BF16_KEYS
    plain = not known.device.is_gpu and (few_keys or config.dropout > 0)
    windowed = config.window is not None and config.window < config.context
    masks = rows if known.isolated else int(windowed)
    element = _ELEMENT[precision]
    device, stream = ("cuda", element) if known.device.is_gpu else ("cpu", _ELEMENT["fp32"])
    copied = adapter is not None and adapter.dropout > 0
    kept = engine_activations(config, rows, element, plain, MAX_LOGITS[device], masks, stream, copied)
    if adapter:
        sizes, tokens = adapted_layers(adapter, config).values(), rows * config.context
        more = adapter_activations(sizes, adapter.rank, tokens, element, adapter.kind == "dora", copied)
        casts = correction_parameters(adapter, config) * element if kept.casts else 0
        kept = replace(kept, layers=kept.layers + more, casts=casts)
    return "plain" if plain else "fused", kept


def _cpu_backend(
    config: ModelConfig, rows: int, precision: str, known: ForecastInputs, settings: TrainSettings
) -> Activations | None:
    """What a pass keeps where the CPU's backend trains the model (`backends/select.py`)."""
    chosen = settings.loop.backend in ("auto", "cpu") and not settings.adapter and not known.device.is_gpu
    if not chosen or find_spec("ingot.backends") is None:
        return None
    from ingot.backends.estimate import cpu_activations

    return cpu_activations(config, rows, precision, MAX_LOGITS["cpu"])


def _curve(line: Timeline) -> dict[str, Any]:
    """Rate and rows at evenly spaced steps."""
    points = min(CURVE_POINTS, line.steps)
    steps = [round(1 + (line.steps - 1) * i / max(1, points - 1)) for i in range(points)]
    return {"step": steps, "lr": [line.lr(s) for s in steps], "rows": [line.rows(s) for s in steps]}
