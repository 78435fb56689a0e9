"""What a checkpoint holds: weights, moments, and a small declared dict of numbers.

Everything that is neither a weight nor a moment is a function of the step, so a checkpoint needs no more than this.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ingot.core.artifact import CHECKPOINTS, checkpoint_path
from ingot.distributed import checkpoint
from ingot.optim.average import Average
from ingot.optim.optimizers import Optimizer
from ingot.train import health

INITIAL: dict[str, Any] = {
    "step": 0,
    "tokens": 0,
    "skipped_steps": 0,
    "loss_scale": 1.0,
    "loss_scale_steps": 0,
    "best_step": 0,
    "best_val": None,
    "evaluated": 0,
    "health": health.INITIAL,
    "objective": {},
}
"""The numbers before the first step; nothing else may be among them."""


class TrainingState:
    """The trained tensors of a run and its numbers, saved to and loaded from `directory`/checkpoints.

    Args:
        directory: of the stage.
        named: all parameters, those of an objective's modules as "extra.NAME".
        optimizer, average: whose tensors are saved too.
        objective_state: what the objective keeps, before the first step.
        keep: checkpoints that are kept.
        config: what a checkpoint says of itself besides its state: the model's shape, the tokenizer.
    """

    def __init__(
        self,
        directory: Path,
        named: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        average: Average,
        objective_state: Mapping[str, Any],
        keep: int,
        config: Mapping[str, Any],
    ):
        self.checkpoints = directory / CHECKPOINTS
        self.named, self.optimizer, self.average = named, optimizer, average
        self.keep, self.config = keep, config
        self._objective_names = set(objective_state)
        self.numbers: dict[str, Any] = {**copy.deepcopy(INITIAL), "objective": dict(objective_state)}
        self.saved_step = 0
        """The step of the newest checkpoint."""

    @property
    def unsaved(self) -> bool:
        """Whether steps were made that no checkpoint holds."""
        return self.numbers["step"] > self.saved_step

    def tensors(self, moments: bool = True) -> dict[str, Tensor]:
        """Checkpoint names to tensors; memory is shared, so loading fills the running model.

        What is frozen under an adapter is left out: the checkpoint of the stage that it comes from holds it. Where
        weights are averaged, the model of a checkpoint is the average, and training's own weights are among the
        moments.
        """
        kept = {n: p.detach() for n, p in self.named.items() if p.requires_grad or n.startswith("extra.")}
        averages = self.average.tensors()
        out = {f"model.{n}": t for n, t in (kept | averages).items()}
        if moments:
            out |= {f"optim.{n}": t for n, t in self.optimizer.tensors().items()}
            out |= {f"optim.{n}.weight": kept[n] for n in averages}
        return out

    def save(self) -> None:
        """Write a checkpoint and remove the oldest."""
        undeclared = set(self.numbers) ^ set(INITIAL) | set(self.numbers["objective"]) ^ self._objective_names
        assert not undeclared, f"undeclared state: {undeclared}"
        path = checkpoint_path(self.checkpoints, self.numbers["step"])
        checkpoint.save(path, self.tensors(), self.numbers, self.config)
        checkpoint.prune(self.checkpoints, self.keep)
        self.saved_step = self.numbers["step"]

    def save_best(self) -> None:
        """Write the weights without moments, as the best so far."""
        checkpoint.save(self.checkpoints / checkpoint.BEST, self.tensors(moments=False), self.numbers, self.config)

    def resume(self, notify: Callable[[str], None]) -> bool:
        """Load the newest good checkpoint; whether there was one."""
        path = checkpoint.newest_good(self.checkpoints, notify)
        if path is None:
            return False
        self.numbers.update(checkpoint.load(path, self.tensors()))
        self.saved_step = self.numbers["step"]
        checkpoint.drop_after(self.checkpoints, self.saved_step)
        return True
