"""Forecast of a train stage for `ingot plan`: parameters, steps, FLOPs, memory, learning rates. No torch.

The forecast uses the functions of the stage itself (configuration, timeline, micro-batch), so a plan agrees with its
run. Before the data is encoded, rows are assumed to be full, and figures in epochs are left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from ingot.core.errors import UserError
from ingot.model.adapter_config import (
    AdapterSettings,
    adapted_layers,
    adapter_parameters,
    linear_layers,
    low_rank_parameters,
    modules_to_save,
)
from ingot.model.config import EAGER_BF16_KEYS, MAX_LOGITS, SOFTMAX_CHUNK, ModelConfig, segment_blocks
from ingot.objectives.on_policy_settings import OnPolicySettings
from ingot.objectives.settings import scores_rows
from ingot.optim.settings import BLOCK, OptimSettings, has_codes
from ingot.plan.batch import accumulation
from ingot.plan.flops import training_flops_per_token
from ingot.plan.machine import Device, gpu_hours
from ingot.plan.memory import (
    ADAM_MOMENTS,
    FP32,
    Activations,
    Memory,
    activation_bytes,
    adapter_activations,
    block_gradients,
    cache_bytes,
    checkpointed,
    engine_activations,
    gradients_at_peak,
    head_bytes,
    state_bytes,
    tied_gradients,
)
from ingot.plan.sharding import sharded_state, wire_bytes
from ingot.stages.training.phases import build_timeline, default_batch_reason, rows_per_draw, trained_config
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import Phase, SourceSizes, Timeline, assumed_size

UTILISATION = 0.4
"""Assumed fraction of a GPU's peak FLOP/s (Chowdhery et al. 2022, table 3: 0.21 to 0.46), for GPU hours."""
CURVE_POINTS = 40
_ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class ForecastInputs:
    """What is known about a stage's inputs and its device."""

    config: ModelConfig
    """Configuration of the initial model."""
    device: Device
    ranks: int = 1
    sizes: SourceSizes | None = None
    """Sizes of the encoded sources; None before they are encoded."""
    isolated: bool = False
    """Whether attention is masked between the documents of a row."""
    companions: int = 0
    """Parameters of the companions that steps read: references, reward models."""
    held_out: Mapping[str, int] | None = None
    """Tokens of the held-out rows of each corpus; None before they are encoded."""
    here: bool = True
    """Whether the device is this machine's, whose speed may have been measured."""


def forecast(settings: TrainSettings, inputs: ForecastInputs) -> dict[str, Any]:
    """All figures as plain data.

    Where the duration depends on data of unknown size: only `parameters`, and the reason under `unknown`.
    """
    config = trained_config(settings, inputs.config)
    figures: dict[str, Any] = {"parameters": parameters(config, settings.optim, settings.adapter)}
    try:
        timeline = build_timeline(settings, inputs.config, inputs.sizes or assumed_size)
    except UserError as error:
        return figures | {"unknown": str(error)}
    flops = training_flops(settings, config, timeline)
    figures |= {
        "length": {
            "steps": timeline.steps,
            "tokens": round(timeline.tokens(timeline.steps)),
            "epochs": timeline.epochs(inputs.sizes) if inputs.sizes else None,
            "flops": flops,
            "gpu_hours": gpu_hours(flops, inputs.device.peak, UTILISATION) if inputs.device.peak else None,
        },
        "phases": timeline.summary(),
        "curve": _curve(timeline),
    }
    figures["batch"] = _batch(settings, timeline, inputs)
    return figures | _execution(settings, config, timeline, inputs, figures["batch"])


def parameters(config: ModelConfig, optim: OptimSettings, adapter: AdapterSettings | None = None) -> dict[str, Any]:
    """Parameter counts by module, and how many are trained and decay.

    Weight decay applies to matrices, and to embeddings with `decay_embeddings`. With an adapter, only its parameters
    and the copies of `modules_to_save` are trained, and only the copies can decay.
    """
    parts = config.parameters_by_module()
    if adapter:
        parts["adapter"] = trained = adapter_parameters(adapter, config)
        copies = modules_to_save(adapter, config)
        decayed = sum(n for name, n in copies.items() if name == "head" or optim.decay_embeddings)
        total = config.parameters + trained
        return {"total": total, "parts": parts, "trained": trained, "decayed": decayed, "undecayed": trained - decayed}
    tables = parts["embedding"] + parts["positions"] if optim.decay_embeddings else 0
    decayed = _matrices(config) + parts["head"] + tables
    total = config.parameters
    return {"total": total, "parts": parts, "trained": total, "decayed": decayed, "undecayed": total - decayed}


