"""The training state, which is what a checkpoint stores: weights, moments, and a small dict of declared numbers.

Everything else (learning rate, batches, random numbers) is a function of the step, so resuming needs no more than this.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ingot.core.artifact import CHECKPOINTS, STATE, checkpoint_path, checkpoint_steps, read_json
from ingot.core.errors import UserError, shortened
from ingot.distributed import checkpoint
from ingot.distributed.mesh import Mesh
from ingot.distributed.sharding import described
from ingot.optim.average import Average
from ingot.optim.optimizers import Optimizer
from ingot.train import health
from ingot.train.guard import INITIAL as GUARD
from ingot.train.guard import Guard, begin
from ingot.train.settings import FEWEST_KEPT

INITIAL: dict[str, Any] = {
    "step": 0,
    "tokens": 0,
    "skipped_steps": 0,
    "guard": GUARD,
    "loss_scale": 1.0,
    "loss_scale_steps": 0,
    "best_step": 0,
    "best_val": None,
    "evaluated": None,
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
        keep_every: also retain those of multiples of this many steps.
        config: metadata of checkpoints: the model's shape, the tokenizer.
        last_step: the last step of the plan; no later checkpoint is resumed.
        mesh: the ranks, which save and load together.
        guard: its losses are saved, and the checkpoint that a trouble would need is retained.
        background: copy the tensors to the host and write them while training goes on, as for a GPU. Not with parts of
            tensors, which all ranks write together.
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
        last_step: int,
        mesh: Mesh = Mesh(),  # noqa: B008 - immutable
        guard: Guard | None = None,
        background: bool = False,
        keep_every: int | None = None,
    ):
        self.checkpoints = directory / CHECKPOINTS
        self.named, self.optimizer, self.average = named, optimizer, average
        self.keep, self.config, self.last_step, self.mesh, self.guard = keep, config, last_step, mesh, guard
        self.keep_every = keep_every
        self._objective_names = set(objective_state)
        self.numbers: dict[str, Any] = {**copy.deepcopy(INITIAL), "objective": dict(objective_state)}
        self._declared = copy.deepcopy(self.numbers)
        self.saved_step = 0
        """The step of the newest checkpoint, which may still be in the writing."""
        self._writer = ThreadPoolExecutor(1, "save") if background and mesh.shard == 1 else None
        self._writing: Future[None] | None = None

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
        averages = {n: described(t, self.named[n]) for n, t in self.average.tensors().items()}
        out = {f"model.{n}": t for n, t in (weights | averages).items()}
        if moments:
            for n, t in self.optimizer.tensors().items():
                out[f"optim.{n}"] = described(t, self.named[n.rpartition(".")[0]])
            out |= {f"optim.{n}.weight": weights[n] for n in averages}
            out |= self.guard.tensors() if self.guard else {}
        return out

    def save(self) -> None:
        """Write a checkpoint and delete the oldest beyond `keep`; in the background once the last one is written."""
        undeclared = set(self.numbers) ^ set(INITIAL) | set(self.numbers["objective"]) ^ self._objective_names
        assert not undeclared, f"undeclared state: {undeclared}"
        self.finish_saving()
        if self._writer is None:
            self._write(self.tensors(), self.numbers, self.mesh)
        elif self.mesh.leads:
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors().items()}
            self._writing = self._writer.submit(self._write, copies, copy.deepcopy(self.numbers), Mesh())
        self.saved_step = self.numbers["step"]

    def finish_saving(self) -> None:
        """Wait until the newest checkpoint is written. Raises what its writing raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], mesh: Mesh) -> None:
        checkpoint.save(checkpoint_path(self.checkpoints, numbers["step"]), tensors, numbers, self.config, mesh)
        if mesh.leads:
            spare = begin(numbers["guard"], numbers["step"]) if self.guard and self.guard.spikes else None
            checkpoint.prune(self.checkpoints, max(FEWEST_KEPT, self.keep), spare, self.keep_every)

    def discard(self) -> None:
        """Delete the checkpoint of the present step."""
        self.finish_saving()
        if self.mesh.leads:
            checkpoint.delete_after(self.checkpoints, self.numbers["step"] - 1)
        self.mesh.wait()
        self.saved_step = max(checkpoint_steps(self.checkpoints), default=0)

    def save_best(self) -> None:
        """Write the current weights, without moments, as the best checkpoint."""
        path, tensors = self.checkpoints / checkpoint.BEST, self.tensors(moments=False)
        checkpoint.save(path, tensors, self.numbers, self.config, self.mesh)

    def roll_back(self, first: int, last: int, notify: Callable[[str], None], leave_out: bool = True) -> bool:
        """Load the newest checkpoint from before step `first`.

        Args:
            last: the step that showed that the run has to go back.
            leave_out: leave out the steps from `first` to `last` from then on.

        Returns:
            Whether there is such a checkpoint; otherwise nothing changes.
        """
        self.finish_saving()
        left_out, stale = self.numbers["guard"]["left_out"], self.numbers["best_step"] >= first
        if not self.resume(notify, before=first):
            return False
        if leave_out:
            self.numbers["guard"] = {**self.numbers["guard"], "left_out": [*left_out, [first, last]]}
        if stale and leave_out:  # else it is saved again, the same
            self.numbers |= {"best_step": 0, "best_val": None}
        return True

    def resume(self, notify: Callable[[str], None], before: int | None = None) -> bool:
        """Load the newest intact checkpoint. Returns whether there was one.

        Args:
            notify: receives a message for each damaged checkpoint.
            before: consider only checkpoints of steps before this one.

        Raises:
            UserError: all checkpoints are damaged, or the numbers of the newest intact one cannot be those of this run.
        """
        path = self.mesh.first(lambda: checkpoint.newest_intact(self.checkpoints, notify, before))
        if path is None:
            return False
        numbers = read_json(path / STATE)
        if problem := self._problem(numbers, path):
            raise UserError(
                f"{path / STATE}: {problem}; delete {path} to resume from an earlier checkpoint, or the stage's "
                "directory to start again"
            )
        checkpoint.load(path, self.tensors())
        self.numbers.update(numbers)
        self.saved_step = self.numbers["step"]
        if self.mesh.leads:
            checkpoint.delete_after(self.checkpoints, self.saved_step)
        self.mesh.wait()
        return True

    def _problem(self, numbers: Any, path: Path) -> str | None:
        """Why these cannot be the numbers of a checkpoint of this run; None if they can."""
        if not isinstance(numbers, dict) or numbers.keys() != self._declared.keys():
            return f"found {shortened(json.dumps(numbers))}, expected the numbers {', '.join(self._declared)}"
        for name, now in self._declared.items():
            found = numbers[name]
            if not _is_alike(found, now):
                return f"{name}: found {shortened(json.dumps(found))}, expected a value such as {json.dumps(now)}"
            if isinstance(now, dict) and found.keys() != now.keys():
                return f"{name}: found the fields {', '.join(found) or 'none'}, expected {', '.join(now) or 'none'}"
        if not int(path.name) == numbers["step"] <= self.last_step:
            expected = f"{int(path.name):,}, and at most {self.last_step:,}, the last"
            return f"step: found {numbers['step']:,}, expected {expected}"
        if not 0 <= numbers["best_step"] <= numbers["step"]:
            return f"best_step: found {numbers['best_step']:,}, expected 0 to {numbers['step']:,}"
        return None


def _is_alike(found: Any, now: Any) -> bool:
    """Whether a value is of the type of the first one, finite, and no negative count; None stands for a number."""
    if isinstance(now, dict):
        return isinstance(found, dict) and all(_is_alike(found[name], now[name]) for name in found.keys() & now.keys())
    if isinstance(now, list):  # stretches of steps
        return isinstance(found, list) and all(
            isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n > 0 for n in pair) for pair in found
        )
    if now is None:
        return found is None or type(found) in (int, float)
    if isinstance(now, float):
        return type(found) in (int, float) and math.isfinite(found)
    return type(found) is type(now) and (type(found) is not int or found >= 0)
