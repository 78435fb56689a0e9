"""Compiled ahead, on a CPU: the process that trains calls machine code and never sees the compiler.

`torch.compile` brings its compiler into the process that trains: 117 MB (sympy alone 33), one to three seconds of every
start, and at every call guards and frames in Python, 1 ms of a step of 14 (shape S2 of `ingot bench`). Here two other
processes (`compiler.py`) trace the function of a module, divide it into a forward and a backward pass and leave each as
a package of AOTInductor's, kept under a digest of all that was traced: the module without its numbers, shapes and
strides of the tensors, autocast, threads, the source. A process that trains loads the two and calls them; the
module's parameters are inputs like others, so they keep their names and may be moved by anybody.

Rejected: torch.compile with its C++ wrapper, which saves the calls alone; and this on a GPU, where one update is
recorded as a whole anyway (`graphs.py`), which leaves nothing to save.
"""

import fcntl
import io
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from ingot import model as traced
from ingot.core.artifact import atomic_directory, cache, digest_bytes, digest_file
from ingot.core.errors import UserError
from ingot.kernels.precision import autocast_dtype

PASSES = ("forward", "backward")
JOB, OUTPUTS = "job.pickle", "outputs.pickle"
WITHIN = Path("data/aotinductor/model")
"""Where a package, which is a directory here, has its files."""
_TOLD, _ELSEWHERE = ("TORCHINDUCTOR_", "ATEN_CPU_CAPABILITY", "CXX"), "TORCHINDUCTOR_CACHE_DIR"
"""Variables of the environment that say how to compile, and one of them that says where."""
KEPT = 100
"""Programs on disk, 4 to 8 MB each; the one that was not used for longest goes first."""


class Job(NamedTuple):
    """All that there is to compile; what is pickled of its tensors is their kind alone."""

    module: nn.Module
    method: str
    args: tuple[Any, ...]
    """Of the call: tensors and constants."""
    autocast: torch.dtype | None
    threads: int
    versions: tuple[Any, ...]
    """What else the machine code depends on."""


class Ahead:
    """A function of a module's: compiled for each kind of arguments at the first call with it, then called.

    Args:
        say: told when something is compiled, and when that failed, upon which the function runs as it is; without it a
            failure is raised.
    """

    def __init__(self, module: nn.Module, method: str = "forward", say: Callable[[str], None] | None = None):
        self._module, self._method, self._say = module, method, say
        self._states = [*module.parameters(), *module.buffers()]
        self._programs: dict[tuple[Any, ...], Program | None] = {}
        """By kind of call; None where the function runs as it is."""

    def __call__(self, *args: Any) -> Any:
        leaves, _ = tree_flatten(args)
        autocast = autocast_dtype(torch.device("cpu"))
        states = [(x.dtype, x.requires_grad) for x in self._states]
        kinds = (self._module.training, autocast, *states, *(_kind(x) if isinstance(x, Tensor) else x for x in leaves))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if kinds not in self._programs:
            self._programs[kinds] = self._program(args, tensors, autocast)
        if (program := self._programs[kinds]) is None:
            return getattr(self._module, self._method)(*args)
        return program(tensors)

    def _program(
        self, args: tuple[Any, ...], tensors: Sequence[Tensor], autocast: torch.dtype | None
    ) -> "Program | None":
        if not any(x.requires_grad for x in (*tensors, *self._states)):
            return None  # frozen blocks below the first that learns; there is no backward pass
        job = Job(self._module, self._method, args, autocast, torch.get_num_threads(), _versions())
        try:
            return Program(job, self._states, self._say or (lambda text: None))
        except UserError as error:
            if self._say is None:
                raise
            self._say(f"{error}; going on without, which is slower")
            return None


class Program:
    """The two passes of one job, compiled if they are not on disk.

    Raises:
        UserError: the compiler failed, or there is no place for what it makes.
    """

    def __init__(self, job: Job, states: Sequence[Tensor], say: Callable[[str], None]):
        self._states = states
        described = _pickled(job)
        path = cache() / "compiled" / digest_bytes(described)[:32]
        try:
            self.passes, returned = _loaded(path)
        except _BROKEN:
            try:
                _make(path, described, say)
            except OSError as error:
                raise UserError(
                    f"{path.parent}: {error.strerror or error}, expected a directory where compiled models can be "
                    "kept; name another by INGOT_CACHE, or set loop.compile = false"
                ) from error
            self.passes, returned = _loaded(path)
        with suppress(OSError):  # a cache that may only be read is as good
            path.touch()
        self._returned, self._structure = tree_flatten(returned)
        self.learned = [learned for learned in self._returned if learned is not None]
        """Which of the tensors that the function returns have a gradient."""

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        outputs = iter(_Call.apply(self, *tensors, *self._states))
        return tree_unflatten([None if x is None else next(outputs) for x in self._returned], self._structure)


