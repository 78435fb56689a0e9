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
        self._model: Any = load_frozen(stage.path, job.display.notify, resolve_device(device), torch.float32)
        self.context = int(self._model.model.config.context)

    def __call__(self, rows: Sequence[np.ndarray], advance: Callable[[int], None] = lambda n: None) -> np.ndarray:
        """Scores [N] of the rows, as `score_rows`."""
        return score_rows(self._model, rows, advance)


def score_rows(model: Any, rows: Sequence[np.ndarray], advance: Callable[[int], None] = lambda n: None) -> np.ndarray:
    """Scores [N] float64, NaN for a row that is longer than the model's context.

    Args:
        model: a `RewardModel` in evaluation mode.
        rows: token ids of prompts with their answers, including the end of the turn.
        advance: called with the number of rows of each pass.
    """
    scores, size = [np.zeros(0)], rows_per_pass(int(model.model.config.context))
    for start in range(0, len(rows), size):
        scores.append(_scores(model, rows[start : start + size]))
        advance(len(scores[-1]))
    return np.concatenate(scores)


def _scores(model: Any, rows: Sequence[np.ndarray]) -> np.ndarray:
    lengths_B = torch.tensor([len(row) for row in rows])
    ids_BT = torch.zeros(len(rows), int(lengths_B.max()), dtype=torch.long)
    for ids_T, row in zip(ids_BT, rows, strict=True):
        ids_T[: len(row)] = torch.from_numpy(row)
    device = model.model.embedding.weight.device
    with torch.inference_mode():
        return model.scores(ids_BT.to(device), lengths_B.to(device)).double().cpu().numpy()
