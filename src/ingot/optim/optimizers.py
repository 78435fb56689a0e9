"""The optimizers of recipes behind one class, with one `step` and named state tensors.

They are torch's, fused if available; Adam and AdamW call torch's kernels directly (`adam.py`). The conventions are
torch's: momentum is v = m v + g with the learning rate outside, Adam corrects its bias, and decoupled decay multiplies
weights by 1 - lr * weight_decay.

Muon (Jordan et al. 2024) orthogonalises the momentum of a matrix, so it is for the matrices inside blocks. AdamW
updates the embedding, the head, vectors and adapters. Updates are scaled by torch's `match_rms_adamw` (Liu et al. 2025,
arXiv:2502.16982, eq. 4): 0.2 * sqrt(max(rows, columns)) times an orthogonal matrix has a root mean square of 0.2, like
AdamW's updates in practice, so both share a learning rate and a weight decay. (Jordan's scale needs a second rate,
about 30 times larger.) torch orthogonalises in bf16, even in an fp64 run.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ingot.core.errors import UserError
from ingot.optim.adam import Adam
from ingot.optim.groups import Named, clip_, groups, needs_clipping
from ingot.optim.low_memory import LowMemoryAdam
from ingot.optim.muon import Cut, Gather, ShardedMuon
from ingot.optim.settings import OptimSettings


class TorchOptimizer(Protocol):
    """The interface of torch optimizers that is used here."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def state(self) -> defaultdict[Tensor, Any]: ...
    def step(self) -> Any: ...


class Optimizer:
    """One or more optimizers, each of some parameters, stepped together."""

    def __init__(self, optimizers: Sequence[TorchOptimizer], named: Named):
        self.optimizers = optimizers
        self._names = {parameter: name for name, parameter in named.items()}

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a step: it reads nothing back and takes the learning rate as a tensor."""
        return all(isinstance(optimizer, Adam) and optimizer.fused for optimizer in self.optimizers)

    def step(
        self, lr: float | Tensor, clip: float = math.inf, norm: Tensor | None = None, skipped: Tensor | None = None
    ) -> None:
        """Clip the gradients in `.grad` in place and update all parameters.

        Args:
            lr: learning rate, a number or a scalar tensor.
            clip: largest global gradient norm.
            norm: global gradient norm; None: no clipping.
            skipped: boolean scalar; if it is true, weights and state do not change. A GPU decides that itself if
                `capturable`; other optimizers wait for it. On a CPU reading it costs nothing.
        """
        found_inf = None
        if skipped is not None and self.capturable and skipped.is_cuda:
            found_inf = skipped.float()
        elif skipped:
            return
        for optimizer in self.optimizers:
            divisor = None
            for group in optimizer.param_groups:
                group["lr"] = lr
            if norm is not None and needs_clipping(clip, norm):
                if isinstance(optimizer, Adam) and optimizer.supports_grad_scale:
                    divisor = torch.clamp(norm / clip, min=1.0).float()
                else:
                    gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
                    clip_(gradients, clip, norm)
            if isinstance(optimizer, Adam):
                optimizer.step(divisor, found_inf)
            else:
                optimizer.step()

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._names:
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The state tensors by name, for checkpoints; initialised if no step was taken yet."""
        out = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state[parameter]
                    if not state:
                        state.update(_initial_state(optimizer, group, parameter))
                    out |= {f"{self._names[parameter]}.{key}": value for key, value in state.items()}
        return out


def build(named: Named, settings: OptimSettings, lr: float, shards: tuple[Gather, Cut] | None = None) -> Optimizer:
    """The optimizer of the trained parameters among `named`.

    Args:
        lr: initial learning rate; each step sets its own.
        shards: how to gather and cut tensors, if this rank has only parts of the parameters.

    Raises:
        UserError: the kind needs an extra that is not installed.
    """
    assert not (shards and settings.state == "8bit"), "parts cut blocks of 256; the settings refuse it"
    if settings.kind == "muon":
        return Optimizer(_muon(named, settings, lr, shards), named)
    return Optimizer(_BUILDERS[settings.kind](named, settings, lr), named)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates a parameter: matrices inside blocks, except adapters."""
    return parameter.dim() == 2 and name.startswith("layers.") and "lora_" not in name


def _fused(named: Named) -> bool:
    return all(p.dtype in (torch.float32, torch.float64) for p in named.values())


def _adamw(named: Named, settings: OptimSettings, lr: float) -> list[TorchOptimizer]:
    """Loshchilov and Hutter 2019, algorithm 2."""
    return [_adam_kernel(named, settings, lr, decoupled=True)]


def _adam(named: Named, settings: OptimSettings, lr: float) -> list[TorchOptimizer]:
    """Kingma and Ba 2015, algorithm 1; weight decay is added to the gradient."""
    return [_adam_kernel(named, settings, lr, decoupled=False)]


def _adam_kernel(named: Named, settings: OptimSettings, lr: float, *, decoupled: bool) -> Adam:
    assert settings.betas
    options: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps, "fused": _fused(named)}
    options |= {"decoupled": decoupled}
    if settings.state in (None, "fp32"):
        return Adam(groups(named, settings), lr, **options)
    return LowMemoryAdam(settings.state, groups(named, settings), lr, **options)


def _sgd(named: Named, settings: OptimSettings, lr: float) -> list[TorchOptimizer]:
    """Sutskever et al. 2013, with the learning rate outside the velocity."""
    options: dict[str, Any] = {"momentum": settings.momentum, "nesterov": settings.nesterov}
    return [torch.optim.SGD(groups(named, settings), lr=lr, fused=_fused(named), **options)]


def _muon(named: Named, settings: OptimSettings, lr: float, shards: tuple[Gather, Cut] | None) -> list[TorchOptimizer]:
    hidden = {n: p for n, p in named.items() if is_hidden_matrix(n, p)}
    rest = {n: p for n, p in named.items() if n not in hidden}
    options: dict[str, Any] = {"momentum": settings.momentum, "nesterov": settings.nesterov}
    if shards:
        options |= {"gather": shards[0], "cut": shards[1]}
        muon: TorchOptimizer = ShardedMuon(groups(hidden, settings), lr, **options)
    else:
        muon = torch.optim.Muon(groups(hidden, settings), lr=lr, adjust_lr_fn="match_rms_adamw", **options)
    return [muon, *_adamw(rest, settings, lr)]


def _lion(named: Named, settings: OptimSettings, lr: float) -> list[TorchOptimizer]:
    """Chen et al. 2023, algorithm 2."""
    try:
        from lion_pytorch import Lion
    except ImportError:
        raise UserError("optim.kind = 'lion' needs the extra lion; pip install 'ingot[lion]'") from None
    assert settings.betas
    return [Lion(groups(named, settings), lr=lr, betas=settings.betas)]


_BUILDERS: dict[str, Callable[[Named, OptimSettings, float], list[TorchOptimizer]]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
    "lion": _lion,
}


def _initial_state(optimizer: TorchOptimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The state before the first step, which torch's optimizers create in it: zeros, no velocity without momentum."""

    def zeros() -> Tensor:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    if isinstance(optimizer, Adam):
        return optimizer.initial_state(parameter)
    if isinstance(optimizer, torch.optim.SGD | torch.optim.Muon | ShardedMuon):
        return {"momentum_buffer": zeros()} if group["momentum"] else {}
    return {"exp_avg": zeros()}
