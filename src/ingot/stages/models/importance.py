"""Reads the files of a fisher stage: the importance of a model's weights, and the weights that it was measured on."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from ingot.core.artifact import checkpoint_problem
from ingot.core.errors import UserError
from ingot.distributed import checkpoint
from ingot.model import lora
from ingot.model.config import ModelConfig
from ingot.model.transformer import empty

FISHER = "fisher"
"""Directory of the files in a fisher stage."""


def read_fisher(stage: Path, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fisher information F and weights theta* of a fisher stage, by parameter name, on the CPU.

    Args:
        stage: the stage's directory.
        model: a model with the same parameters.

    Raises:
        UserError: the stage is damaged, or its model has another shape.
    """
    if problem := checkpoint_problem(stage / FISHER):
        raise UserError(f"damaged: {problem}; delete {stage.resolve()} and run the recipe again")
    shapes = {name: weight.shape for name, weight in lora.weights(model).items()}
    config = json.loads((stage / FISHER / checkpoint.CONFIG).read_text())
    measured = empty(ModelConfig.model_validate(config["model"]), "meta", torch.float32)
    if shapes != {name: p.shape for name, p in measured.named_parameters()}:
        raise UserError(
            f"{stage}: found the Fisher information of a model of another shape, expected that of the trained model; "
            "measure it on the stage in init"
        )
    tensors = {f"{kind}.{name}": torch.empty(shape) for kind in ("fisher", "theta") for name, shape in shapes.items()}
    checkpoint.load(stage / FISHER, tensors)
    fisher, theta = ({name: tensors[f"{kind}.{name}"] for name in shapes} for kind in ("fisher", "theta"))
    return fisher, theta
