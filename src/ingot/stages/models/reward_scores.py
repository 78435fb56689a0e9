"""Scores of a finished reward model.

Shapes: N rows, B rows of a forward pass, T positions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ingot.stages.job import Input, Job
from ingot.stages.models.load import load_frozen
from ingot.train.execution import resolve_device
from ingot.train.settings import rows_per_pass


class RewardStage:
    """Scores rows with the model of a reward stage, in the units of its training (`RewardModel`).

    Args:
        stage: the stage of the reward model.
        job: the job of the stage that scores, for progress messages.
        device: `cpu`, `cuda` or `auto`.
    """

    def __init__(self, stage: Input, job: Job, device: str):
        self._device = resolve_device(device)
        self._model: Any = load_frozen(stage.path, job.display.notify, self._device, torch.float32)
        self.context = int(self._model.model.config.context)

    def __call__(self, rows: Sequence[np.ndarray], advance: Callable[[int], None] = lambda n: None) -> np.ndarray:
        """Scores [N] float64, NaN for a row that is longer than the model's context.

        Args:
            rows: token ids of prompts with their answers, including the end of the turn.
            advance: called with the number of rows of each pass.
        """
        scores, size = [np.zeros(0)], rows_per_pass(self.context)
        for start in range(0, len(rows), size):
            scores.append(self._scores(rows[start : start + size]))
            advance(len(scores[-1]))
        return np.concatenate(scores)

    def _scores(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        lengths_B = torch.tensor([len(row) for row in rows])
        ids_BT = torch.zeros(len(rows), int(lengths_B.max()), dtype=torch.long)
        for ids_T, row in zip(ids_BT, rows, strict=True):
            ids_T[: len(row)] = torch.from_numpy(row)
        with torch.inference_mode():
            return self._model.scores(ids_BT.to(self._device), lengths_B.to(self._device)).double().cpu().numpy()
