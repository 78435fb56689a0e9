"""The trained weights as the optimizer has them: of each parameter what is on this rank, and its summed gradient."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ingot.distributed.mesh import Mesh
from ingot.distributed.sharding import gathered, local, local_part
from ingot.optim.groups import global_norm

BUCKET_ELEMENTS = 1 << 22
"""Elements that ranks sum at once: each sum has a fixed cost, and one of all gradients would double their memory."""


class Weights:
    """The trained parameters of a model and of the objective's modules.

    Args:
        named: all parameters by name; sharded ones as the model has them.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], mesh: Mesh):
        self.mesh = mesh
        self.trained = {name: p for name, p in named.items() if p.requires_grad}
        self.local = {name: local(p) for name, p in self.trained.items()}
        """What this rank has of each, sharing its memory; unsharded parameters themselves."""
        self._sharded = {name for name, p in self.trained.items() if self.local[name] is not p}

    @property
    def shards(self) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] | None:
        """How to gather tensors like parts of `local`, and how to cut whole ones like them; None without shards."""
        if not self._sharded:
            return None
        layout: dict[Tensor, Tensor] = {part: self.trained[name] for name, part in self.local.items()}
        return (
            lambda tensor, part: gathered(tensor, layout[part]),
            lambda tensor, part: local_part(tensor, layout[part]),
        )

    def clear(self) -> None:
        """Drop all gradients."""
        for parameters in (self.trained, self.local):
            for parameter in parameters.values():
                parameter.grad = None

    def collect(self, scale: float) -> None:
        """After the last backward pass: put the gradients, summed over all ranks and divided by `scale`, in `.grad`
        of `local`. Those of sharded parameters are summed already."""
        for name in self._sharded:
            gradient = self.trained[name].grad
            self.local[name].grad = None if gradient is None else gradient.to_local()  # pyright: ignore
            self.trained[name].grad = None
        whole = (p.grad for name, p in self.local.items() if name not in self._sharded and p.grad is not None)
        _sum(whole, self.mesh)
        if scale != 1.0:
            for gradient in self.gradients():
                gradient.mul_(1 / scale)

    def gradients(self) -> list[Tensor]:
        """The gradients of `local`."""
        return [p.grad for p in self.local.values() if p.grad is not None]

    def norm(self) -> Tensor:
        """L2 norm of the whole gradient, the same on all ranks."""
        if not self._sharded:
            return global_norm(self.gradients())
        gradients = {name: p.grad for name, p in self.local.items() if p.grad is not None}
        parts = global_norm([g for name, g in gradients.items() if name in self._sharded]).square()
        whole = global_norm([g for name, g in gradients.items() if name not in self._sharded]).square()
        return (self.mesh.sum_of_shards(parts.double()) + whole).sqrt()


def _sum(gradients: Iterable[Tensor], mesh: Mesh) -> None:
    """Sum gradients over all ranks in place, small ones together."""
    if mesh.size == 1:
        return
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and (bucket[0].dtype != gradient.dtype or sum(map(Tensor.numel, bucket)) > BUCKET_ELEMENTS):
            _sum_bucket(bucket, mesh)
            bucket = []
        bucket.append(gradient)
    _sum_bucket(bucket, mesh)


def _sum_bucket(bucket: list[Tensor], mesh: Mesh) -> None:
    if len(bucket) < 2:
        for gradient in bucket:
            mesh.sum(gradient)
        return
    flat = mesh.sum(torch.cat([gradient.reshape(-1) for gradient in bucket]))
    for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        gradient.copy_(summed.view_as(gradient))
