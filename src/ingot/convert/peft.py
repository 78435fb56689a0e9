"""Adapters in PEFT's file format, in and out; PEFT itself is not needed.

A directory holds `adapter_config.json` and `adapter_model.safetensors`, whose names are those of the model in
transformers: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, likewise `lora_B.weight`, and for DoRA
`lora_magnitude_vector`. Which of ours a module of theirs holds is told by the table that exchanges models (`hf.py`).

An embedding and a head that are trained whole are PEFT's `modules_to_save`: `base_model.model.lm_head.weight`. PEFT
writes a tied head as a copy of the embedding, with `ensure_weight_tying`, and so do we.

GPT-2 keeps queries, keys and values in one module, ours in three. Out: three corrections of rank r are one of rank 3 r,
A's one below the other and B's along a diagonal, exactly; rank and strength of that module go into the patterns of the
configuration. In: one correction with a common A is merged into the stacked matrices.

Reading merges into the model: an adapter from elsewhere is a way to have its model, and what is trained from there on
starts anew. Whatever would make the merged model another one than PEFT's (biases, other modules trained whole, other
methods, a start that changed the frozen weights) is refused by the name of its field.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ingot.convert.hf_config import Dtype
from ingot.convert.hf_weights import matrices, opened, tables, write_tensors
from ingot.core.artifact import atomic_json
from ingot.core.errors import UserError
from ingot.model.adapter_config import PEFT_FILES, AdapterSettings, linear_layers, modules_to_save
from ingot.model.config import ModelConfig
from ingot.model.lora import LoRALinear, merged_weight
from ingot.model.transformer import Transformer

CONFIG, WEIGHTS = PEFT_FILES
_PREFIX, _PARTS = "base_model.model.", ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
_OTHERS = (
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "arrow_config",
    "use_bdlora",
    "monteclora_config",
    "use_qalora",
    "kasa_config",
    "lora_ga_config",
    "corda_config",
    "loftq_config",
)
"""Fields that, when set, mean a model which matrices alone do not make."""
_CHANGED_STARTS = ("pissa", "olora", "loftq", "corda")
"""Ways to start that take something out of the frozen weights."""


def write(
    directory: Path, model: Transformer, settings: AdapterSettings, base: str | None = None, dtype: Dtype = "float32"
) -> None:
    """Write the adapter of a model. Not atomic: the directory should not be published yet.

    Args:
        model: with its adapter beside the frozen matrices.
        settings: of the adapter.
        base: where PEFT finds the frozen model, if anywhere.
        dtype: type of the written numbers.
    """
    every = {theirs: [model.get_submodule(p) for p in parts] for theirs, parts in matrices(model.config).items()}
    modules = {theirs: parts for theirs, parts in every.items() if any(isinstance(p, LoRALinear) for p in parts)}
    kind = getattr(torch, dtype)
    whole = modules_to_save(settings, model.config)
    saved = {theirs: model.get_parameter(f"{n}.weight") for theirs, n in tables(model.config).items() if n in whole}
    tensors = {f"{_PREFIX}{theirs}.weight": p.detach().to("cpu", kind, copy=True) for theirs, p in saved.items()}
    ranks: dict[str, int] = {}
    for theirs, parts in modules.items():
        a_RI, b_OR, magnitude_O = _stacked(parts)
        found = dict(zip(_PARTS, (a_RI, b_OR, magnitude_O), strict=True))
        tensors |= {f"{_PREFIX}{theirs}.{n}": t.to("cpu", kind).contiguous() for n, t in found.items() if t is not None}
        if len(a_RI) != settings.rank:
            ranks[theirs] = len(a_RI)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, directory / WEIGHTS)
    rslora = settings.kind == "rslora"
    table = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": _number(settings.alpha),
        "lora_dropout": settings.dropout,
        "target_modules": _targets(list(modules), list(every)),
        "bias": "none",
        "fan_in_fan_out": model.config.positions == "learned",
        "use_rslora": rslora,
        "use_dora": settings.kind == "dora",
        "init_lora_weights": True,
        "rank_pattern": ranks,
        "alpha_pattern": {n: _number(settings.scale * (math.sqrt(r) if rslora else r)) for n, r in ranks.items()},
        "modules_to_save": sorted(theirs.rpartition(".")[2] for theirs in saved) or None,
        "inference_mode": True,
    }
    if saved and model.config.tied:
        table["ensure_weight_tying"] = True
    atomic_json(directory / CONFIG, table)


@torch.no_grad()
def merge(directory: Path, model: Transformer) -> None:
    """Merge the adapter of a directory into a model that has none.

    Raises:
        UserError: a configuration, a name or a shape that does not fit the model; nothing was changed then.
    """
    file, weights = directory / CONFIG, directory / WEIGHTS
    config, held = _config(file), matrices(model.config)
    saved = _saved(file, config, model.config)
    corrections, whole = _read(weights, model.config, saved, bool(config.get("use_dora")))
    for theirs, tensor in whole.items():
        model.get_parameter(f"{saved[theirs]}.weight").copy_(tensor)
    for theirs, (a_RI, b_OR, magnitude_O) in corrections.items():
        parts_OI = [_weight(model.get_submodule(p)) for p in held[theirs]]
        scale = _scale(config, theirs, len(a_RI))
        merged_OI = merged_weight(torch.cat(parts_OI), a_RI, b_OR, scale, magnitude_O)
        for part_OI, rows_OI in zip(parts_OI, merged_OI.split([len(p) for p in parts_OI]), strict=True):
            part_OI.copy_(rows_OI)


def _stacked(parts: list[nn.Module]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Several corrections as one of the stacked matrices; where a part has none, its rows of B are zero."""
    adapted = [p for p in parts if isinstance(p, LoRALinear)]
    if len(parts) == 1:
        magnitude = adapted[0].lora_magnitude
        return adapted[0].lora_A.detach(), adapted[0].lora_B.detach(), None if magnitude is None else magnitude.detach()
    a_RI = torch.cat([p.lora_A.detach() for p in adapted])
    rows, magnitudes, column = [], [], 0
    for part in parts:
        rows_OR = a_RI.new_zeros(len(_weight(part)), len(a_RI))
        if isinstance(part, LoRALinear):
            rank = len(part.lora_A)
            rows_OR[:, column : column + rank] = part.lora_B.detach()
            column += rank
        own = part.lora_magnitude if isinstance(part, LoRALinear) else _weight(part).square().sum(1).sqrt()
        rows.append(rows_OR)
        magnitudes.append(own)
    magnitude_O = None if adapted[0].lora_magnitude is None else torch.cat([m.detach() for m in magnitudes])
    return a_RI, torch.cat(rows), magnitude_O


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module, nn.Linear)
    return module.weight.detach()


