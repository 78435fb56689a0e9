"""The optimizers a recipe may name, behind one small class: one `step`, and every moment by name.

torch's own, fused where it has that; of Adam and AdamW its kernels (`adam.py`). Its conventions hold: momentum is
v = m v + g with the rate outside (a "moving average" (1 - m) g is 1 / (1 - m) smaller in effect), Adam corrects its
bias, decoupled decay is 1 - lr * weight_decay.

Muon (Jordan et al. 2024) replaces a matrix's momentum by its nearest orthogonal matrix, so it is for the matrices
inside blocks; the embedding, the head, vectors and adapters are AdamW's. We choose torch's `match_rms_adamw` (Liu et
al. 2025, "Muon is scalable for LLM training", arXiv:2502.16982, eq. 4): an update of 0.2 * sqrt(max(rows, columns))
times an orthogonal matrix has a root mean square of 0.2, like AdamW's in practice, so one learning rate and one weight
decay serve both parts. Rejected: Jordan's own scale sqrt(max(1, rows / columns)), which needs a second learning rate,
about 30 times the first. torch orthogonalises in bf16, in an fp64 run too.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ingot.core.errors import UserError
from ingot.optim.adam import Adam
from ingot.optim.groups import Named, clip_, groups, to_be_clipped
from ingot.optim.settings import OptimSettings


class Part(Protocol):
    """What is used of a torch optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def state(self) -> defaultdict[Tensor, Any]: ...
    def step(self) -> Any: ...


class Optimizer:
    """One optimizer, or several that share the parameters out, stepped as one."""

    def __init__(self, parts: Sequence[Part], named: Named):
        self.parts = parts
        self._names = {parameter: name for name, parameter in named.items()}

    @property
    def capturable(self) -> bool:
        """Whether a step only puts work on the device, and takes its learning rate from there."""
        return all(isinstance(part, Adam) and part.fused for part in self.parts)

    def step(self, lr: float | Tensor, clip: float = math.inf, norm: Tensor | None = None) -> None:
        """One update with this learning rate, a number or a tensor of one, from the gradients in `.grad`.

        Args:
            clip: what the norm of all gradients is made to be at most, in place.
            norm: of all gradients; None: nothing is clipped.
        """
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            if norm is None or not to_be_clipped(clip, norm):
                part.step()
            elif isinstance(part, Adam) and part.divides:
                part.step(torch.clamp(norm / clip, min=1.0).float())
            else:
                clip_([p.grad for g in part.param_groups for p in g["params"] if p.grad is not None], clip, norm)
                part.step()

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._names:
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The moments by name, for a checkpoint; they are made (as zeros) where no step was taken yet."""
        out = {}
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    state = part.state[parameter]
                    if not state:
                        state.update(_fresh(part, group, parameter))
                    out |= {f"{self._names[parameter]}.{key}": value for key, value in state.items()}
        return out


def build(named: Named, settings: OptimSettings, lr: float) -> Optimizer:
    """The optimizer of these settings over the trained ones among `named`; `lr` is what it starts with.

    Raises:
        UserError: the kind needs an extra that is not installed.
    """
    return Optimizer(_PARTS[settings.kind](named, settings, lr), named)


def hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes it: a matrix inside a block, not an adapter."""
    return parameter.dim() == 2 and name.startswith("layers.") and "lora_" not in name


def _fused(named: Named) -> bool:
    return all(p.dtype in (torch.float32, torch.float64) for p in named.values())


def _adamw(named: Named, settings: OptimSettings, lr: float) -> list[Part]:
    """Loshchilov and Hutter 2019, algorithm 2."""
    return [_adams(named, settings, lr, decoupled=True)]


def _adam(named: Named, settings: OptimSettings, lr: float) -> list[Part]:
    """Kingma and Ba 2015, algorithm 1; a weight decay would be part of the gradient."""
    return [_adams(named, settings, lr, decoupled=False)]


def _adams(named: Named, settings: OptimSettings, lr: float, *, decoupled: bool) -> Adam:
    assert settings.betas
    options: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps, "fused": _fused(named)}
    return Adam(groups(named, settings), lr, decoupled=decoupled, **options)


def _sgd(named: Named, settings: OptimSettings, lr: float) -> list[Part]:
    """Sutskever et al. 2013, with the rate outside the velocity."""
    options: dict[str, Any] = {"momentum": settings.momentum, "nesterov": settings.nesterov}
    return [torch.optim.SGD(groups(named, settings), lr=lr, fused=_fused(named), **options)]


def _muon(named: Named, settings: OptimSettings, lr: float) -> list[Part]:
    hidden = {n: p for n, p in named.items() if hidden_matrix(n, p)}
    rest = {n: p for n, p in named.items() if n not in hidden}
    options: dict[str, Any] = {"momentum": settings.momentum, "nesterov": settings.nesterov}
    muon = torch.optim.Muon(groups(hidden, settings), lr=lr, adjust_lr_fn="match_rms_adamw", **options)
    return [muon, *_adamw(rest, settings, lr)]


def _lion(named: Named, settings: OptimSettings, lr: float) -> list[Part]:
    """Chen et al. 2023, algorithm 2."""
    try:
        from lion_pytorch import Lion
    except ImportError:
        raise UserError("optim.kind = 'lion' needs the extra lion; pip install 'ingot[lion]'") from None
    assert settings.betas
    return [Lion(groups(named, settings), lr=lr, betas=settings.betas)]


_PARTS: dict[str, Callable[[Named, OptimSettings, float], list[Part]]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
    "muon": _muon,
    "lion": _lion,
}


def _fresh(part: Part, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The state that a first step finds, spelled out: zeros, and no velocity without momentum."""

    def zeros() -> Tensor:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    if isinstance(part, Adam):
        return part.initial_state(parameter)
    if isinstance(part, torch.optim.SGD | torch.optim.Muon):
        return {"momentum_buffer": zeros()} if group["momentum"] else {}
    return {"exp_avg": zeros()}
