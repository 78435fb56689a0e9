"""What `python -m benchmarks ...` does, as plain data: which contenders, on what, and what comes of it.

All options that commands share are one object, so that `everything` can hand them on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import align, data, generate, machine, shapes, startup, train
from benchmarks.contenders import Contender, Say, ours, peers
from benchmarks.process import Kept, measure
from ingot.core.errors import UserError

Data = dict[str, Any]
CPU_SHAPES, GPU_SHAPES = ("S1", "S2", "S3"), ("GPT2", "G1")
LOADER_SHAPES = ("S1", "S2", "S3")
CORPUS_MB = 40.0
HEAD = {"vocab": 131_072, "width": 2048, "tokens": 8192}
"""Of the head whose memory is measured on a GPU: Llama 3's vocabulary, a 1B model's width, 8 rows of 1,024."""
TINY_HEAD = {"vocab": 4096, "width": 64, "tokens": 512}


@dataclass(frozen=True)
class Options:
    """What the commands share."""

    say: Say
    against: tuple[str, ...] = ()
    repetitions: int = 3
    seconds: float = 4.0
    kept: Kept = field(default_factory=lambda: Kept(None))
    about: Data | None = None
    """The machine, where a command is part of something larger, which has described it and clears what was kept."""

    def described(self) -> Data:
        """The machine, before anything is measured."""
        return self.about or machine.described(self.kept, self.say)

    def trained(self, shape: shapes.Shape, contenders: list[Contender], about: Data) -> train.Measured:
        """Steps of all contenders at one shape."""
        how = self.repetitions, self.seconds, self.kept, self.say
        return train.measured(shape, contenders, *how, memory=_room(about))

    def finished(self, about: Data) -> Data:
        """The machine, when all of a command has been measured; what was kept can go."""
        if self.about is not None:
            return about
        about = machine.again(about, self.kept, self.say)
        self.kept.clear()
        return about


def _shapes(names: list[str], about: Mapping[str, Any]) -> list[shapes.Shape]:
    """The named shapes; by default those meant for this machine."""
    return [shapes.named(n) for n in names or (CPU_SHAPES if about["device"] == "cpu" else GPU_SHAPES)]


def _room(about: Mapping[str, Any]) -> float:
    """Bytes for contenders that take turns; on a GPU, which nobody else has, they run one after another."""
    return about["memory_bytes"] if about["device"] == "cpu" else 0.0


def bench_train(
    names: list[str], options: Options, *, precision: str = "auto", autocast: bool = False, profile: bool = False
) -> Data:
    """Training steps, ours in one precision against peers in one mode."""
    for name in names:
        shapes.named(name)
    about = options.described()
    wanted = _shapes(names, about)
    families = {shape.family for shape in wanted}
    theirs, skipped = peers("train", list(options.against), options.say, families, autocast=autocast)
    mine = ours("train", precision=precision, profile=profile)
    found = {}
    for shape in wanted:
        able = [mine, *(c for c in theirs if shape.family in c.families)]
        found[shape] = options.trained(shape, able, about)
    about = options.finished(about)
    rows = {s.name: train.summary(s, results.pop(mine.name), results, about, autocast) for s, results in found.items()}
    return {"machine": about, "peers": _mode(autocast), "skipped": skipped, "shapes": rows}


def bench_train_modes(names: list[str], options: Options, forced: bool) -> Data:
    """The same in one go: ours against the peers as shipped and with autocast, and ours in fp32 where `forced`.

    All alternate within one repetition, so ours is measured once for all comparisons.
    """
    about = options.described()
    wanted = _shapes(names, about)
    theirs, skipped = peers("train", list(options.against), options.say, {shape.family for shape in wanted})
    mine, fp32 = ours("train"), ours("train", "ingot fp32", precision="fp32")
    on_gpu = about["device"] != "cpu"
    theirs = [c for c in theirs if forced or on_gpu or "Trainer" not in c.name]  # on a CPU it is the plain loop
    bf16 = _has_bf16(about)  # else theirs would be emulated, and on a CPU ours is in fp32 anyway
    cast = [c.told(f"{c.name} autocast", autocast=True) for c in theirs] if bf16 else []
    forced &= bf16 or on_gpu
    modes: dict[str, Data] = {mode: {} for mode in ("as shipped", *(["autocast"] * bf16), *(["fp32"] * forced))}
    measured = {}
    for shape in wanted:
        able = [c for c in (mine, *([fp32] if forced else []), *theirs, *cast) if shape.family in c.families]
        measured[shape] = options.trained(shape, able, about)
    about = machine.again(about, options.kept, options.say)
    for shape, found in measured.items():
        shipped = {c.name: found[c.name] for c in theirs if c.name in found}
        by_hand = {c.name: found[c.name] for c in cast if c.name in found}
        modes["as shipped"][shape.name] = train.summary(shape, found[mine.name], shipped, about)
        if bf16:
            modes["autocast"][shape.name] = train.summary(shape, found[mine.name], by_hand, about, True)
        if forced:
            modes["fp32"][shape.name] = train.summary(shape, found[fp32.name], shipped, about)
    return {"machine": about, "skipped": skipped, "modes": modes}


def _has_bf16(about: Mapping[str, Any]) -> bool:
    """Whether the machine multiplies in bf16 by itself; where it does not, one step would take minutes."""
    return "gemm_bf16_gflop_s" in about


def _mode(autocast: bool) -> str:
    return "bf16 by autocast" if autocast else "as shipped (fp32)"


def bench_generate(
    name: str, rows: list[int], dtypes: list[str], options: Options, *, prompt: int = 64, new: int = 64
) -> Data:
    """Greedy continuations of one shape, each batch in each precision."""
    shape = shapes.named(name)
    for dtype in dtypes:
        if dtype not in generate.BYTES:
            raise UserError(f"--dtype: found '{dtype}', expected {' or '.join(generate.BYTES)}")
    theirs, skipped = peers("generate", list(options.against), options.say)
    about = options.described()
    dtypes = dtypes or [dtype for dtype in generate.BYTES if dtype == "float32" or _has_bf16(about)]
    mine = ours("generate")
    found = []
    with train.prepared(shape, context=prompt + new) as job:
        for dtype in dtypes:
            for batch in rows:
                results = generate.measured(
                    job,
                    [mine, *theirs],
                    batch,
                    dtype,
                    prompt=prompt,
                    new=new,
                    repetitions=options.repetitions,
                    seconds=options.seconds,
                    kept=options.kept,
                    say=options.say,
                    turns=min(2, train.turns(shape, 1 + len(theirs), _room(about))),
                )
                found.append(generate.summary(batch, dtype, new, results.pop(mine.name), results))
    about = options.finished(about)
    return {"machine": about, "skipped": skipped, "shape": name, "prompt": prompt, "rows": found}


def bench_align(name: str, methods: list[str], options: Options) -> Data:
    """Steps of post-training, with generation."""
    shape = shapes.named(name)
    if name not in align.SIZES:
        raise UserError(f"--shape: found '{name}', expected {' or '.join(align.SIZES)} for `bench align`")
    for method in methods:
        if method not in align.METHODS:
            raise UserError(f"--method: found '{method}', expected one of {', '.join(align.METHODS)}")
    theirs, skipped = peers("align", list(options.against), options.say)
    about = options.described()
    found = align.measured(
        shape, methods or align.METHODS, theirs, options.repetitions, options.seconds, options.kept, options.say
    )
    about = options.finished(about)
    rows = {method: align.summary(results) for method, results in found.items()}
    return {"machine": about, "skipped": skipped, "shape": name, **align.SIZES[name], "methods": rows}


def bench_data(names: list[str], options: Options, megabytes: float = CORPUS_MB) -> Data:
    """The loader beside the step, and the corpus chain."""
    wanted = [shapes.named(n) for n in names or LOADER_SHAPES]
    theirs, skipped = peers("data", list(options.against), options.say)
    about = options.described()
    loader = data.loader(wanted, min(options.seconds, 2.0), options.kept, options.say)
    corpus = data.corpus(theirs, megabytes, options.repetitions, options.kept, options.say)
    about = options.finished(about)
    return {"machine": about, "skipped": skipped, "loader": loader, "corpus": corpus}


def bench_startup(options: Options) -> Data:
    """Seconds to the first step, and of imports."""
    found, skipped = peers("train", list(options.against), options.say)
    importers: dict[str, Contender] = {}
    for contender in found:
        importers.setdefault(contender.name.split()[0], contender)
    about = options.described()
    rows = startup.bench_startup(options.say, importers, options.repetitions)
    about = options.finished(about)
    return {"machine": about, "skipped": skipped, **rows}


def bench_head(sizes: Mapping[str, int] | None, options: Options) -> Data:
    """Memory and time of the head and its loss, in chunks and as a whole."""
    about = options.described()
    job = {**(sizes or (HEAD if about["device"] != "cpu" else TINY_HEAD)), "seconds": options.seconds}
    rows = {
        way: measure(ours("head", f"ingot {way}", chunked=way == "chunked"), job, options.kept)
        for way in ("chunked", "whole")
    }
    about = options.finished(about)
    return {"machine": about, **job, "rows": rows}


def everything(options: Options, full: bool) -> Data:
    """What docs/BENCHMARKS.md shows; `full` adds S4, ours in fp32, data and post-training, and takes its time."""
    about = options.described()
    part = replace(options, about=about)
    on_gpu = about["device"] != "cpu"
    names = [*(GPU_SHAPES if on_gpu else CPU_SHAPES), *((["G2"] if on_gpu else ["S4"]) if full else [])]
    brief = replace(part, repetitions=part.repetitions if full else 1, seconds=1.0)
    steps = part if full else replace(part, seconds=part.seconds / 2)
    trained = bench_train_modes(names, steps, forced=full)
    found = {
        "machine": trained["machine"],
        "repetitions": part.repetitions,
        "train": trained,
        "generate": bench_generate("G1" if on_gpu else "S4", [1, 32], [], brief),
        "startup": bench_startup(brief),
    }
    if full:
        found["data"] = bench_data([], part, CORPUS_MB)
        found["align"] = bench_align("A1", [], part)
    if full and on_gpu:
        found["head"] = bench_head(None, part)
    options.kept.clear()
    return found
