"""`python -m benchmarks`: measure the speed of ingot and of other tools on the same work."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ingot.cli.options import JsonOption, emit
from ingot.core.errors import UserError

app = typer.Typer(
    help="Measure speed and memory of ingot on this machine, alternating with other tools on the same work.\n\n"
    "A peer has an environment of its own below ~/.cache/ingot/peers (INGOT_CACHE moves ~/.cache/ingot). pip creates "
    "it when the peer is first used; nothing else uses the network. INGOT_PEER_LITGPT=PYTHON (likewise _TRANSFORMERS, "
    "_NANOGPT, _TRL, _DATATROVE) selects an existing environment. Keep the machine quiet during measurements.\n\n"
    "Try: python -m benchmarks train --shape S1 --against none",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SHAPES = (
    "S1 (0.9M parameters, 64 rows of 64), S2 (12 rows), S3 (11M, 16 rows of 256), S4 (124M, 4 rows of 256); for a GPU "
    "GPT2 (124M, 16 rows of 1,024), G1 (the same in Llama's style), G2 (1.1B, 8 rows); tiny, tiny-gpt2 for a quick try"
)
ShapeOption = Annotated[list[str], typer.Option("--shape", help=f"{SHAPES}. May be repeated.", metavar="NAME")]
AgainstOption = Annotated[
    list[str],
    typer.Option(
        "--against", help="A peer, or none; may be repeated. Default: all that can be installed.", metavar="NAME"
    ),
]
RepetitionsOption = Annotated[
    int, typer.Option(help="Measurements of each contender; two or more give ratios an interval.", min=1)
]
SecondsOption = Annotated[float, typer.Option(help="Length of a timed window; at least four steps.", min=0)]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume", help="Store finished measurements until all are done, and reuse those of an interrupted run."
    ),
]


def _options(against: list[str], repetitions: int, seconds: float, resume: bool) -> Any:
    from benchmarks.commands import Options
    from benchmarks.process import ResultCache

    cache = ResultCache.resumable() if resume else ResultCache(None)
    return Options(_log, tuple(against), repetitions, seconds, cache)


def _log(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def _print(data: dict[str, Any], *tables: list[dict[str, str]]) -> None:
    from benchmarks.machine import load_warning, one_line
    from ingot.report.terminal import print_rows

    print(one_line(data["machine"]))
    for table in tables:
        print_rows(table)
    if warning := load_warning(data["machine"]):
        print(warning)


@app.command()
def train(
    shape: ShapeOption = [],  # noqa: B006
    against: AgainstOption = [],  # noqa: B006
    precision: Annotated[
        Literal["auto", "fp32", "bf16"], typer.Option(help="Precision of ingot; auto is the default of recipes.")
    ] = "auto",
    autocast: Annotated[
        bool, typer.Option("--autocast", help="Use bf16 autocast in the peers instead of their defaults.")
    ] = False,
    repetitions: RepetitionsOption = 3,
    seconds: SecondsOption = 4.0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print a profile of ingot's step to standard error.")
    ] = False,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Training: tokens per second of complete steps (batch, forward, backward, clipping, AdamW), and peak memory.

    All contenders train the same model from the same weights on the same rows. A ratio is printed only if parameters,
    FLOPs and the losses of the first steps agree; it is the mean over repetitions, with a 95 % interval. The fastest
    peer is marked *. GFLOP/s are also a fraction of the best matrix product measured in the same run.

    Without --shape: S1, S2, S3; on a GPU GPT2 and G1.
    """
    from benchmarks.commands import bench_train
    from benchmarks.tables import refusals, train_rows

    options = _options(against, repetitions, seconds, resume)
    data = bench_train(shape, options, precision=precision, autocast=autocast, profile=profile)
    emit(data, as_json, lambda: _print(data, train_rows(data["shapes"])))
    if sentences := refusals(data["shapes"]):
        raise UserError("\n".join(sentences))