def moments(config: ModelConfig, optim: OptimSettings, adapter: int | None = None) -> int:
    """Elements of the optimizer's state.

    Args:
        config: the trained model.
        optim: the optimizer.
        adapter: number of trained parameters with an adapter; None without one.
    """
    trained = config.parameters if adapter is None else adapter
    match optim.kind:
        case "sgd":
            each = 1 if optim.momentum else 0
        case "lion":
            each = 1
        case _:
            each = 2
    # Muon has one moment for a matrix inside a block; other parameters have AdamW's two.
    saved = _matrices(config) if optim.kind == "muon" and adapter is None else 0
    return (each + bool(optim.ema)) * trained - saved


def _moment_bytes(config: ModelConfig, settings: TrainSettings, weight_bytes: int, adapter: int | None) -> int:
    """Bytes of the optimizer's state; `adapter` as in `moments`."""
    optim, trained = settings.optim, config.parameters if adapter is None else adapter
    whole = moments(config, optim, adapter) * weight_bytes
    match optim.state:
        case "bf16":
            return whole - ADAM_MOMENTS * trained * (weight_bytes - 2)
        case "8bit":
            coded = ADAM_MOMENTS * sum(size for size in _trained_sizes(config, settings) if has_codes(size))
            small = ADAM_MOMENTS * trained - coded
            return whole - ADAM_MOMENTS * trained * weight_bytes + coded + coded // BLOCK * FP32 + small * FP32
        case _:
            return whole


def _trained_sizes(config: ModelConfig, settings: TrainSettings) -> list[int]:
    """Elements of each trained matrix."""
    if (adapter := settings.adapter) is not None:
        low_rank = [adapter.rank * n for sizes in adapted_layers(adapter, config).values() for n in sizes]
        return [*low_rank, *modules_to_save(adapter, config).values()]
    tables = [config.parameters_by_module()[part] for part in ("embedding", "positions", "head")]
    return [*(inputs * outputs for inputs, outputs in linear_layers(config).values()), *tables]


def _matrices(config: ModelConfig) -> int:
    """Parameters of the matrices inside blocks."""
    return sum(inputs * outputs for inputs, outputs in linear_layers(config).values())


def _in_blocks(config: ModelConfig) -> int:
    """Parameters of all blocks."""
    parts = config.parameters_by_module()
    return parts["attention"] + parts["feed-forward"]


def training_flops(settings: TrainSettings, config: ModelConfig, timeline: Timeline) -> int:
    """FLOPs of the forward and backward passes of all steps, without sampling and without companions."""
    passes = rows_per_draw(settings) * settings.objective.passes
    low_rank, full = None, 0
    if settings.adapter:
        low_rank = low_rank_parameters(settings.adapter, config)
        trained = modules_to_save(settings.adapter, config)
        full = sum(n for name, n in trained.items() if name == "head" or config.tied)  # an embedding lookup is free
    return sum(
        training_flops_per_token(config.model_copy(update={"context": p.context}), low_rank, full)
        * p.rows
        * passes
        * p.context
        for p in timeline.phases
    )


def _micro_batch(settings: TrainSettings, timeline: Timeline, phase: Phase, ranks: int) -> int:
    """Rows of a forward pass in a phase. The setting applies to the longest rows; of shorter rows there are more."""
    each = rows_per_draw(settings)
    rows = settings.loop.micro_batch_rows(timeline.context, math.ceil(timeline.max_rows * each / ranks))
    return timeline.pass_rows(phase, rows, math.ceil(timeline.rows(phase.last) * each / ranks))


def _batch(settings: TrainSettings, timeline: Timeline, inputs: ForecastInputs) -> dict[str, Any]:
    """How the largest step (by tokens) is split into micro-batches, and `why` it has a default's rows."""
    ranks = inputs.ranks
    phase = max(timeline.phases, key=lambda p: timeline.rows(p.last) * p.context)
    rows, micro = timeline.rows(phase.last) * rows_per_draw(settings), _micro_batch(settings, timeline, phase, ranks)
    passes = accumulation(rows, micro, ranks)
    split = {"rows": rows, "context": phase.context, "micro_batch": micro, "accumulation": passes, "ranks": ranks}
    why = default_batch_reason(settings, inputs.config, phase)
    return split | ({"why": why} if why else {})


