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
from ingot.model.precision import autocast_dtype

PASSES = ("forward", "backward")
JOB, OUTPUTS = "job.pickle", "outputs.pickle"
WITHIN = Path("data/aotinductor/model")
"""Where a package, which is a directory here, has its files."""
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
    """A function of a module's: compiled for each kind of arguments at the first call with it, then called."""

    def __init__(self, module: nn.Module, method: str = "forward", say: Callable[[str], None] = lambda text: None):
        self._module, self._method, self._say = module, method, say
        self._programs: dict[tuple[Any, ...], Program] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, _ = tree_flatten(args)
        autocast = autocast_dtype(torch.device("cpu"))
        kinds = (self._module.training, autocast, *(_kind(x) if isinstance(x, Tensor) else x for x in leaves))
        if (program := self._programs.get(kinds)) is None:
            job = Job(self._module, self._method, args, autocast, torch.get_num_threads(), _versions())
            program = self._programs[kinds] = Program(job, self._say)
        return program([x for x in leaves if isinstance(x, Tensor)])


class Program:
    """The two passes of one job, compiled if they are not on disk."""

    def __init__(self, job: Job, say: Callable[[str], None]):
        self._states = [*job.module.parameters(), *job.module.buffers()]
        path = _compiled(job, say)
        self.passes = [_load(path / which) for which in PASSES]
        self._returned, self._structure = tree_flatten(pickle.loads((path / OUTPUTS).read_bytes()))
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


def _compiled(job: Job, say: Callable[[str], None]) -> Path:
    """The directory of a job's packages.

    Raises:
        UserError: the compiler failed, or there is no place for what it makes.
    """
    described = _pickled(job)
    path = cache() / "compiled" / digest_bytes(described)[:32]
    if not path.exists():
        try:
            _make(path, described, say)
        except OSError as error:
            raise UserError(
                f"{path.parent}: {error.strerror or error}, expected a directory where compiled models can be kept; "
                "name another by INGOT_CACHE, or set loop.compile = false"
            ) from error
        _forget_oldest(path.parent)
    with suppress(OSError):  # a cache that may only be read is as good
        path.touch()
    return path


def _make(path: Path, described: bytes, say: Callable[[str], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_suffix(".lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of several ranks one compiles
        if not path.exists():
            say("compiling the model, once for this shape; that takes about half a minute")
            with atomic_directory(path) as fresh:
                (fresh / JOB).write_bytes(described)
                _compile(fresh)
    lock.unlink(missing_ok=True)


def _forget_oldest(directory: Path) -> None:
    programs = [path for path in directory.iterdir() if (path / OUTPUTS).exists()]
    for old in sorted(programs, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def _compile(directory: Path) -> None:
    """Both passes at once, each by a process of its own."""
    with tempfile.TemporaryFile("w+") as said:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "ingot.train.compiler", which, str(directory)], stdout=said, stderr=said
            )
            for which in PASSES
        ]
        try:
            failed = [process for process in started if process.wait()]
        finally:
            for process in started:
                process.kill()
        if failed:
            said.seek(0)
            last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(
                f"loop.compile: compiling the model failed ({last[:300]}), expected a C++ compiler that works; "
                "mend it, or set loop.compile = false"
            )


def _load(path: Path) -> Any:
    """A package, to be run by this thread: its one model, on the CPU."""
    loader: Any = torch._C._aoti.AOTIModelPackageLoader  # pyright: ignore[reportAttributeAccessIssue]
    return loader(str(path), "model", False, 1, -1)


def _versions() -> tuple[Any, ...]:
    """Torch, the CPU, and the source of whatever is traced or traces."""
    here = [Path(__file__), Path(__file__).with_name("compiler.py")]
    files = sorted(file for directory in traced.__path__ for file in Path(directory).glob("*.py"))
    capabilities = sorted(torch.cpu.get_capabilities().items())
    return torch.__version__, capabilities, [digest_file(file) for file in (*here, *files)]


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
