"""The training state, which is what a checkpoint stores: weights, moments, and a small dict of declared numbers.

Everything else (learning rate, batches, random numbers) is a function of the step, so resuming needs no more than this.
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
"""The numbers before the first step. It declares all keys."""


class TrainingState:
    """The trained tensors and the numbers of a run, saved to and loaded from `directory`/checkpoints.

    Args:
        directory: directory of the stage.
        named: all parameters; those of the objective's modules as "extra.NAME".
        optimizer: its moments are saved.
        average: its averages are saved.
        objective_state: the objective's state before the first step.
        keep: number of checkpoints to retain.
        config: metadata of checkpoints: the model's shape, the tokenizer.
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
        """Whether steps were made since the newest checkpoint."""
        return self.numbers["step"] > self.saved_step

    def tensors(self, moments: bool = True) -> dict[str, Tensor]:
        """Checkpoint name -> tensor. The tensors share memory with the model, so loading into them restores it.

        Weights that are frozen under an adapter are excluded: the checkpoint of the stage that trained them has them.
        If weights are averaged, "model.NAME" is the average and "optim.NAME.weight" the current weight.
        """
        weights = {n: p.detach() for n, p in self.named.items() if p.requires_grad or n.startswith("extra.")}
        averages = self.average.tensors()
        out = {f"model.{n}": t for n, t in (weights | averages).items()}
        if moments:
            out |= {f"optim.{n}": t for n, t in self.optimizer.tensors().items()}
            out |= {f"optim.{n}.weight": weights[n] for n in averages}
        return out

    def save(self) -> None:
        """Write a checkpoint and delete the oldest beyond `keep`."""
        undeclared = set(self.numbers) ^ set(INITIAL) | set(self.numbers["objective"]) ^ self._objective_names
        assert not undeclared, f"undeclared state: {undeclared}"
        path = checkpoint_path(self.checkpoints, self.numbers["step"])
        checkpoint.save(path, self.tensors(), self.numbers, self.config)
        checkpoint.prune(self.checkpoints, self.keep)
        self.saved_step = self.numbers["step"]

    def save_best(self) -> None:
        """Write the current weights, without moments, as the best checkpoint."""
        checkpoint.save(self.checkpoints / checkpoint.BEST, self.tensors(moments=False), self.numbers, self.config)

    def resume(self, notify: Callable[[str], None]) -> bool:
        """Load the newest intact checkpoint. Returns whether there was one."""
        path = checkpoint.newest_intact(self.checkpoints, notify)
        if path is None:
            return False
        self.numbers.update(checkpoint.load(path, self.tensors()))
        self.saved_step = self.numbers["step"]
        checkpoint.delete_after(self.checkpoints, self.saved_step)
        return True