@app.command()
def generate(
    shape: Annotated[str, typer.Option(help=f"The model: {SHAPES}.")] = "S4",
    batch: Annotated[list[int], typer.Option(help="Prompts per batch; may be repeated.", min=1)] = [1, 32],  # noqa: B006
    dtype: Annotated[
        list[str], typer.Option(help="Type of the weights, float32 or bfloat16; may be repeated. Default: both.")
    ] = [],  # noqa: B006
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 64,
    new: Annotated[int, typer.Option(help="New tokens.", min=2)] = 64,
    against: AgainstOption = [],  # noqa: B006
    repetitions: RepetitionsOption = 3,
    seconds: SecondsOption = 2.0,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Generation: greedy continuations with a KV cache, compared with the time to read the weights from memory.

    Both sides continue the same prompts with the same weights. A ratio is printed only if they generate the same
    tokens.
    """
    from benchmarks.commands import bench_generate
    from benchmarks.tables import generate_rows

    options = _options(against, repetitions, seconds, resume)
    data = bench_generate(shape, batch, dtype, options, prompt=prompt, new=new)
    emit(data, as_json, lambda: _print(data, generate_rows(data["rows"])))


@app.command()
def align(
    shape: Annotated[str, typer.Option(help="The model: A1 (1.0M parameters); tiny for a quick try.")] = "A1",
    method: Annotated[
        list[str], typer.Option(help="dpo, grpo or ppo; may be repeated. Default: all three.", metavar="NAME")
    ] = [],  # noqa: B006
    against: AgainstOption = [],  # noqa: B006
    repetitions: RepetitionsOption = 3,
    seconds: SecondsOption = 3.0,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Post-training: milliseconds of a step of dpo, grpo and ppo, including generation, scoring and all updates.

    Both sides start from the same weights and the same pairs or prompts. A ratio is printed only if parameters, updates
    and trained tokens of a step agree, and for dpo the losses of the first steps. trl runs as shipped, and tuned for a
    CPU.
    """
    from benchmarks.commands import bench_align
    from benchmarks.tables import align_rows

    data = bench_align(shape, method, _options(against, repetitions, seconds, resume))
    emit(data, as_json, lambda: _print(data, align_rows(data["methods"])))


@app.command("data")
def data_(
    shape: ShapeOption = [],  # noqa: B006
    against: AgainstOption = [],  # noqa: B006
    megabytes: Annotated[float, typer.Option(help="Text that the corpus pipeline cleans.", min=0.1)] = 40.0,
    repetitions: RepetitionsOption = 3,
    seconds: SecondsOption = 2.0,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Data: the time to make a batch relative to a training step, and megabytes of text cleaned per second.

    Without --shape the loader is measured at S1, S2 and S3.
    """
    from benchmarks.commands import bench_data
    from benchmarks.tables import corpus_rows, loader_rows

    data = bench_data(shape, _options(against, repetitions, seconds, resume), megabytes)
    emit(data, as_json, lambda: _print(data, loader_rows(data["loader"]), corpus_rows(data["corpus"])))


@app.command()
def startup(
    against: AgainstOption = [],  # noqa: B006
    repetitions: RepetitionsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Start-up: seconds from `ingot run` to the first step, with and without compiled code in the cache; imports."""
    from benchmarks.commands import bench_startup
    from benchmarks.tables import startup_rows

    data = bench_startup(_options(against, repetitions, 0.5, False))
    emit(data, as_json, lambda: _print(data, startup_rows(data)))


@app.command()
def head(
    vocab: Annotated[int | None, typer.Option(help="Vocabulary; default 131,072 on a GPU.", min=2)] = None,
    width: Annotated[int | None, typer.Option(help="Width of the model; default 2,048 on a GPU.", min=1)] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per step; default 8,192 on a GPU.", min=1)] = None,
    as_json: JsonOption = False,
) -> None:
    """The LM head and its loss with a large vocabulary: peak memory and time, in chunks and with all logits at once."""
    from benchmarks.commands import TINY_HEAD, bench_head
    from benchmarks.tables import head_rows

    sizes = {k: v for k, v in {"vocab": vocab, "width": width, "tokens": tokens}.items() if v is not None}
    data = bench_head({**TINY_HEAD, **sizes} if sizes else None, _options([], 1, 1.0, False))
    emit(data, as_json, lambda: _print(data, head_rows(data)))


@app.command("all")
def all_(
    full: Annotated[bool, typer.Option("--full", help="Also S4, ingot in fp32, data, align: about an hour.")] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            help="Markdown page to write, such as docs/BENCHMARKS.md; results are kept in benchmarks/ beside it.",
        ),
    ] = None,
    against: AgainstOption = [],  # noqa: B006
    repetitions: RepetitionsOption = 3,
    seconds: SecondsOption = 3.0,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Training, generation and start-up as one page, in about ten minutes; `make bench` calls this."""
    from benchmarks.commands import everything
    from benchmarks.page import keep, section

    data = everything(_options(against, repetitions, seconds, resume), full)
    if to is not None:
        _log(f"wrote {keep(data, to)} and {to}")
    emit(data, as_json, lambda: print(section(data)))


@app.command()
def page(
    to: Annotated[Path, typer.Option("--to", help="The Markdown page.")] = Path("docs/BENCHMARKS.md"),
) -> None:
    """Render the page again from the kept results of all machines."""
    from benchmarks.page import write_page

    write_page(to)


def main() -> None:
    """Entry point; a `UserError` prints its message and gives exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
