"""Who computes the forward and backward pass of a model that trains, if not torch's operations one by one.

On a CPU functions of our own do for the common model (`blocks.py`), and what is compiled ahead for any other
(`ahead.py`); on a GPU torch.compile does.
"""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ingot.backends import cpu_blocks
from ingot.backends.aot import Ahead
from ingot.backends.cpu_head import NativeHead
from ingot.kernels import cpu_train
from ingot.kernels.precision import autocast_dtype

Compile = Literal["", "whole", "blocks", "native"]


def compiled(model: nn.Module, what: Compile, say: Callable[[str], None] | None = None) -> Callable[..., Any]:
    """A compiled forward beside the model, which keeps its names and its plain forward for every shape not compiled.

    Blocks are alike, so a deep model's are compiled once for all; that costs a few Python calls a block, which is too
    much for small ones. Its rows have one shape, so on a GPU it is worth cuDNN's while to plan attention for them.
    """
    if not what:
        return model
    if what == "native":
        return as_trained(model)
    on_gpu = next(model.parameters()).device.type == "cuda"
    twin: Any = copy.copy(model)
    if what == "blocks":
        layers = model.get_submodule("layers").named_children()
        each = {n: _by_torch(b) if on_gpu else Ahead(b, say=say) for n, b in layers}
        twin._modules = {**model._modules, "layers": each}
    else:
        stack: Any = model.stack
        twin.stack = _by_torch(stack) if on_gpu else Ahead(model, "stack", say)
    return _with_cudnn(twin) if on_gpu else twin


def as_trained(model: nn.Module) -> Callable[..., Any]:
    """What to call instead of a model: functions of our own where they compute it in any shape, else the model itself.

    Training calls the same, so a model that is compared with itself differs by nothing. The gradient of its embedding
    is sparse where rows have fewer tokens than it.
    """
    if not cpu_blocks.supports(model):
        return model
    twin: Any = copy.copy(model)
    twin.stack, twin.attention_path, twin.head_type = cpu_blocks.Stack(model), "native", NativeHead
    lookup: Any = copy.copy(model.get_submodule("embedding"))
    twin._modules = {**model._modules, "embedding": lookup}

    def forward(ids_BT: Tensor, *, taps: frozenset[str] = frozenset(), **options: Any) -> Any:
        ours = not taps and cpu_train.available(autocast_dtype(torch.device("cpu")) or torch.float32)
        # A tied head's gradient takes a few rows as they are: of a step of 870 ms 38 less for 1,024 of 50,257 rows.
        # Where there are more rows than in the matrix they are faster added up in one of their own.
        lookup.sparse = ids_BT.numel() < len(lookup.weight)
        return (twin if ours else model)(ids_BT, taps=taps, **options)

    return forward


def _by_torch(module: Any) -> Any:
    """Compiled for a GPU; several small kernels that do not wait for each other are one (.13 ms of a step of 31.7)."""
    return torch.compile(module, dynamic=False, options={"combo_kernels": True})


def _with_cudnn(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same, trying cuDNN's fused attention first.

    On an H100 it needs 0.38 ms for 16 x 12 x 1024 x 64 forward and backward where the default takes 0.53 (bf16, torch
    2.11). Every shape is planned anew, so this is not for rows of ever-different lengths.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def call(*args: Any, **options: Any) -> Any:
        with sdpa_kernel(order, set_priority=True):
            return forward(*args, **options)

    return call
