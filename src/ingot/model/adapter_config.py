"""Settings of adapters: which matrices of a model get one, and how many parameters it has. No torch.

An adapter is a low-rank update of a frozen matrix (Hu et al. 2021, arXiv:2106.09685); `lora.py` has the modules. Only
matrices inside blocks can have one. The head and the embedding cannot: an adapter on a tied head would silently change
the embedding too, and every loss that applies an untied head in chunks would need to handle it. These two can be
trained in full next to the adapters (`modules_to_save`), which new tokens require.

Targets are shell patterns of the names that `ingot inspect checkpoint` prints. A pattern without a match is an error.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from ingot.core.errors import UserError
from ingot.core.settings import Settings
from ingot.model.config import ModelConfig

ALL = "all-linear"
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter in PEFT's format: configuration and weights."""
_ROLES = ("attention.q", "attention.k", "attention.v", "attention.o", "ffn.gate", "ffn.up", "ffn.down")


class AdapterSettings(Settings):
    """`adapter = { kind = "lora", rank = 16 }` of a train stage: freezes the model and trains low-rank updates."""

    kind: Literal["lora", "rslora", "dora"] = "lora"
    """lora: W + alpha / rank B A. rslora: alpha / sqrt(rank), so the update does not shrink with the rank. dora: also
    learns the norm of each row of the weight."""
    rank: int = Field(default=16, ge=1)
    """Rank r of the update; an adapter has r (inputs + outputs) parameters."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update, see kind."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the adapter's input."""
    targets: Literal["all-linear"] | tuple[str, ...] = ALL
    """Matrices with an adapter: all inside blocks, or patterns of names such as "q", "attention.*", "layers.0.ffn.*";
    each pattern must match at least one matrix."""
    modules_to_save: tuple[Literal["embedding", "head"], ...] = ()
    """Modules to train in full next to the adapters. If the head is tied, either name means both."""

    @property
    def scale(self) -> float:
        """The factor s of B A (rslora: Kalajdzievski 2023, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    @field_validator("modules_to_save")
    @classmethod
    def _unique(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        """Sorted and without duplicates, so that neither changes the stage's key."""
        return tuple(sorted(set(modules)))

    @field_validator("targets")
    @classmethod
    def _targets_match(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        """Refuse a pattern that matches no matrix of any model."""
        if not targets:
            raise ValueError(f'found no pattern, expected at least one, or "{ALL}"')
        names = [f"layers.{i}.{role}" for i in range(1000) for role in _ROLES] if targets != ALL else []
        for pattern in targets if targets != ALL else ():
            if not any(_matches(name, pattern) for name in names):
                raise ValueError(_no_match(pattern, _ROLES))
        return targets


def _table(value: Any) -> Any:
    """`adapter = "lora"` is short for `{ kind = "lora" }`."""
    return {"kind": value} if isinstance(value, str) else value


ADAPTER = BeforeValidator(_table)
"""Annotation of a settings field `adapter`: accepts the short form."""


def check_dropout(adapter: AdapterSettings | None, applies: bool) -> None:
    """Check that an adapter has no dropout where training turns dropout off.

    Raises:
        ValueError: it has.
    """
    if adapter and adapter.dropout and not applies:
        raise ValueError(
            f"found adapter.dropout = {adapter.dropout:g} with an objective that compares the model with itself and so "
            "turns dropout off, expected 0; leave it out"
        )


def linear_layers(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the matrices inside blocks."""
    d, q, kv = config.width, config.heads * config.head_size, config.kv_heads * config.head_size
    sizes = ((d, q), (d, kv), (d, kv), (q, d), (d, config.ffn), (d, config.ffn), (config.ffn, d))
    block = dict(zip(_ROLES, sizes, strict=True))
    if config.activation != "swiglu":
        del block["ffn.gate"]
    return {f"layers.{i}.{role}": size for i in range(config.depth) for role, size in block.items()}


def adapted_layers(settings: AdapterSettings, config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the matrices that get an adapter.

    Raises:
        UserError: a pattern matches no matrix of this model.
    """
    layers = linear_layers(config)
    if settings.targets == ALL:
        return layers
    for pattern in settings.targets:
        if not any(_matches(name, pattern) for name in layers):
            raise UserError(f"adapter.targets: {_no_match(pattern, layers)}")
    return {name: size for name, size in layers.items() if any(_matches(name, p) for p in settings.targets)}


def adapter_parameters(settings: AdapterSettings, config: ModelConfig) -> int:
    """Number of trained parameters: the adapters' and those of `modules_to_save`."""
    return low_rank_parameters(settings, config) + sum(modules_to_save(settings, config).values())


def modules_to_save(settings: AdapterSettings, config: ModelConfig) -> dict[str, int]:
    """Name -> number of parameters of the modules that are trained in full; a tied head is the embedding."""
    names = {"embedding" if config.tied else name for name in settings.modules_to_save}
    return dict.fromkeys(sorted(names), config.vocab * config.width)


def low_rank_parameters(settings: AdapterSettings, config: ModelConfig) -> int:
    """Number of parameters of the adapters: r (inputs + outputs) per matrix, and for dora another `outputs`."""
    magnitude = settings.kind == "dora"
    return sum(settings.rank * (i + o) + magnitude * o for i, o in adapted_layers(settings, config).values())


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name, or its end after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _no_match(pattern: str, names: Mapping[str, Any] | tuple[str, ...]) -> str:
    problem = f"'{pattern}' matches no matrix"
    if "head" in pattern or "embed" in pattern:
        return f"{problem} that can have an adapter; train head and embedding in full with modules_to_save"
    roles = sorted({name.rpartition(".")[2] for name in names})
    return f"{problem}, expected a pattern of names such as layers.0.attention.q; names end in {', '.join(roles)}"
