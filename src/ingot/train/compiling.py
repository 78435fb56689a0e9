"""What torch.compile is applied to, and with what; imported by all, its compiler only where something is compiled."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from ingot.model import halves

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
    if halves.concerned(device):
        choices["post_grad_custom_post_pass"] = _in_halves()
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


def _in_halves() -> Any:
    """A pass of the compiler's over its graphs that makes two of the products of `model/halves.py`."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class InHalves(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                for node in graph.find_nodes(op="call_function", target=target):
                    _halve(graph, node)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__, halves.__file__))

    return InHalves()


def _halve(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Two nodes and what puts their rows together in the place of one product, where that pays."""
    from torch.fx.node import map_arg

    *bias, a, b = node.args  # addmm's first argument
    assert isinstance(a, torch.fx.Node)
    assert isinstance(b, torch.fx.Node)
    rows = len(a.meta["val"])
    if node.kwargs or not halves.pays(a.meta["val"], b.meta["val"]):
        return
    if any(isinstance(n, torch.fx.Node) and n.meta["val"].ndim > 1 for n in bias):  # rows of its own
        return

    def call(target: Any, *args: Any) -> torch.fx.Node:
        made = graph.call_function(target, args)
        made.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
        return made

    with graph.inserting_before(node):
        spans = ((0, rows // 2), (rows // 2, rows))
        parts = [call(node.target, *bias, call(torch.ops.aten.slice.Tensor, a, 0, *span), b) for span in spans]
        whole = call(torch.ops.aten.cat.default, parts)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
