"""Settings of the optimizer and its schedule.

One flat table for every kind. A setting that the chosen kind (or schedule) does not have is refused by name instead of
ignored, and what is left out gets that kind's own default, so that a resolved recipe says all that was used.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ingot.core.settings import Settings

Kind = Literal["adamw", "adam", "sgd", "muon", "lion"]
ScheduleKind = Literal["cosine", "linear", "wsd", "inverse-sqrt", "constant"]

_ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {**_ADAM, "weight_decay": 0.1},
    "adam": {**_ADAM, "weight_decay": 0.0},
    "sgd": {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
    "muon": {**_ADAM, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.5},
}
"""What each kind may be told, and its default."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"min_ratio": 0.1, "decay_steps": None},
    "linear": {"min_ratio": 0.1, "decay_steps": None},
    "wsd": {"min_ratio": 0.1, "decay_steps": None, "cooldown": 0.2, "cooldown_shape": "linear"},
    "inverse-sqrt": {"min_ratio": 0.1},
    "constant": {},
}
"""The same of each schedule."""


_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimSettings(Settings):
    """The optimizer, its learning-rate schedule, and gradient clipping."""

    kind: Kind = "adamw"
    """adamw, adam, sgd, lion (extra `lion`), or muon: Muon for the matrices inside blocks, AdamW for all else."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate; default 6e-4 * sqrt(768 / width), a fifth of that for lion, a tenth where the stage has an
    `init` and no adapter; sgd has no default."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """sgd (.9) and muon (.95): share of the last velocity kept; v = momentum * v + g, no moving average."""
    nesterov: bool | None = None
    """sgd (false) and muon (true): look ahead along the velocity."""
    betas: tuple[_Decay, _Decay] | None = None
    """Decay of the first and second moments: .9 and .95; for lion, of the update and its memory: .9 and .99."""
    eps: float | None = Field(default=None, gt=0)
    """adamw, adam, muon: added to the square root of the second moment; default 1e-8."""
    weight_decay: float = Field(default=0.1, ge=0)
    """adamw, muon (.1), lion (.5): a step multiplies decayed weights by 1 - lr * weight_decay. adam, sgd (0): adds
    weight_decay * weight to the gradient."""
    decay_embeddings: bool = True
    """Whether embedding tables decay too (they have two dimensions, so by the rule dim >= 2 they do)."""
    clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm; a longer gradient is scaled down to it."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the weights, a step: .97 remembers about 33 steps, 0 is none. The
    average is what is evaluated, saved as the model and used by later stages."""
    schedule: ScheduleKind = "cosine"
    """What follows the warmup; wsd holds the peak and decays over its last part."""
    warmup: float = Field(default=0.02, ge=0)
    """Steps of linear warmup; below 1 it is a share of all steps."""
    min_ratio: float | None = Field(default=None, ge=0, le=1)
    """Floor of the schedule as a share of the peak: a tenth. Not for constant."""
    decay_steps: int | None = Field(default=None, ge=1)
    """cosine, linear, wsd: step at which the floor is reached; default: the last."""
    cooldown: float | None = Field(default=None, gt=0)
    """wsd: steps of the decay at the end; below 1 it is a share of the steps up to the floor; default a fifth."""
    cooldown_shape: Literal["linear", "cosine", "sqrt"] | None = None
    """wsd: how the decay falls; `sqrt` is 1 - sqrt(progress)."""

    @model_validator(mode="before")
    @classmethod
    def _own_settings_only(cls, table: Any) -> Any:
        if isinstance(table, Mapping):
            table = _completed(table, "kind", "adamw", KINDS)
            table = _completed(table, "schedule", "cosine", SCHEDULES)
        return table

    @model_validator(mode="after")
    def _possible(self) -> "OptimSettings":
        if self.kind == "sgd" and self.lr is None:
            raise ValueError("found kind = 'sgd' without lr, expected one: no rule gives it; add for example lr = 0.1")
        if self.nesterov and not self.momentum:
            raise ValueError("found nesterov = true with momentum = 0, expected momentum; set it, or nesterov = false")
        if self.decay_steps and self.warmup >= self.decay_steps:
            raise ValueError(
                f"found decay_steps = {self.decay_steps} and warmup = {self.warmup:g}, expected the floor to be "
                "reached after the warmup; raise decay_steps or lower warmup"
            )
        return self


def _completed(table: Mapping[str, Any], field: str, default: str, choices: Mapping[str, dict[str, Any]]) -> Any:
    """The table with the defaults of its choice; a setting of other choices is an error."""
    choice = table.get(field, default)
    if not isinstance(choice, str) or choice not in choices:
        return table  # the field's own type says what is expected
    own = choices[choice]
    for name in dict.fromkeys(n for settings in choices.values() for n in settings):
        if name not in own and table.get(name) is not None:
            owners = ", ".join(repr(c) for c, settings in choices.items() if name in settings)
            raise ValueError(
                f"found {name} with {field} = '{choice}', which has no such setting; leave {name} out, "
                f"or choose a {field} that has it ({owners})"
            )
    return {**table, **{name: value for name, value in own.items() if table.get(name) is None}}
