"""Language models of which each rank allocates its own parts only, so that a model may exceed a rank's memory."""

import torch
from torch import nn

from ingot.distributed.mesh import Mesh
from ingot.distributed.sharding import local, local_part, shard
from ingot.model.backend import TORCH
from ingot.model.config import ModelConfig
from ingot.model.norms import LayerNorm, RMSNorm
from ingot.model.transformer import Transformer, empty


def shard_model(model: nn.Module, mesh: Mesh) -> None:
    """Shard a language model in place, also inside another module such as a reward model.

    Parts have the reference backend: the others do not gather weights.
    """
    for inner in [module for module in model.modules() if isinstance(module, Transformer)]:
        norms: list[nn.Module] = [
            module for module in inner.layers.modules() if isinstance(module, RMSNorm | LayerNorm)
        ]
        shard(inner, mesh, list(inner.layers.values()), norms)
        inner.backend = TORCH if mesh.shard > 1 else inner.backend


def empty_on(mesh: Mesh, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """An uninitialised model, sharded over the mesh if that has shards."""
    if mesh.shard == 1:
        return empty(config, device, dtype)
    model = empty(config, "meta", dtype)
    shard_model(model, mesh)
    return model.to_empty(device=device)


@torch.no_grad()
def build_on(
    mesh: Mesh, config: ModelConfig, seed: int, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Transformer:
    """An initialised model with the weights of `transformer.build`, whatever the mesh.

    Every rank draws all numbers, parameter by parameter on the CPU, and keeps its part.
    """
    model = empty_on(mesh, config, device, dtype)
    for parameter, value in model.initial_weights(torch.Generator().manual_seed(seed)):
        local(parameter).copy_(local_part(value, parameter))
    return model
