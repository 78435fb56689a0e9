"""The compiler's side of `ahead.py`: `python -m ingot.backends.aot_worker forward|backward DIRECTORY PARENT`, a process
each.

A job is traced, simplified, and divided where least has to be kept between the two passes, as torch.compile does it; of
the two the one that is asked for becomes a package.
"""

import os
import pickle
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ingot.backends.aot import JOB, OUTPUTS, PASSES, WITHIN, Job
from ingot.core.artifact import atomic_write
from ingot.core.process import die_with
from ingot.kernels import matmul


def choices() -> dict[str, Any]:
    """What torch's compiler is told."""
    chosen: dict[str, Any] = {
        "fallback_random": True,  # `model/dropout.py` draws for four coins at once
        "cpp.use_decompose_tanh": True,  # by exp: GPT-2's GELU 4.6 to 2.2 ms forward, 5.3 to 3.2 backward
        "cpp_wrapper": True,
        "aot_inductor.package": True,
        # of the half minute: headers are read once here, and what calls kernels is no kernel
        "aot_inductor.precompile_headers": False,
        "cpp_cache_precompile_headers": False,
        "aot_inductor.compile_wrapper_opt_level": "O0",
    }
    if platform.machine().lower() in ("x86_64", "amd64") and "TORCHINDUCTOR_CPP_MARCH" not in os.environ:
        # GCC 12.2's -O3 vectorizes torch's transpose of 32 x 32 numbers in bf16 wrongly where two kernels call it: a
        # gradient of keys was what the stack had held before. There is no other setting that takes a flag.
        chosen["cpp.march"] = "native -fno-tree-slp-vectorize"
    if matmul.concerned():
        chosen["post_grad_custom_post_pass"] = by_faster_ways()
    return chosen


def by_faster_ways() -> Any:
    """A pass of the compiler's over its graphs, for the products that `kernels/matmul.py` computes faster."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class ByFasterWays(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                for node in graph.find_nodes(op="call_function", target=target):
                    _replace(node)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__, matmul.__file__))

    return ByFasterWays()


def _replace(node: torch.fx.Node) -> None:
    """Let a product be computed in its faster way, if it has one and adds nothing but a bias for each column."""
    *bias, a, b = cast("tuple[torch.fx.Node, ...]", node.args)  # addmm's first argument
    plain = not node.kwargs and all(added.meta["val"].ndim == 1 for added in bias)
    if plain and matmul.way(a.meta["val"], b.meta["val"]):
        node.target = torch.ops.ingot.product.default
        node.args = (a, b, bias[0] if bias else None)


class _Method(nn.Module):
    """A method of a module's as the forward of one, which `functional_call` can give other parameters."""

    def __init__(self, module: nn.Module, method: str):
        super().__init__()
        self.module, self._method = module, method

    def forward(self, *args: Any) -> Any:
        return getattr(self.module, self._method)(*args)


def joint_graph(job: Job) -> tuple[torch.fx.GraphModule, Any]:
    """Both passes as one graph, and what is returned: whether a tensor has a gradient, None for what is no tensor."""
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table

    method = _Method(job.module, job.method)
    states = {**dict(method.named_parameters()), **dict(method.named_buffers())}
    leaves, structure = tree_flatten(job.args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    returned: list[Any] = []

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=False):
            given[place] = tensor
        instead = dict(zip(states, tensors[len(places) :], strict=True))
        with torch.autocast("cpu", dtype=job.autocast or torch.bfloat16, enabled=job.autocast is not None):
            outputs = torch.func.functional_call(method, instead, tuple(tree_unflatten(given, structure)))
        returned.append(tree_map(lambda x: x.requires_grad if isinstance(x, Tensor) else None, outputs))
        # No output may be an input or a view; a copy of what is neither is left out by the compiler.
        found = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor)]
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in found)

    inputs = (*(leaves[place] for place in places), *states.values())
    decompositions = {**select_decomp_table(), torch.ops.aten.silu.default: _silu}
    joint = aot_export_joint_simple(function, inputs, trace_joint=True, decompositions=decompositions)
    return cast("torch.fx.GraphModule", joint), returned[-1]


def package(job: Job, which: str, directory: Path, scratch: Path) -> None:
    """Write the package of one of the passes, what the function returns, and what is kept between the two."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner, partition_fn
    from torch._inductor.virtualized import V

    with config.patch({**choices(), "aot_inductor.output_path": str(scratch)}):
        joint, returned = joint_graph(job)
        learned = [learned for learned in tree_flatten(returned)[0] if learned is not None]
        count = len(learned)
        both = partition_fn(joint, _inputs(joint), num_fwd_outputs=count)
        graph = both[PASSES.index(which)]
        (output,) = graph.graph.find_nodes(op="output")
        if which == "forward":
            output.meta["user_visible_output_idxs"] = list(range(count))
            kept = [node.meta["val"] for node in cast("Any", output.args[0])[count:]]
        else:
            kept = _inputs(graph)[: -sum(learned) or None]
        with V.set_aot_compilation(True):
            made = compile_fx_inner(
                graph,
                _inputs(graph),
                static_input_idxs=[],
                graph_id=0,
                is_backward=which == "backward",
                is_inference=False,
                cpp_wrapper=True,
                aot_mode=True,
            )
    packed = directory / which / WITHIN
    packed.mkdir(parents=True)
    for file in map(Path, cast("Any", made).filename):
        if file.suffix != ".cpp":
            shutil.move(file, packed / file.name)
    seam = [(tuple(x.shape), x.stride(), x.dtype) for x in kept]
    atomic_write(directory / which / OUTPUTS, pickle.dumps((returned, seam)))


def _silu(x: Tensor) -> Tensor:
    """x sigmoid(x): the backward pass has that sigmoid anyway; torch's x / (1 + exp(-x)) is an exponential more."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * wide.sigmoid()).to(x.dtype)


def _inputs(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


def main() -> None:
    """Do what the arguments say."""
    which, directory, parent = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    die_with(parent)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch
        # Else it tries each kind of vectors with two programs. A compiler that reads torch's headers knows AVX-512;
        # what is newer, bf16 and tiles, it still tries.
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
        job: Job = pickle.loads((directory / JOB).read_bytes())
        torch.set_num_threads(job.threads)
        torch.compiler._is_compiling_flag = True  # what `torch.compiler.is_compiling` says, as under torch.compile
        package(job, which, directory, Path(scratch) / "package")


if __name__ == "__main__":
    main()