class _Call(torch.autograd.Function):
    """One call. Packages take their inputs out of the list, so what the backward pass reads is freed as it is used."""

    @staticmethod
    def forward(ctx: Any, program: Program, *inputs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = program.passes[0].boxed_run(list(inputs))
        count = len(program.learned)
        ctx.program, ctx.kept = program, found[count:]
        ctx.mark_non_differentiable(*(x for x, learned in zip(found, program.learned, strict=False) if not learned))
        return tuple(found[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, ctx.kept = ctx.kept, None
        assert inputs is not None, "what the backward pass needs is gone with the first one"
        inputs += [x.contiguous() for x, learned in zip(gradients, ctx.program.learned, strict=True) if learned]
        return None, *ctx.program.passes[1].boxed_run(inputs)


_BROKEN = (OSError, RuntimeError, EOFError, pickle.UnpicklingError)
"""What it gives to load a program that is not there, or damaged."""


def _loaded(path: Path) -> tuple[list[Any], Any]:
    """The packages of both passes, each to be run by the thread that calls it; what the function returns."""
    loader: Any = torch._C._aoti.AOTIModelPackageLoader  # pyright: ignore[reportAttributeAccessIssue]
    (returned, kept), again = (pickle.loads((path / which / OUTPUTS).read_bytes()) for which in PASSES)
    if (returned, kept) != again:
        raise UserError(f"{path}: the two passes do not fit together; set loop.compile = false, and tell us")
    return [loader(str(path / which), "model", False, 1, -1) for which in PASSES], returned


def _make(path: Path, described: bytes, say: Callable[[str], None]) -> None:
    """Compile, unless somebody else just did; of several ranks one does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(*_BROKEN):
            _loaded(path)
            return
        for left in path.parent.glob(".*.tmp"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        say("compiling the model, once for this shape; that takes about half a minute")
        with atomic_directory(path) as fresh:
            (fresh / JOB).write_bytes(described)
            _compile(fresh)
        programs = [other for other in path.parent.iterdir() if other.is_dir()]
        for old in sorted(programs, key=lambda other: other.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _compile(directory: Path) -> None:
    """Both passes at once, each by a process of its own."""
    started: list[subprocess.Popen[str]] = []
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # they must come to the same division
    with tempfile.TemporaryFile("w+") as said:
        try:
            for which in PASSES:
                command = [sys.executable, "-m", "ingot.backends.aot_worker", which, str(directory), str(os.getpid())]
                started.append(subprocess.Popen(command, stdout=said, stderr=said, text=True, env=environment))
            failed = [process.returncode for process in started if process.wait()]
        finally:
            for process in started:
                process.kill()
        if failed:
            said.seek(0)
            last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
            how = last[:300] if failed[0] > 0 else f"ended by signal {-failed[0]}, for want of memory perhaps"
            raise UserError(
                f"loop.compile: compiling the model failed ({how}), expected a C++ compiler that works; "
                "mend it, or set loop.compile = false"
            )


def _versions() -> tuple[Any, ...]:
    """Torch, the CPU, what the user tells the compiler, and the source of whatever is traced or traces."""
    told = sorted((name, value) for name, value in os.environ.items() if name.startswith(_TOLD) and name != _ELSEWHERE)
    here = [Path(__file__), Path(__file__).with_name("aot_worker.py")]
    files = sorted(file for directory in traced.__path__ for file in Path(directory).glob("*.py"))
    capabilities = sorted(torch.cpu.get_capabilities().items())
    return torch.__version__, capabilities, told, [digest_file(file) for file in (*here, *files)]


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.requires_grad


class _Pickler(pickle.Pickler):
    """Of tensors it keeps what `hollow` takes, of settings no record of who has set them."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return hollow, (tuple(obj.shape), obj.stride(), obj.dtype, obj.requires_grad, isinstance(obj, nn.Parameter))
        if isinstance(obj, BaseModel):
            return type(obj).model_validate, (obj.model_dump(),)
        return NotImplemented


def _pickled(job: Job) -> bytes:
    out = io.BytesIO()
    _Pickler(out).dump(job)
    return out.getvalue()


def hollow(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, parameter: bool
) -> Tensor:
    """A tensor of that kind, whose numbers nobody set."""
    empty = torch.empty_strided(shape, stride, dtype=dtype)
    return nn.Parameter(empty, requires_grad) if parameter else empty.requires_grad_(requires_grad)
