"""Exports LoRA adapters to PEFT's file format, and merges PEFT adapters into a model. Does not need PEFT.

A directory contains `adapter_config.json` and `adapter_model.safetensors` with the module names of transformers:
`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, `lora_B.weight`, and for DoRA `lora_magnitude_vector`.
`hf_weights.linear_modules` maps these modules to ingot's.

A fully trained embedding and head are PEFT's `modules_to_save`, such as `base_model.model.lm_head.weight`. As in PEFT,
a tied head is written as a copy of the embedding, with `ensure_weight_tying`.

GPT-2 in transformers has one module for queries, keys and values, ingot has three. On export, three corrections of rank
r become one of rank 3 r, exactly: the A are stacked and the B block-diagonal; its rank and alpha are in the patterns of
the configuration. On import, a correction is merged into the rows of all three.

An import merges the adapter into the model; it cannot be trained further as an adapter. A configuration whose merged
model would differ from PEFT's (biases, other saved modules, other methods, an initialisation that changes the frozen
weights) is rejected with the name of the field.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ingot.convert.directories import adapter_files
from ingot.convert.hf_config import Dtype
from ingot.convert.hf_weights import (
    embedding_modules,
    linear_modules,
    open_safetensors,
    resize_embeddings,
    write_tensors,
)
from ingot.core.artifact import atomic_json
from ingot.core.errors import UserError
from ingot.model.adapter_config import PEFT_FILES, AdapterSettings, linear_layers, modules_to_save
from ingot.model.config import ModelConfig
from ingot.model.lora import LoRALinear, merged_weight
from ingot.model.transformer import Transformer, empty

CONFIG, WEIGHTS = PEFT_FILES
_PREFIX, _SUFFIXES = "base_model.model.", ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
_SAVED, _FROZEN = (".weight", ".modules_to_save.weight"), ".original_module.weight"
"""Endings of a saved module, and of the weight that it replaces; with a resized vocabulary PEFT writes all three."""
_UNSUPPORTED = (
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
"""Fields that, if set, mean more than a low-rank correction of weights."""
_CHANGING_INITS = ("pissa", "olora", "loftq", "corda")
"""Initialisations that change the frozen weights."""


def write(
    directory: Path, model: Transformer, settings: AdapterSettings, base: str | None = None, dtype: Dtype = "float32"
) -> None:
    """Write the adapter of a model. Not atomic: write into a temporary directory.

    Args:
        directory: the directory to write to.
        model: the model with an unmerged adapter.
        settings: the adapter's settings.
        base: path or name of the frozen model for PEFT, if there is one.
        dtype: type of the written tensors.
    """
    names = linear_modules(model.config)
    all_modules = {name: [model.get_submodule(part) for part in parts] for name, parts in names.items()}
    modules = {name: parts for name, parts in all_modules.items() if any(isinstance(p, LoRALinear) for p in parts)}
    target = getattr(torch, dtype)
    to_save = modules_to_save(settings, model.config)
    saved = {
        name: model.get_parameter(f"{module}.weight")
        for name, module in embedding_modules(model.config).items()
        if module in to_save
    }
    tensors = {f"{_PREFIX}{name}.weight": p.detach().to("cpu", target, copy=True) for name, p in saved.items()}
    ranks: dict[str, int] = {}
    for name, parts in modules.items():
        a_RI, b_OR, magnitude_O = _stack(parts)
        for suffix, tensor in zip(_SUFFIXES, (a_RI, b_OR, magnitude_O), strict=True):
            if tensor is not None:
                tensors[f"{_PREFIX}{name}.{suffix}"] = tensor.to("cpu", target).contiguous()
        if len(a_RI) != settings.rank:
            ranks[name] = len(a_RI)
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
        "target_modules": _targets(list(modules), list(all_modules)),
        "bias": "none",
        "fan_in_fan_out": model.config.positions == "learned",
        "use_rslora": rslora,
        "use_dora": settings.kind == "dora",
        "init_lora_weights": True,
        "rank_pattern": ranks,
        "alpha_pattern": {n: _number(settings.scale * (math.sqrt(r) if rslora else r)) for n, r in ranks.items()},
        "modules_to_save": sorted(name.rpartition(".")[2] for name in saved) or None,
        "inference_mode": True,
    }
    if saved and model.config.tied:
        table["ensure_weight_tying"] = True
    atomic_json(directory / CONFIG, table)


@torch.no_grad()
def merge(directory: Path, model: Transformer) -> Transformer:
    """Merge the adapter in a directory into a model without an adapter.

    Returns:
        The model, or one with another vocabulary size if the adapter contains a resized embedding.

    Raises:
        UserError: a configuration, tensor name or shape that does not fit the model, which is then unchanged.
    """
    file, weights = adapter_files(directory)
    config, modules = _read_config(file), linear_modules(model.config)
    saved = _saved_modules(file, config, model.config)
    corrections, saved_tensors = _read(weights, model.config, saved, bool(config.get("use_dora")))
    embeddings = embedding_modules(model.config)
    if (rows := next((len(t) for t in saved_tensors.values()), model.config.vocab)) != model.config.vocab:
        model = _resized(model, rows)
    for name, tensor in saved_tensors.items():
        model.get_parameter(f"{embeddings[name]}.weight").copy_(tensor)
    for name, (a_RI, b_OR, magnitude_O) in corrections.items():
        weights_OI = [_weight(model.get_submodule(m)) for m in modules[name]]
        scale = _scale(config, name, len(a_RI))
        merged_OI = merged_weight(torch.cat(weights_OI), a_RI, b_OR, scale, magnitude_O)
        for weight_OI, rows_OI in zip(weights_OI, merged_OI.split([len(w) for w in weights_OI]), strict=True):
            weight_OI.copy_(rows_OI)
    return model


def base_of(directory: Path) -> str | None:
    """The name of the model that an adapter was trained on, where its configuration has it."""
    return _read_config(directory / CONFIG).get("base_model_name_or_path")


def _resized(model: Transformer, vocab: int) -> Transformer:
    tensors, config = resize_embeddings(dict(model.named_parameters()), model.config, vocab)
    weight = model.embedding.weight
    resized = empty(config, weight.device, weight.dtype)
    for name, parameter in resized.named_parameters():
        parameter.copy_(tensors[name])
    return resized


def _stack(parts: list[nn.Module]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(A, B, magnitude) of the concatenated module; rows of B are zero for a part without an adapter.

    Args:
        parts: ingot's modules that a Hugging Face module concatenates; at least one has an adapter.
    """
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
        magnitude = part.lora_magnitude if isinstance(part, LoRALinear) else _weight(part).square().sum(1).sqrt()
        rows.append(rows_OR)
        magnitudes.append(magnitude)
    magnitude_O = None if adapted[0].lora_magnitude is None else torch.cat([m.detach() for m in magnitudes])
    return a_RI, torch.cat(rows), magnitude_O


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module, nn.Linear)
    return module.weight.detach()


