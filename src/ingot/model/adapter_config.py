"""Adapters as settings and as arithmetic: which matrices of a model get one, and how many numbers it has. No torch.

An adapter learns a correction of low rank to matrices that stay as they are (Hu et al. 2021, arXiv:2106.09685); the
modules are in `lora.py`. Only matrices inside blocks can have one. The head and the embedding cannot: a correction to a
tied head would silently change the embedding too, and one to an untied head would have to be known by every loss that
calls the head in chunks. These two can be trained whole beside the corrections, which is what new words need.

Rejected: a pattern language of its own (shell patterns on names that `ingot inspect checkpoint` prints are enough), and
targets that match nothing without a word (other tools train on and say nothing).
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
"""An adapter in PEFT's format: its configuration, its weights."""
_ROLES = ("attention.q", "attention.k", "attention.v", "attention.o", "ffn.gate", "ffn.up", "ffn.down")


class AdapterSettings(Settings):
    """`adapter = { kind = "lora", rank = 16 }` of a train stage: the model stays, a correction to it is learned."""

    kind: Literal["lora", "rslora", "dora"] = "lora"
    """lora: W + alpha / rank B A. rslora: alpha / sqrt(rank), which does not fade as ranks grow. dora: a learned length
    of each row beside the low-rank change of its direction."""
    rank: int = Field(default=16, ge=1)
    """Inner size r of the correction: r (inputs + outputs) numbers a matrix."""
    alpha: float = Field(default=32.0, gt=0)
    """Strength of the correction, see kind."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of a matrix's inputs that its correction does not see in training."""
    targets: Literal["all-linear"] | tuple[str, ...] = ALL
    """Matrices to correct: all inside blocks, or patterns of their names such as "q", "attention.*", "layers.0.ffn.*";
    each pattern must match one."""
    modules_to_save: tuple[Literal["embedding", "head"], ...] = ()
    """What is trained whole beside the corrections. Where the head is tied, each of the two names means both."""

    @property
    def scale(self) -> float:
        """Factor of B A (rslora: Kalajdzievski 2023, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    @field_validator("modules_to_save")
    @classmethod
    def _once(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        """Neither order nor repetition means anything, so neither is part of a stage's key."""
        return tuple(sorted(set(modules)))

    @field_validator("targets")
    @classmethod
    def _known(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        """A pattern that fits no matrix of any model is found before there is one."""
        if not targets:
            raise ValueError(f'found no pattern, expected at least one, or "{ALL}"')
        every = [f"layers.{i}.{role}" for i in range(1000) for role in _ROLES] if targets != ALL else []
        for pattern in targets if targets != ALL else ():
            if not any(_fits(name, pattern) for name in every):
                raise ValueError(_no_match(pattern, _ROLES))
        return targets


def _table(value: Any) -> Any:
    """`adapter = "lora"` is short for `{ kind = "lora" }`."""
    return {"kind": value} if isinstance(value, str) else value


ADAPTER = BeforeValidator(_table)
"""For the type of a recipe's `adapter`."""


def linear_layers(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the matrices inside blocks, by arithmetic alone."""
    d, q, kv = config.width, config.heads * config.head_size, config.kv_heads * config.head_size
    sizes = ((d, q), (d, kv), (d, kv), (q, d), (d, config.ffn), (d, config.ffn), (config.ffn, d))
    block = dict(zip(_ROLES, sizes, strict=True))
    if config.activation != "swiglu":
        del block["ffn.gate"]
    return {f"layers.{i}.{role}": size for i in range(config.depth) for role, size in block.items()}


def adapted_layers(settings: AdapterSettings, config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices that get an adapter, with their sizes.

    Raises:
        UserError: a pattern matches none of this model.
    """
    layers = linear_layers(config)
    if settings.targets == ALL:
        return layers
    for pattern in settings.targets:
        if not any(_fits(name, pattern) for name in layers):
            raise UserError(f"adapter.targets: {_no_match(pattern, layers)}")
    return {name: size for name, size in layers.items() if any(_fits(name, p) for p in settings.targets)}


def adapter_parameters(settings: AdapterSettings, config: ModelConfig) -> int:
    """Numbers that are trained: those of the corrections, and of what is trained whole."""
    return correction_parameters(settings, config) + sum(modules_to_save(settings, config).values())


def modules_to_save(settings: AdapterSettings, config: ModelConfig) -> dict[str, int]:
    """The modules that are trained whole, with their numbers; the head of a tied model is its embedding."""
    names = {"embedding" if config.tied else name for name in settings.modules_to_save}
    return dict.fromkeys(sorted(names), config.vocab * config.width)


def correction_parameters(settings: AdapterSettings, config: ModelConfig) -> int:
    """Numbers of the corrections: r (inputs + outputs) a matrix, and its outputs once more for dora."""
    magnitude = settings.kind == "dora"
    return sum(settings.rank * (i + o) + magnitude * o for i, o in adapted_layers(settings, config).values())


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern is the name, or the end of it from a dot on."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _no_match(pattern: str, names: Mapping[str, Any] | tuple[str, ...]) -> str:
    found = f"'{pattern}' matches no matrix"
    if any(part in pattern for part in ("head", "embed")):
        return f"{found} that can have an adapter; head and embedding are trained whole, by modules_to_save"
    roles = sorted({name.rpartition(".")[2] for name in names})
    return f"{found}, expected a pattern of names such as layers.0.attention.q; here are {', '.join(roles)}"