def _targets(chosen: list[str], every: list[str]) -> list[str]:
    """Ends of names where these mean the chosen modules and no others, else whole names."""
    ends = {name.rpartition(".")[2] for name in chosen}
    return sorted(ends) if len(chosen) == sum(name.rpartition(".")[2] in ends for name in every) else chosen


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _config(file: Path) -> dict[str, Any]:
    """The configuration, if matrices alone make its model."""
    try:
        config = json.loads(file.read_text())
        kind = config["peft_type"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: found no peft_type, expected the configuration of a PEFT adapter") from None
    refused = {name: config[name] for name in _OTHERS if config.get(name)}
    if kind != "LORA":
        refused = {"peft_type": kind}
    if config.get("bias", "none") != "none":
        refused["bias"] = config["bias"]
    if str(config.get("init_lora_weights")).startswith(_CHANGED_STARTS):
        refused["init_lora_weights"] = config["init_lora_weights"]
    if refused:
        name, value = next(iter(refused.items()))
        raise UserError(
            f"{file}: found {name} = {json.dumps(value)}, expected an adapter of matrices alone (LORA; lora, rslora or "
            "dora); merge it with PEFT and import the whole model"
        )
    _check_types(file, config)
    return config


def _check_types(file: Path, config: Mapping[str, Any]) -> None:
    """Of the fields that are read."""
    patterns, named = config.get("alpha_pattern") or {}, config.get("modules_to_save") or []
    numbers = {"lora_alpha": config.get("lora_alpha", 8), **(patterns if isinstance(patterns, dict) else {})}
    wrong = next((n for n, value in numbers.items() if type(value) not in (int, float)), None)
    if not isinstance(patterns, dict) or not all(map(_is_pattern, patterns)):
        wrong = "alpha_pattern"
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        wrong = "modules_to_save"
    if wrong is not None:
        found = json.dumps(numbers.get(wrong, config.get(wrong)))
        raise UserError(f"{file}: found {wrong} = {found}, expected what PEFT writes there; save the adapter again")


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _saved(file: Path, config: Mapping[str, Any], shape: ModelConfig) -> dict[str, str]:
    """Their modules that are trained whole -> ours."""
    known, named = tables(shape), config.get("modules_to_save") or []
    found = {name: [theirs for theirs in known if theirs == name or theirs.endswith(f".{name}")] for name in named}
    if unknown := [name for name, fitting in found.items() if not fitting]:
        raise UserError(
            f"{file}: found {json.dumps(unknown[0])} in modules_to_save, expected of {' and '.join(known)} at most; "
            "merge it with PEFT and import the whole model"
        )
    if named and shape.tied and config.get("ensure_weight_tying"):
        return known
    return {theirs: known[theirs] for fitting in found.values() for theirs in fitting}


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Factor of B A; patterns are regular expressions for the end of a module's name, the first that fits counts."""
    patterns = config.get("alpha_pattern") or {}
    fitting = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    alpha = next(fitting, config.get("lora_alpha", 8))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read(
    file: Path, config: ModelConfig, saved: Collection[str], dora: bool
) -> tuple[dict[str, tuple[Tensor, Tensor, Tensor | None]], dict[str, Tensor]]:
    """Their module -> A, B, magnitude; their module -> what was trained whole. In fp32, names and shapes checked."""
    layers, known = linear_layers(config), matrices(config)
    found: dict[str, dict[str, Tensor]] = {}
    names = {f"{_PREFIX}{theirs}.weight": theirs for theirs in saved}
    whole: dict[str, Tensor] = {}
    with opened(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a mapping)
            if name in names:
                whole[names[name]] = tensors.get_tensor(name).to(torch.float32)
                continue
            module, part = _place(file, name)
            if module not in known:
                raise UserError(f"{file}: found {name}, expected only matrices in blocks of the model it is made for")
            found.setdefault(module, {})[part] = tensors.get_tensor(name).to(torch.float32)
    if not found:
        raise UserError(f"{file}: found no tensor, expected an adapter; save it again")
    for module, own in found.items():
        if missing := [part for part in _PARTS[: 3 if dora else 2] if part not in own]:
            raise UserError(f"{file}: found {module} without {missing[0]}, expected it; save the adapter again")
        outputs, inputs = sum(layers[p][1] for p in known[module]), layers[known[module][0]][0]
        if not dora and _PARTS[2] in own:
            raise UserError(f"{file}: found {module}.{_PARTS[2]} without use_dora, expected it; save the adapter again")
        rank = max(1, own[_PARTS[0]].shape[0]) if own[_PARTS[0]].dim() else 1
        for part, shape in zip(_PARTS, ([rank, inputs], [outputs, rank], [outputs]), strict=True):
            if part in own and list(own[part].shape) != shape:
                raise UserError(
                    f"{file}: {module}.{part} has shape {list(own[part].shape)}, expected {shape}; "
                    "name the model that it was made for"
                )
            if part in own and not own[part].isfinite().all():
                raise UserError(f"{file}: {module}.{part} holds numbers that are not finite; the adapter has diverged")
    _check_whole(file, config, saved, whole)
    return {module: (own[_PARTS[0]], own[_PARTS[1]], own.get(_PARTS[2])) for module, own in found.items()}, whole


def _check_whole(file: Path, config: ModelConfig, saved: Collection[str], whole: Mapping[str, Tensor]) -> None:
    """Each of them is there, of the model's shape, and one matrix where the model's head is its embedding."""
    for theirs in saved:
        if theirs not in whole:
            raise UserError(f"{file}: found no {_PREFIX}{theirs}.weight, expected it; save the adapter again")
        if (found := list(whole[theirs].shape)) != (expected := [config.vocab, config.width]):
            raise UserError(
                f"{file}: {theirs}.weight has shape {found}, expected {expected}; name the model that it was made for"
            )
    if config.tied and whole and (len(whole) < 2 or not torch.equal(*whole.values())):
        raise UserError(
            f"{file}: found a head that is not the embedding, expected one matrix for both, as the model has; train it "
            "with ensure_weight_tying"
        )


def _place(file: Path, name: str) -> tuple[str, str]:
    """A stored name as (module, part); older versions wrote `lora_magnitude_vector.weight`."""
    bare = name.removeprefix(_PREFIX)
    for part in _PARTS:
        for written in (part, f"{part}.weight"):
            if name != bare and bare.endswith(f".{written}"):
                return bare.removesuffix(f".{written}"), part
    raise UserError(f"{file}: found {name}, expected names such as {_PREFIX}MODULE.{_PARTS[0]}; save it with PEFT")