def _targets(adapted: list[str], modules: list[str]) -> list[str]:
    """`target_modules`: last components of the names if these select exactly the adapted modules, else full names."""
    ends = {name.rpartition(".")[2] for name in adapted}
    return sorted(ends) if len(adapted) == sum(name.rpartition(".")[2] in ends for name in modules) else adapted


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _read_config(file: Path) -> dict[str, Any]:
    """The adapter's configuration. Raises UserError for anything but low-rank corrections."""
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
        peft_type = config["peft_type"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{file}: found no peft_type, expected the configuration of a PEFT adapter") from None
    unsupported = {name: config[name] for name in _UNSUPPORTED if config.get(name)}
    if peft_type != "LORA":
        unsupported = {"peft_type": peft_type}
    if config.get("bias", "none") != "none":
        unsupported["bias"] = config["bias"]
    if str(config.get("init_lora_weights")).startswith(_CHANGING_INITS):
        unsupported["init_lora_weights"] = config["init_lora_weights"]
    if unsupported:
        name, value = next(iter(unsupported.items()))
        raise UserError(
            f"{file}: found {name} = {json.dumps(value)}, expected low-rank matrices only (LORA; lora, rslora or "
            "dora); merge the adapter with PEFT and import the merged model"
        )
    _check_types(file, config)
    return config


def _check_types(file: Path, config: Mapping[str, Any]) -> None:
    """Check the types of the fields that an import reads."""
    patterns, modules = config.get("alpha_pattern") or {}, config.get("modules_to_save") or []
    numbers = {"lora_alpha": config.get("lora_alpha", 8), **(patterns if isinstance(patterns, dict) else {})}
    invalid = next((n for n, value in numbers.items() if type(value) not in (int, float)), None)
    if not isinstance(patterns, dict) or not all(map(_is_pattern, patterns)):
        invalid = "alpha_pattern"
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        invalid = "modules_to_save"
    if invalid is not None:
        value = json.dumps(numbers.get(invalid, config.get(invalid)))
        raise UserError(f"{file}: found {invalid} = {value}, expected PEFT's format; save the adapter again")


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _saved_modules(file: Path, config: Mapping[str, Any], model: ModelConfig) -> dict[str, str]:
    """The modules in `modules_to_save`: Hugging Face name -> ingot's module."""
    available, entries = embedding_modules(model), config.get("modules_to_save") or []
    matches = {entry: [name for name in available if name == entry or name.endswith(f".{entry}")] for entry in entries}
    if unknown := [entry for entry, names in matches.items() if not names]:
        raise UserError(
            f"{file}: found {json.dumps(unknown[0])} in modules_to_save, expected only {' and '.join(available)}; "
            "merge the adapter with PEFT and import the merged model"
        )
    if entries and model.tied and config.get("ensure_weight_tying"):
        return available
    return {name: available[name] for names in matches.values() for name in names}


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of B A. The first alpha pattern (a regular expression) that matches the end of the name applies."""
    patterns = config.get("alpha_pattern") or {}
    matching = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    alpha = next(matching, config.get("lora_alpha", 8))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read(
    file: Path, config: ModelConfig, saved: Collection[str], dora: bool
) -> tuple[dict[str, tuple[Tensor, Tensor, Tensor | None]], dict[str, Tensor]]:
    """Read and check the tensors of an adapter.

    Args:
        file: the weights.
        config: the model's configuration.
        saved: Hugging Face names of the modules in `modules_to_save`. The embedding and the head may be there without
            it, because PEFT saves both after the vocabulary was resized.
        dora: whether the adapter is DoRA, with magnitudes.

    Returns:
        Hugging Face module -> (A, B, magnitude), and saved module -> weight, all in fp32.
    """
    layers, modules = linear_layers(config), linear_modules(config)
    corrections: dict[str, dict[str, Tensor]] = {}
    saved_names = {f"{_PREFIX}{name}{end}": name for name in embedding_modules(config) for end in _SAVED}
    frozen = {f"{_PREFIX}{name}{_FROZEN}" for name in embedding_modules(config)}
    saved_tensors: dict[str, Tensor] = {}
    with open_safetensors(file) as tensors:
        for stored in tensors.keys():  # noqa: SIM118 (not a mapping)
            if stored in frozen:
                continue
            if name := saved_names.get(stored):
                tensor = tensors.get_tensor(stored).to(torch.float32)
                if not torch.equal(saved_tensors.setdefault(name, tensor), tensor):
                    raise UserError(f"{file}: found two weights of {name} that differ; save the adapter again")
                continue
            module, suffix = _parse_name(file, stored)
            if module not in modules:
                raise UserError(f"{file}: found {stored}, expected only linear modules in the blocks of the model")
            corrections.setdefault(module, {})[suffix] = tensors.get_tensor(stored).to(torch.float32)
    if not corrections:
        raise UserError(f"{file}: found no tensor, expected an adapter; save it again")
    a, b, magnitude = _SUFFIXES
    for module, own in corrections.items():
        if missing := [suffix for suffix in _SUFFIXES[: 3 if dora else 2] if suffix not in own]:
            raise UserError(f"{file}: found {module} without {missing[0]}, expected it; save the adapter again")
        outputs, inputs = sum(layers[m][1] for m in modules[module]), layers[modules[module][0]][0]
        if not dora and magnitude in own:
            raise UserError(f"{file}: found {module}.{magnitude} without use_dora, expected it; save the adapter again")
        rank = max(1, own[a].shape[0]) if own[a].dim() else 1
        for suffix, shape in zip(_SUFFIXES, ([rank, inputs], [outputs, rank], [outputs]), strict=True):
            if suffix in own and list(own[suffix].shape) != shape:
                raise UserError(
                    f"{file}: {module}.{suffix} has shape {list(own[suffix].shape)}, expected {shape}; "
                    "name the model that the adapter was trained on"
                )
            if suffix in own and not own[suffix].isfinite().all():
                raise UserError(f"{file}: {module}.{suffix} contains non-finite numbers; the adapter has diverged")
    _check_saved(file, config, saved, saved_tensors)
    return {module: (own[a], own[b], own.get(magnitude)) for module, own in corrections.items()}, saved_tensors


def _check_saved(file: Path, config: ModelConfig, saved: Collection[str], tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError if a saved module is missing or misshapen, or if a tied head differs from the embedding.

    Another number of rows than the model's is a resized vocabulary, if all embeddings have it.
    """
    if missing := [name for name in saved if name not in tensors]:
        raise UserError(
            f"{file}: no {_PREFIX}{missing[0]}.weight, expected all modules_to_save; save the adapter again"
        )
    modules = embedding_modules(config)
    embedding, head = next(name for name, module in modules.items() if module == "embedding"), "lm_head"
    complete = tensors.keys() == modules.keys() or (config.tied and not saved and list(tensors) == [embedding])
    rows = next((len(tensor) for tensor in tensors.values() if tensor.dim()), 0) if complete else 0
    rows = rows or config.vocab
    for name, tensor in tensors.items():
        if (shape := list(tensor.shape)) != (expected := [rows, config.width]):
            raise UserError(
                f"{file}: {name}.weight has shape {shape}, expected {expected}; "
                "name the model that the adapter was trained on"
            )
        if not tensor.isfinite().all():
            raise UserError(f"{file}: {name}.weight contains non-finite numbers; the adapter has diverged")
    if (
        config.tied
        and tensors
        and not (complete and torch.equal(tensors[embedding], tensors.get(head, tensors[embedding])))
    ):
        raise UserError(
            f"{file}: found a head that differs from the embedding, expected equal matrices because the model's are "
            "tied; train the adapter with ensure_weight_tying"
        )


def _parse_name(file: Path, name: str) -> tuple[str, str]:
    """Split a tensor's name into (module, suffix); older versions of PEFT wrote `lora_magnitude_vector.weight`."""
    module_name = name.removeprefix(_PREFIX)
    for suffix in _SUFFIXES:
        for ending in (suffix, f"{suffix}.weight"):
            if name != module_name and module_name.endswith(f".{ending}"):
                return module_name.removesuffix(f".{ending}"), suffix
    raise UserError(
        f"{file}: found {name}, expected the embedding, the head, and names such as {_PREFIX}MODULE.{_SUFFIXES[0]}; "
        "merge the adapter with PEFT and import the merged model"
    )
