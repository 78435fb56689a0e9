"""Settings of the loop, of evaluation while training, and of a forward pass."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ingot.core.errors import notify
from ingot.core.settings import EXECUTION, Settings

MICRO_TOKENS = 16_384
"""Tokens of one forward pass where nothing says otherwise."""

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"]


def rows_per_pass(context: int) -> int:
    """Rows of one forward pass where nothing says otherwise."""
    return max(1, MICRO_TOKENS // context)


class EvaluateSettings(Settings):
    """Evaluation during training, with the same loss as training."""

    every: int = Field(default=250, ge=1)
    """Steps between evaluations; the start and the end are always evaluated."""
    tokens: int = Field(default=65536, ge=1)
    """Held-out targets per source looked at while training runs; the end looks at all of them."""
    sample: str | Literal[False] = ""
    """Prompt of the sample drawn at each evaluation, so that a reader sees the model learn; false for none."""
    sample_tokens: int = Field(default=100, ge=1)
    """Length of that sample."""


class LoopSettings(Settings):
    """How a run is executed. No field here changes the result, so none is part of the stage key."""

    micro_batch: Annotated[int | None, EXECUTION] = Field(default=None, ge=1)
    """Rows per forward pass; default: as many as hold 16,384 tokens. The gradient is the same for every choice. Of a
    phase with shorter rows, as many more as hold no more tokens."""
    log_every: Annotated[int, EXECUTION] = Field(default=10, ge=1)
    """Steps between logged lines."""
    save_every: Annotated[int, EXECUTION] = Field(default=500, ge=1)
    """Steps between checkpoints; a killed run goes on from the newest one, one that is asked to end saves first."""
    save_minutes: Annotated[float, EXECUTION] = Field(default=10, gt=0)
    """Minutes after which a checkpoint is written though fewer steps were made."""
    keep: Annotated[int, EXECUTION] = Field(default=2, ge=1)
    """Checkpoints kept."""
    threads: Annotated[int | None, EXECUTION] = Field(default=None, ge=1)
    """Compute threads; default: one per core."""
    backend: Annotated[Literal["auto", "torch", "compiled", "cpu"], EXECUTION] = "auto"
    """Who computes the blocks: `torch`; `compiled` (torch.compile: half a minute at the start, then faster steps);
    `cpu` (C++ kernels for the common model); `auto`: the fastest here, compiled only where the run is long enough to
    repay it."""
    replay: Annotated[bool | None, EXECUTION] = None
    """On a GPU, record an update and replay it, so that small models do not wait for its launches; false: never.
    Default: where an update can be recorded."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Where to compute; `auto` takes a GPU if there is one."""

    @model_validator(mode="before")
    @classmethod
    def _compile_is_a_backend(cls, table: Any) -> Any:
        if not isinstance(table, Mapping) or not isinstance(table.get("compile"), bool):
            return table
        backend = "compiled" if table["compile"] else "torch"
        notify(f'loop.compile is called loop.backend now; read as backend = "{backend}"')
        return {"backend": backend, **{name: value for name, value in table.items() if name != "compile"}}

    def rows_at_once(self, context: int, rows: int) -> int:
        """Rows of one forward pass, of a step's `rows` (of one rank)."""
        return min(rows, self.micro_batch or rows_per_pass(context))