def _execution(
    settings: TrainSettings,
    config: ModelConfig,
    timeline: Timeline,
    inputs: ForecastInputs,
    batch: Mapping[str, Any],
) -> dict[str, Any]:
    """Precision, optimizer, attention implementation, memory of one rank, and what it sends in an update."""
    device, precision = inputs.device, settings.precision
    if precision == "auto":
        precision = device.half or "fp32"
    passes = [
        _peak_of_pass(
            config.model_copy(update={"context": p.context}),
            _micro_batch(settings, timeline, p, inputs.ranks),
            precision,
            inputs,
            settings,
            batch["accumulation"] > 1,
        )
        for p in timeline.phases
    ]
    attention, activations = max(passes, key=lambda one: one[1].total)
    weight_bytes = _ELEMENT_BYTES["fp64" if precision == "fp64" else "fp32"]
    whole = _state(config, settings, weight_bytes, _ELEMENT_BYTES[precision])
    shard, zero = settings.mesh.shards(inputs.ranks), settings.mesh.zero
    narrow = _ELEMENT_BYTES[precision] / weight_bytes
    rest = 1 - _in_blocks(config) / config.parameters
    state = sharded_state(whole, config.depth, rest, shard, zero, narrow)
    frozen = state_bytes(inputs.companions, weight_bytes, moments=0)
    sampled = isinstance(settings.objective, OnPolicySettings)
    choice = {"device": device.name, "precision": precision, "optimizer": settings.optim.kind, "attention": attention}
    if not device.is_gpu:
        choice |= _backend(config, precision, settings)
    in_place = choice.get("backend") == "cpu" or narrow < 1
    memory = {
        "weights": state.weights,
        "companions": sharded_state(frozen, config.depth, rest, shard, 3, narrow).weights,
        "sampling": whole.weights if sampled and shard > 1 else 0,  # every rank gathers the model to sample from it
        "gradients": _gradients(state, config, settings, activations, batch, in_place),
        "optimizer": state.moments,
        "activations": activations.layers,
        "attention": activations.scores,
        "casts": activations.casts,
        "logits": activations.logits,
        "recomputed": activations.recomputed,
    }
    cache = cache_bytes(config.depth, config.kv_heads * config.head_size, config.context, 1, weight_bytes)
    longest = max(timeline.phases, key=lambda phase: phase.context)
    rows = _micro_batch(settings, timeline, longest, inputs.ranks)
    linear, scores = activation_bytes(config.depth, config.width, config.heads, longest.context, rows)
    return {
        "execution": choice,
        "published": {"activations": linear, "attention": scores},
        "memory": {**memory, "total": sum(memory.values()), "available": device.memory},
        "mesh": {
            "replicate": inputs.ranks // shard,
            "shard": shard,
            "zero": zero,
            "wire": wire_bytes(
                whole.weights, whole.gradients, rest, inputs.ranks // shard, shard, zero, batch["accumulation"], narrow
            ),
        },
        "generation": {"weights": config.parameters * weight_bytes, "cache": cache, "context": config.context},
    }


def _gradients(
    state: Memory,
    config: ModelConfig,
    settings: TrainSettings,
    activations: Activations,
    batch: Mapping[str, Any],
    in_place: bool,
) -> int:
    """Bytes of gradients at the peak; activations go as the gradients of a step's only micro-batch come."""
    if settings.adapter or settings.mesh.shards(batch["ranks"]) > 1:
        return state.gradients
    accumulated = batch["accumulation"] > 1
    head = config.vocab * config.width * state.gradients // config.parameters
    first = state.gradients if accumulated else head
    last = state.gradients + (head * tied_gradients(accumulated, in_place) if config.tied else 0)
    return gradients_at_peak(last, first, activations.total)


def _state(config: ModelConfig, settings: TrainSettings, weight_bytes: int, compute_bytes: int) -> Memory:
    """Memory of weights, gradients and moments. With an adapter, frozen matrices have the dtype of the forward pass."""
    trained = adapter_parameters(settings.adapter, config) if settings.adapter else None
    state = state_bytes(config.parameters if trained is None else trained, weight_bytes, moments=0)
    state = replace(state, moments=_moment_bytes(config, settings, weight_bytes, trained))
    if trained is None:
        return state
    frozen = config.parameters * weight_bytes - _matrices(config) * max(0, weight_bytes - compute_bytes)
    return replace(state, weights=state.weights + frozen)


def _peak_of_pass(
    config: ModelConfig, rows: int, precision: str, inputs: ForecastInputs, settings: TrainSettings, accumulated: bool
) -> tuple[str, Activations]:
    """The attention implementation, and what exists when the backward pass begins: besides all activations a chunk of
    logits and what the head needs, or soon after the gradients inside the last block, if they are larger."""
    attention, activations = _pass(config, rows, precision, inputs, settings, accumulated)
    element = _ELEMENT_BYTES[precision]
    inner = block_gradients(config, rows, element, element if inputs.device.is_gpu else _ELEMENT_BYTES["fp32"])
    last = activations.total - activations.layers - activations.scores - activations.casts
    return attention, replace(activations, logits=activations.logits + max(0, inner - last))


