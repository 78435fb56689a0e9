"""The commands of `python -m benchmarks`: they select contenders and workloads, and return results as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import align, data, generate, machine, shapes, startup, train
from benchmarks.contenders import Contender, Log, ours, peers
from benchmarks.process import ResultCache, measure
from ingot.core.errors import UserError

Data = dict[str, Any]
CPU_SHAPES, GPU_SHAPES = ("S1", "S2", "S3"), ("GPT2", "G1")
LOADER_SHAPES = ("S1", "S2", "S3")
CORPUS_MB = 40.0
GPU_HEAD = {"vocab": 131_072, "width": 2048, "tokens": 8192}
"""Default size of the LM head on a GPU: Llama 3's vocabulary, a 1B model's width, 8 rows of 1,024."""
TINY_HEAD = {"vocab": 4096, "width": 64, "tokens": 512}


@dataclass(frozen=True)
class Options:
    """Options of all commands."""

    log: Log
    against: tuple[str, ...] = ()
    repetitions: int = 3
    seconds: float = 4.0
    cache: ResultCache = field(default_factory=lambda: ResultCache(None))
    about: Data | None = None
    """The description of the machine if the command is part of `everything`, which then also clears the cache."""

    def describe_machine(self) -> Data:
        """The description of the machine, before the measurements."""
        return self.about or machine.describe(self.cache, self.log)

    def measure_train(self, shape: shapes.Shape, contenders: list[Contender], about: Data) -> train.Measured:
        """Measure training steps of all contenders at one shape."""
        return train.measure_shape(
            shape, contenders, self.repetitions, self.seconds, self.cache, self.log, memory=_memory_for_turns(about)
        )

    def finish(self, about: Data) -> Data:
        """Measure the machine again after the measurements, and clear the cache; returns the updated description."""
        if self.about is not None:
            return about
        about = machine.measure_again(about, self.cache, self.log)
        self.cache.clear()
        return about


def _shapes(names: list[str], about: Mapping[str, Any]) -> list[shapes.Shape]:
    """The named shapes; default: those for this machine's device."""
    return [shapes.named(n) for n in names or (CPU_SHAPES if about["device"] == "cpu" else GPU_SHAPES)]


def _memory_for_turns(about: Mapping[str, Any]) -> float:
    """Bytes for contenders that take turns; 0 on a GPU, which has no other load, so contenders run one by one."""
    return about["memory_bytes"] if about["device"] == "cpu" else 0.0


def bench_train(
    names: list[str], options: Options, *, precision: str = "auto", autocast: bool = False, profile: bool = False
) -> Data:
    """Training steps, ours in one precision against peers in one mode."""
    for name in names:
        shapes.named(name)
    about = options.describe_machine()
    selected = _shapes(names, about)
    families = {shape.family for shape in selected}
    theirs, skipped = peers("train", list(options.against), options.log, families, autocast=autocast)
    mine = ours("train", precision=precision, profile=profile)
    measured = {}
    for shape in selected:
        contenders = [mine, *(c for c in theirs if shape.family in c.families)]
        measured[shape] = options.measure_train(shape, contenders, about)
    about = options.finish(about)
    rows = {
        shape.name: train.summary(shape, results.pop(mine.name), results, about, autocast)
        for shape, results in measured.items()
    }
    return {"machine": about, "peers": _mode(autocast), "skipped": skipped, "shapes": rows}


def bench_train_modes(names: list[str], options: Options, fp32: bool) -> Data:
    """Training steps, ours against the peers as shipped and with autocast; with `fp32` also ours in fp32.

    All contenders alternate within one repetition, so ours is measured once for all comparisons.
    """
    about = options.describe_machine()
    selected = _shapes(names, about)
    theirs, skipped = peers("train", list(options.against), options.log, {shape.family for shape in selected})
    mine, mine_fp32 = ours("train"), ours("train", "ingot fp32", precision="fp32")
    on_gpu = about["device"] != "cpu"
    theirs = [c for c in theirs if fp32 or on_gpu or "Trainer" not in c.name]  # on a CPU Trainer is the plain loop
    bf16 = _has_bf16(about)  # otherwise the peers would emulate it, and ours is in fp32 on a CPU anyway
    autocast = [c.variant(f"{c.name} autocast", autocast=True) for c in theirs] if bf16 else []
    fp32 &= bf16 or on_gpu
    modes: dict[str, Data] = {mode: {} for mode in ("as shipped", *(["autocast"] * bf16), *(["fp32"] * fp32))}
    measured = {}
    for shape in selected:
        contenders = [
            c for c in (mine, *([mine_fp32] if fp32 else []), *theirs, *autocast) if shape.family in c.families
        ]
        measured[shape] = options.measure_train(shape, contenders, about)
    about = machine.measure_again(about, options.cache, options.log)
    for shape, results in measured.items():
        as_shipped = {c.name: results[c.name] for c in theirs if c.name in results}
        with_autocast = {c.name: results[c.name] for c in autocast if c.name in results}
        modes["as shipped"][shape.name] = train.summary(shape, results[mine.name], as_shipped, about)
        if bf16:
            modes["autocast"][shape.name] = train.summary(shape, results[mine.name], with_autocast, about, True)
        if fp32:
            modes["fp32"][shape.name] = train.summary(shape, results[mine_fp32.name], as_shipped, about)
    return {"machine": about, "skipped": skipped, "modes": modes}


