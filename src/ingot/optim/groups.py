"""Parameter groups, and clipping by the global norm.

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


def global_norm(gradients: Iterable[Tensor], total: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """L2 norm over all gradients; `total` adds up the squares of other ranks' shards."""
    gradients = list(gradients)
    if not gradients:
        return torch.zeros(())
    norms = torch.stack(torch._foreach_norm(gradients))  # pyright: ignore[reportPrivateImportUsage]
    return total(norms.double().square().sum()).sqrt()


def clip_(gradients: list[Tensor], limit: float, norm: Tensor) -> None:
    """Scale gradients in place by min(1, limit / norm); `norm` is the one before clipping (Pascanu et al. 2013)."""
    if gradients:
        factor = torch.clamp(limit / norm, max=1.0).to(gradients[0].dtype)
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
