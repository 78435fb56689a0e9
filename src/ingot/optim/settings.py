"""Settings of the optimizer and its schedule.

One flat table serves all kinds. A setting that the chosen optimizer or schedule does not have is an error. Omitted
settings get the default of the chosen kind, so a resolved recipe states every value.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ingot.core.settings import Settings

Kind = Literal["adamw", "adam", "sgd", "muon", "lion"]
ScheduleKind = Literal["cosine", "linear", "wsd", "inverse-sqrt", "constant"]

_ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {**_ADAM, "state": "fp32", "weight_decay": 0.1},
    "adam": {**_ADAM, "state": "fp32", "weight_decay": 0.0},
    "sgd": {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
    "muon": {**_ADAM, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.5},
}
"""The settings of each optimizer, with their defaults."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"min_ratio": 0.1, "decay_steps": None},
    "linear": {"min_ratio": 0.1, "decay_steps": None},
    "wsd": {"min_ratio": 0.1, "decay_steps": None, "cooldown": 0.2, "cooldown_shape": "linear"},
    "inverse-sqrt": {"min_ratio": 0.1},
    "constant": {},
}
"""The settings of each schedule, with their defaults."""
_INSTEAD = {
    "galore": "whose moments take 3 bytes a parameter at a quarter of the rank; use kind = 'adamw' with "
    "state = '8bit', which takes 2, or an adapter",
    "lomo": "which changes weights during the backward pass, so there are no micro-batches, and clips by the global "
    "norm only with a second one; use kind = 'adamw' with state = '8bit', mesh = { shard = N }, or an adapter",
    "adafactor": "which is not offered; use kind = 'adamw' with state = '8bit'",
    "adamw8bit": "expected kind = 'adamw' with state = '8bit'",
}
"""Low-memory optimizers that are not offered, and what to use."""
BLOCK = 256
"""Elements of a moment in 8 bits that share a scale."""


_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimSettings(Settings):
    """The optimizer, its learning-rate schedule, and gradient clipping."""

    kind: Kind = "adamw"
    """adamw, adam, sgd, lion (extra `lion`), or muon: Muon for the matrices inside blocks, AdamW for the others."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate; default: 6e-4 * sqrt(768 / width), a fifth of that for lion, a tenth if the stage has an
    `init` and neither `init_layers` nor an adapter; required for sgd."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """sgd (default 0.9), muon (0.95): v = momentum * v + g."""
    nesterov: bool | None = None
    """sgd (default false), muon (true): Nesterov momentum."""
    betas: tuple[_Decay, _Decay] | None = None
    """Decay rates of the first and second moments, default 0.9 and 0.95; for lion of the update and its momentum, 0.9
    and 0.99."""
    state: Literal["fp32", "bf16", "8bit"] | None = None
    """adamw, adam: how moments are stored: fp32 (8 bytes a parameter for both), bf16 with stochastic rounding (4), or
    8bit in blocks of 256 (2; extra `torchao`). Default: fp32."""
    eps: float | None = Field(default=None, gt=0)
    """adamw, adam, muon: added to the square root of the second moment; default: 1e-8."""
    weight_decay: float = Field(default=0.1, ge=0)
    """adamw, muon (default 0.1), lion (0.5): a step multiplies decayed weights by 1 - lr * weight_decay. adam, sgd (0):
    adds weight_decay * weight to the gradient."""
    decay_embeddings: bool = True
    """Whether embeddings have weight decay, like all parameters with two dimensions."""
    clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down to it."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Decay per step of an exponential moving average of the weights: 0.97 averages about 33 steps, 0 disables it. The
    average is evaluated, saved as the model and used by later stages."""
    schedule: ScheduleKind = "cosine"
    """Learning rate after the warmup; wsd stays at the peak and decays at the end."""
    warmup: float = Field(default=0.02, ge=0)
    """Steps of linear warmup; below 1 it is a fraction of all steps."""
    min_ratio: float | None = Field(default=None, ge=0, le=1)
    """Floor of the schedule as a fraction of the peak; default: 0.1. Not for constant."""
    decay_steps: int | None = Field(default=None, ge=1)
    """cosine, linear, wsd: step at which the floor is reached; default: the last."""
    cooldown: float | None = Field(default=None, gt=0)
    """wsd: steps of the decay; below 1 it is a fraction of the steps up to the floor; default: 0.2."""
    cooldown_shape: Literal["linear", "cosine", "sqrt"] | None = None
    """wsd: shape of the decay; `sqrt` is 1 - sqrt(progress)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, table: Any) -> Any:
        if isinstance(table, Mapping):
            kind = str(table.get("kind", "")).lower().replace("-", "").replace("_", "")
            if kind in _INSTEAD:
                raise ValueError(f"found kind = '{table['kind']}', {_INSTEAD[kind]}")
            table = _with_defaults(table, "kind", "adamw", KINDS)
            table = _with_defaults(table, "schedule", "cosine", SCHEDULES)
        return table

    @model_validator(mode="after")
    def _consistent(self) -> "OptimSettings":
        if self.kind == "sgd" and self.lr is None:
            raise ValueError("found kind = 'sgd' without lr, which has no default for sgd; add for example lr = 0.1")
        if self.nesterov and not self.momentum:
            raise ValueError("found nesterov = true with momentum = 0, expected momentum; set it, or nesterov = false")
        if self.decay_steps and self.warmup >= self.decay_steps:
            raise ValueError(
                f"found decay_steps = {self.decay_steps} and warmup = {self.warmup:g}, expected the floor to be "
                "reached after the warmup; raise decay_steps or lower warmup"
            )
        return self


def _with_defaults(table: Mapping[str, Any], field: str, default: str, choices: Mapping[str, dict[str, Any]]) -> Any:
    """The table with the defaults of the chosen optimizer or schedule.

    Raises:
        ValueError: the table has a setting that the choice does not have.
    """
    choice = table.get(field, default)
    if not isinstance(choice, str) or choice not in choices:
        return table  # the field's own validation reports it
    own = choices[choice]
    for name in dict.fromkeys(n for settings in choices.values() for n in settings):
        if name not in own and table.get(name) is not None:
            owners = ", ".join(repr(c) for c, settings in choices.items() if name in settings)
            raise ValueError(
                f"found {name} with {field} = '{choice}', which has no such setting; leave {name} out, "
                f"or choose a {field} that has it ({owners})"
            )
    return {**table, **{name: value for name, value in own.items() if table.get(name) is None}}


def has_codes(elements: int) -> bool:
    """Whether the moments of a parameter of so many elements are stored in 8 bits; torchao and bitsandbytes leave
    small ones in fp32, whose rounding would hurt most."""
    return elements >= 4096 and elements % BLOCK == 0