def _has_bf16(about: Mapping[str, Any]) -> bool:
    """Whether the machine has instructions for bf16; without them one step would take minutes."""
    return "gemm_bf16_gflop_s" in about


def _mode(autocast: bool) -> str:
    return "bf16 by autocast" if autocast else "as shipped (fp32)"


def bench_generate(
    name: str, rows: list[int], dtypes: list[str], options: Options, *, prompt: int = 64, new: int = 64
) -> Data:
    """Greedy continuations of one shape, for each batch size and weight dtype."""
    shape = shapes.named(name)
    for dtype in dtypes:
        if dtype not in generate.BYTES:
            raise UserError(f"--dtype: found '{dtype}', expected {' or '.join(generate.BYTES)}")
    theirs, skipped = peers("generate", list(options.against), options.log)
    about = options.describe_machine()
    dtypes = dtypes or [dtype for dtype in generate.BYTES if dtype == "float32" or _has_bf16(about)]
    mine = ours("generate")
    summaries = []
    with train.prepared_job(shape, context=prompt + new) as job:
        for dtype in dtypes:
            for batch in rows:
                results = generate.measure_batch(
                    job,
                    [mine, *theirs],
                    batch,
                    dtype,
                    prompt=prompt,
                    new=new,
                    repetitions=options.repetitions,
                    seconds=options.seconds,
                    cache=options.cache,
                    log=options.log,
                    windows=min(2, train.windows(shape, 1 + len(theirs), _memory_for_turns(about))),
                )
                summaries.append(generate.summary(batch, dtype, new, results.pop(mine.name), results))
    about = options.finish(about)
    return {"machine": about, "skipped": skipped, "shape": name, "prompt": prompt, "rows": summaries}


def bench_align(name: str, methods: list[str], options: Options) -> Data:
    """Complete steps of post-training."""
    shape = shapes.named(name)
    if name not in align.SIZES:
        raise UserError(f"--shape: found '{name}', expected {' or '.join(align.SIZES)} for `bench align`")
    for method in methods:
        if method not in align.METHODS:
            raise UserError(f"--method: found '{method}', expected one of {', '.join(align.METHODS)}")
    theirs, skipped = peers("align", list(options.against), options.log)
    about = options.describe_machine()
    measured = align.measure_methods(
        shape, methods or align.METHODS, theirs, options.repetitions, options.seconds, options.cache, options.log
    )
    about = options.finish(about)
    rows = {method: align.summary(results) for method, results in measured.items()}
    return {"machine": about, "skipped": skipped, "shape": name, **align.SIZES[name], "methods": rows}


def bench_data(names: list[str], options: Options, megabytes: float = CORPUS_MB) -> Data:
    """The time of a batch relative to a step, and the throughput of the corpus pipeline."""
    selected = [shapes.named(n) for n in names or LOADER_SHAPES]
    theirs, skipped = peers("data", list(options.against), options.log)
    about = options.describe_machine()
    loader = data.measure_loader(selected, min(options.seconds, 2.0), options.cache, options.log)
    corpus = data.measure_corpus(theirs, megabytes, options.repetitions, options.cache, options.log)
    about = options.finish(about)
    return {"machine": about, "skipped": skipped, "loader": loader, "corpus": corpus}


def bench_startup(options: Options) -> Data:
    """Seconds to the first step, and of imports."""
    theirs, skipped = peers("train", list(options.against), options.log)
    importers: dict[str, Contender] = {}
    for contender in theirs:
        importers.setdefault(contender.name.split()[0], contender)
    about = options.describe_machine()
    rows = startup.bench_startup(options.log, importers, options.repetitions)
    about = options.finish(about)
    return {"machine": about, "skipped": skipped, **rows}


def bench_head(sizes: Mapping[str, int] | None, options: Options) -> Data:
    """Memory and time of the LM head and its loss, with logits in chunks and all at once (`whole`)."""
    about = options.describe_machine()
    job = {**(sizes or (GPU_HEAD if about["device"] != "cpu" else TINY_HEAD)), "seconds": options.seconds}
    rows = {
        variant: measure(ours("head", f"ingot {variant}", chunked=variant == "chunked"), job, options.cache)
        for variant in ("chunked", "whole")
    }
    about = options.finish(about)
    return {"machine": about, **job, "rows": rows}


def everything(options: Options, full: bool) -> Data:
    """The results of docs/BENCHMARKS.md; `full` adds a larger shape, ours in fp32, data and post-training."""
    about = options.describe_machine()
    options = replace(options, about=about)
    on_gpu = about["device"] != "cpu"
    names = [*(GPU_SHAPES if on_gpu else CPU_SHAPES), *((["G2"] if on_gpu else ["S4"]) if full else [])]
    brief = replace(options, repetitions=options.repetitions if full else 1, seconds=1.0)
    train_options = options if full else replace(options, seconds=options.seconds / 2)
    trained = bench_train_modes(names, train_options, fp32=full)
    results = {
        "machine": trained["machine"],
        "repetitions": options.repetitions,
        "train": trained,
        "generate": bench_generate("G1" if on_gpu else "S4", [1, 32], [], brief),
        "startup": bench_startup(brief),
    }
    if full:
        results["data"] = bench_data([], options, CORPUS_MB)
        results["align"] = bench_align("A1", [], options)
    if full and on_gpu:
        results["head"] = bench_head(None, options)
    options.cache.clear()
    return results
