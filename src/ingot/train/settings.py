"""Settings of the training loop and of evaluation during training. No torch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ingot.core.errors import UserError, notify
from ingot.core.settings import EXECUTION, Settings
from ingot.model.config import Checkpointing

MICRO_TOKENS = 16_384
"""Default tokens of a micro-batch."""
FEWEST_KEPT = 2
"""Checkpoints that a run keeps at least: the newest may be discarded, if a bit flipped while it was written."""
FIRST_SAVE = 30.0
"""Seconds until the first checkpoint; each later one is due after twice as long, up to `save_minutes`. So a short run
that is killed loses no more than about half of its work, and a long one saves only a few times more."""

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"]


def rows_per_pass(context: int) -> int:
    """Default rows of a micro-batch."""
    return max(1, MICRO_TOKENS // context)


class EvaluateSettings(Settings):
    """Evaluation during training, with the same loss as training."""

    every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; the model is also evaluated at the start and the end. Default: a tenth of all steps,
    at most 250."""
    tokens: int = Field(default=65536, ge=1)
    """Validation tokens per source of an evaluation during training; the last evaluation uses all of them."""
    sample: str | Literal[False] = ""
    """Prompt of the text that is sampled at each evaluation; false: no sample."""
    sample_tokens: int = Field(default=100, ge=1)
    """Length of the sample in tokens."""

    def interval(self, steps: int) -> int:
        """Steps between evaluations of a run of `steps`."""
        return self.every or min(250, max(1, steps // 10))


class MeshSettings(Settings):
    """`mesh = { shard = 4 }`: how the processes of a run (`ingot run --nproc`, torchrun) share the work.

    Processes train on different rows. Groups of `shard` processes hold one model in parts, `replicate` such groups hold
    one each. No field changes the result, so none is part of the stage key.
    """

    replicate: Annotated[int, EXECUTION] = Field(default=-1, ge=-1)
    """Groups that hold the model once each; -1: as many as the processes make."""
    shard: Annotated[int, EXECUTION] = Field(default=1, ge=-1)
    """Processes that hold weights, gradients and moments of one model in parts; -1: all of them."""
    zero: Annotated[Literal[1, 2, 3], EXECUTION] = 3
    """What is held in parts between uses, if `shard` > 1: 3 everything; 2 keeps the weights from the forward to the
    backward pass; 1 also keeps whole gradients until the last micro-batch. Lower is faster and takes more memory."""

    @model_validator(mode="after")
    def _not_zero(self) -> "MeshSettings":
        if 0 in (self.replicate, self.shard):
            raise ValueError("found 0 processes, expected at least 1, or -1 for as many as there are")
        return self

    @property
    def processes(self) -> int | None:
        """Processes that a fixed mesh needs; None if it takes as many as there are."""
        return None if -1 in (self.replicate, self.shard) else self.replicate * self.shard

    def shards(self, size: int) -> int:
        """Processes of a group that holds one model, for a run of `size` processes.

        Raises:
            UserError: the mesh has another number of processes.
        """
        shard = size // max(1, self.replicate) if self.shard == -1 else self.shard
        replicate = size // shard if self.replicate == -1 else self.replicate
        if replicate * shard != size:
            asked = f"replicate {self.replicate} x shard {self.shard}".replace("-1", "any")
            raise UserError(
                f"mesh: found {asked} for a run of {size:,} process{'es' if size > 1 else ''}, expected a product of "
                f"{size:,}; change mesh or --nproc"
            )
        return shard


class LoopSettings(Settings):
    """How a run is executed. No field changes the result, so none is part of the stage key."""

    RENAMED: ClassVar = {"replay": "cuda_graphs"}

    micro_batch: Annotated[int | None, EXECUTION] = Field(default=None, ge=1)
    """Rows of a micro-batch; default: as many as hold 16,384 tokens. It does not change the gradient. Phases with
    shorter rows use more rows, with no more tokens in total."""
    log_every: Annotated[int, EXECUTION] = Field(default=10, ge=1)
    """Steps between logged steps."""
    save_every: Annotated[int, EXECUTION] = Field(default=500, ge=1)
    """Steps between checkpoints. A killed run resumes from the newest one; on Ctrl-C a run saves before it ends."""
    save_minutes: Annotated[float, EXECUTION] = Field(default=10, gt=0)
    """Minutes between checkpoints, if `save_every` steps take longer. The first are sooner: 0.5, 1, 2, 4 and 8 minutes
    apart."""
    keep: Annotated[int, EXECUTION] = Field(default=2, ge=1)
    """Number of checkpoints to retain, at least `FEWEST_KEPT`."""
    keep_every: Annotated[int | None, EXECUTION] = Field(default=None, ge=1)
    """Also retain the checkpoints of multiples of this many steps, which are written whatever `save_every` says. Other
    runs with the same steps up to one of them can go on from it."""
    threads: Annotated[int | None, EXECUTION] = Field(default=None, ge=1)
    """Compute threads; default: one per core."""
    backend: Annotated[Literal["auto", "torch", "compiled", "cpu"], EXECUTION] = "auto"
    """Implementation of the blocks: `torch`; `compiled` (torch.compile: half a minute at the start, then faster steps);
    `cpu` (C++ kernels for common models); `auto`: the fastest one for this machine, compiled only if the run is long
    enough."""
    cuda_graphs: Annotated[bool | None, EXECUTION] = None
    """On a GPU, capture an update as a CUDA graph and replay it, so that small models do not wait for kernel launches;
    false: never. Default: if an update can be captured."""
    checkpointing: Annotated[Checkpointing, EXECUTION] = "none"
    """Activations that the backward pass computes again instead of reading them from memory: `none`; all of a block
    (`full`), of a segment of blocks (a number, or `sqrt` for the square root of the depth); or `selective`: all but
    matrix products and attention. Saves memory, takes up to a third more time, and changes no gradient."""
    device: Annotated[Literal["auto", "cpu", "cuda"], EXECUTION] = "auto"
    """Device; `auto` is a GPU if there is one."""
    restarts: Annotated[int, EXECUTION] = Field(default=3, ge=0)
    """With several processes on this machine: how often all start again from the newest checkpoint after one failed."""
    hang_minutes: Annotated[float, EXECUTION] = Field(default=30, gt=0)
    """With several processes on this machine: minutes without progress after which the one that hangs is named and all
    start again."""

    @model_validator(mode="before")
    @classmethod
    def _rename_compile(cls, table: Any) -> Any:
        if not isinstance(table, Mapping) or not isinstance(table.get("compile"), bool):
            return table
        backend = "compiled" if table["compile"] else "torch"
        notify(f'compile is now called backend; read as backend = "{backend}"')
        return {"backend": backend, **{name: value for name, value in table.items() if name != "compile"}}

    def micro_batch_rows(self, context: int, rows: int) -> int:
        """Rows of a micro-batch, at most the `rows` of a step on one rank."""
        return min(rows, self.micro_batch or rows_per_pass(context))
