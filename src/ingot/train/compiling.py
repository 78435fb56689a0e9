"""What torch.compile is applied to, and with what; imported by all, its compiler only where something is compiled."""

import copy
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import nn

from ingot.model import multiply

Compile = Literal["", "whole", "blocks"]


def compiled(model: nn.Module, what: Compile) -> Callable[..., Any]:
    """A compiled forward beside the model, which keeps its names and its plain forward for every other shape.

    Blocks are alike, so a deep model's are compiled once for all; that costs a few Python calls a block, which is too
    much for small ones. Its rows have one shape, so on a GPU it is worth cuDNN's while to plan attention for them.
    """
    if not what:
        return model
    device = next(model.parameters()).device
    choices: dict[str, Any] = {}
    if device.type == "cpu":
        choices["fallback_random"] = True  # `model/dropout.py` draws for four coins at once
        choices["cpp.use_decompose_tanh"] = True  # by exp: GPT-2's GELU 4.6 to 2.2 ms forward, 5.3 to 3.2 backward
    if multiply.concerned(device):
        choices["post_grad_custom_post_pass"] = _by_faster_ways()
    options: dict[str, Any] = {"dynamic": False, "options": choices}
    twin: Any = copy.copy(model)
    if what == "blocks":
        blocks: dict[str, Any] = {
            n: torch.compile(b, **options) for n, b in model.get_submodule("layers").named_children()
        }
        twin._modules = {**model._modules, "layers": nn.ModuleDict(blocks)}
    else:
        twin.stack = torch.compile(model.stack, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return _with_cudnn(twin) if device.type == "cuda" else twin


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


def _by_faster_ways() -> Any:
    """A pass of the compiler's over its graphs, for the products that `model/multiply.py` computes faster."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class ByFasterWays(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                for node in graph.find_nodes(op="call_function", target=target):
                    _replace(node)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__, multiply.__file__))

    return ByFasterWays()


def _replace(node: torch.fx.Node) -> None:
    """Let a product be computed in its faster way, if it has one and adds nothing but a bias for each column."""
    *bias, a, b = cast("tuple[torch.fx.Node, ...]", node.args)  # addmm's first argument
    plain = not node.kwargs and all(added.meta["val"].ndim == 1 for added in bias)
    if plain and multiply.way(a.meta["val"], b.meta["val"]):
        node.target = torch.ops.ingot.product.default
        node.args = (a, b, bias[0] if bias else None)
