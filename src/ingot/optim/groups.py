"""Parameter groups, the optimizer, and clipping by the global norm.

Weights with two or more dimensions decay; biases, norm gains and other vectors do not, and adapters are exempt by
name. The rule looks at shapes because a list of names misses the norm that somebody called otherwise.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ingot.optim.settings import OptimSettings

Named = Mapping[str, torch.nn.Parameter]


def decays(name: str, parameter: Tensor, embeddings: bool = True) -> bool:
    """Whether a parameter is pulled to zero: dim >= 2, not an adapter, and an embedding only where asked."""
    if "lora_" in name or (not embeddings and "embed" in name):
        return False
    return parameter.dim() >= 2


def groups(named: Named, settings: OptimSettings) -> list[dict]:
    """Two groups, decayed and undecayed, for a torch optimizer; frozen parameters are in neither."""
    trained = {n: p for n, p in named.items() if p.requires_grad}
    decayed = [p for n, p in trained.items() if decays(n, p, settings.decay_embeddings)]
    rest = [p for n, p in trained.items() if not decays(n, p, settings.decay_embeddings)]
    return [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


def counts(named: Named, settings: OptimSettings) -> dict[str, int]:
    """How many numbers decay and how many do not."""
    decayed, rest = ([p.numel() for p in g["params"]] for g in groups(named, settings))
    return {"decayed_parameters": sum(decayed), "undecayed_parameters": sum(rest)}


def adamw(named: Named, settings: OptimSettings, lr: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2): decay is 1 - lr * weight_decay, apart from the gradient."""
    fused = all(p.dtype in (torch.float32, torch.float64) for p in named.values())
    return torch.optim.AdamW(groups(named, settings), lr=lr, betas=settings.betas, eps=settings.eps, fused=fused)


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, Tensor]:
    """The moments by name, for a checkpoint; they are made (as zeros) where no step was taken yet."""
    out = {}
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        out |= {f"{name}.{key}": value for key, value in state.items()}
    return out


def global_norm(gradients: Iterable[Tensor], total: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """L2 norm over all gradients; `total` adds up the squares of other ranks' shards."""
    gradients = list(gradients)
    if not gradients:
        return torch.zeros(())
    squares = [torch.linalg.vector_norm(g).double().square() for g in gradients]
    return total(torch.stack(squares).sum()).sqrt()


def clip_(gradients: list[Tensor], limit: float, norm: Tensor) -> None:
    """Scale gradients in place by min(1, limit / norm); `norm` is the one before clipping (Pascanu et al. 2013)."""
    factor = torch.clamp(limit / norm, max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