def _pass(
    config: ModelConfig, rows: int, precision: str, inputs: ForecastInputs, settings: TrainSettings, accumulated: bool
) -> tuple[str, Activations]:
    """The attention implementation of a forward pass, and its activations."""
    adapter = settings.adapter
    trained = adapter is None or "head" in modules_to_save(adapter, config)
    plain_loss = not getattr(settings.objective, "penalized", False)
    softmax = (SOFTMAX_CHUNK if plain_loss else MAX_LOGITS)["cuda" if inputs.device.is_gpu else "cpu"]

    def with_head(found: Activations, kernels: bool) -> Activations:
        if scores_rows(settings):  # a number for each row, and no logits
            return replace(found, logits=0)
        head = head_bytes(config, rows, _ELEMENT_BYTES[precision], softmax, kernels, trained, accumulated, plain_loss)
        return replace(found, logits=found.logits + head)

    if activations := _cpu_backend(config, rows, precision, inputs, settings):
        return "fused", with_head(activations, True)
    short = precision == "bf16" and config.context <= EAGER_BF16_KEYS
    plain = not inputs.device.is_gpu and (short or config.dropout > 0)
    windowed = config.window is not None and config.window < config.context
    masks = rows if inputs.isolated else int(windowed)
    element = _ELEMENT_BYTES[precision]
    device, stream = ("cuda", element) if inputs.device.is_gpu else ("cpu", _ELEMENT_BYTES["fp32"])
    copied = adapter is not None and adapter.dropout > 0
    mask = 1 if inputs.device.is_gpu else element  # a CPU's dropout keeps its factor, a GPU's a byte
    gains = adapter is None
    activations = engine_activations(
        config, rows, element, plain, MAX_LOGITS[device], masks, stream, copied, mask, gains
    )
    activations = with_head(activations, False)
    if adapter:
        sizes, tokens = adapted_layers(adapter, config).values(), rows * config.context
        more = adapter_activations(sizes, adapter.rank, tokens, element, adapter.kind == "dora", copied, mask)
        casts = low_rank_parameters(adapter, config) * element if activations.casts else 0
        activations = replace(activations, layers=activations.layers + more, casts=casts)
    if (mode := settings.loop.checkpointing) != "none":
        segment, selective = segment_blocks(mode, config.depth), mode == "selective"
        activations = checkpointed(activations, config, rows, element, plain, segment, selective, masks, stream)
    return "plain" if plain else "fused", activations


def _cpu_backend(
    config: ModelConfig, rows: int, precision: str, inputs: ForecastInputs, settings: TrainSettings
) -> Activations | None:
    """Activations of a forward pass with the backend `cpu`; None where another one is used (`backends/select.py`)."""
    plain = not settings.adapter and not settings.objective.reads_layers and not inputs.device.is_gpu
    if settings.loop.backend not in ("auto", "cpu") or not plain or find_spec("ingot.backends") is None:
        return None
    from ingot.backends.estimate import cpu_activations

    mode = settings.loop.checkpointing
    segment = 0 if mode in ("none", "selective") else segment_blocks(mode, config.depth)
    return cpu_activations(config, rows, precision, MAX_LOGITS["cpu"], segment)


def _backend(config: ModelConfig, precision: str, settings: TrainSettings) -> dict[str, str]:
    """The backend on a CPU, and why it is not the fastest one."""
    name, why = settings.loop.backend, slow_backend(config, precision, settings)
    if name not in ("auto", "cpu"):
        return {"backend": name}
    return {"backend": "torch, or compiled in a long run", "why_backend": why} if why else {"backend": "cpu"}


def slow_backend(config: ModelConfig, precision: str, settings: TrainSettings) -> str | None:
    """Why no C++ kernels train a model on this CPU; None if they do."""
    if find_spec("ingot.backends") is None:
        return "the package ingot.backends was removed"
    from ingot.backends.estimate import why_not

    return why_not(config, precision, adapter=settings.adapter is not None, taps=settings.objective.reads_layers)


def _curve(timeline: Timeline) -> dict[str, Any]:
    """Learning rate and rows at evenly spaced steps."""
    points = min(CURVE_POINTS, timeline.steps)
    steps = [round(1 + (timeline.steps - 1) * i / max(1, points - 1)) for i in range(points)]
    return {"step": steps, "lr": [timeline.lr(s) for s in steps], "rows": [timeline.rows(s) for s in steps]}
