"""Models in parts: torch's `fully_shard` (FSDP2), and each parameter as what this rank has of it.

At rest a rank has one part of every parameter, cut along the first dimension. A forward or backward pass gathers whole
weights block by block and hands summed gradients back as parts. All that happens below the gradient (optimizer, clip,
averages, anchors) works on the parts as plain tensors; only checkpoints describe them as parts of a whole.

FSDP2 leaves some weights gathered after a forward pass without a backward pass. Changing the parts then would go
unnoticed in the next forward pass, so `regroup` comes before weights change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ingot.distributed.mesh import Mesh


def shard(model: nn.Module, mesh: Mesh, blocks: list[nn.Module], exact: list[nn.Module]) -> nn.Module:
    """Shard a model in place over the mesh, unless it is; every rank has the same weights before.

    Args:
        blocks: the parts whose weights are gathered at once, in the order of the forward pass; what is in none of them
            is gathered for the whole pass.
        exact: modules inside them that compute in the format of their weights, whatever `mesh.gathered` is.
    """
    if mesh.shard == 1 or any(map(is_part, model.parameters())):
        return model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    grid, policy = mesh.grid if mesh.replicate > 1 else mesh.grid["shard"], MixedPrecisionPolicy()
    stored = next(model.parameters()).dtype
    if mesh.gathered not in (None, stored):  # products round weights anyway, so this changes no result
        policy = MixedPrecisionPolicy(mesh.gathered, reduce_dtype=stored, cast_forward_inputs=False)
        fully_shard(exact, mesh=grid, reshard_after_forward=False)
    for block in blocks:
        fully_shard(block, mesh=grid, reshard_after_forward=mesh.zero == 3, mp_policy=policy)
    fully_shard(model, mesh=grid, reshard_after_forward=False)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)  # losses are divided by global counts, so gradients are summed;
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return model


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules whose weights are gathered at once: those that torch has given the methods of its FSDPModule."""
    return [module for module in model.modules() if hasattr(module, "unshard")]


def regroup(model: nn.Module) -> None:
    """Drop gathered weights, so that the next forward pass gathers the present ones."""
    for module in sharded_modules(model):
        module.reshard()


def last_micro_batch(model: nn.Module, mesh: Mesh, last: bool) -> None:
    """Tell a sharded model whether gradients are complete after the next backward pass (ZeRO-1 sums them only then)."""
    if mesh.zero == 1:
        for module in sharded_modules(model):
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Context in which a sharded model has all of its weights on every rank, to sample from."""
    modules = sharded_modules(model)
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        regroup(model)


def local(parameter: nn.Parameter) -> nn.Parameter:
    """What this rank has of a parameter, sharing its memory; an unsharded parameter itself."""
    if not is_part(parameter):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)  # pyright: ignore


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, sharing its memory; a whole tensor itself."""
    return tensor.to_local() if is_part(tensor) else tensor  # pyright: ignore


def local_part(whole_tensor: Tensor, parameter: Tensor) -> Tensor:
    """What this rank has of a whole tensor that is cut like a parameter."""
    if not is_part(parameter):
        return whole_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    layout = parameter.device_mesh, parameter.placements  # pyright: ignore
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, *layout)
    return whole_tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def described(part: Tensor, parameter: Tensor) -> Tensor:
    """What this rank has of a tensor, as a part of the whole that is cut like a parameter; for checkpoints."""
    if not is_part(parameter) or part.dim() != parameter.dim():
        return part
    from torch.distributed.tensor import DTensor

    layout: Any = parameter
    options: dict[str, Any] = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(part, layout.device_mesh, layout.placements, **options)


def gathered(part: Tensor, parameter: Tensor) -> Tensor:
    """The whole tensor of which this rank has `part`, cut like a parameter."""
    tensor: Any = described(part, parameter)
    return tensor.full_tensor() if is_part(tensor) else tensor


def is_part(tensor: Tensor) -> bool:
    """Whether a tensor is this rank's part of a whole (a DTensor)."""
    return hasattr(tensor, "placements")
