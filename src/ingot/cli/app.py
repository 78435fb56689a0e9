"""The command line: arguments in, one call, words out. Heavy imports wait until a command needs them."""

import contextlib
import io
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from ingot.cli.inspect import inspect_app
from ingot.cli.models import chat, export, generate, import_
from ingot.cli.options import JsonOption, OnlyOption, OutOption, RecipeArg, SetOption, StageArg, emit
from ingot.core.errors import Notice, StageFailed, UserError, refused
from ingot.core.process import ENDING, on_ending

app = typer.Typer(
    help="From raw text to a trained, aligned language model, from one recipe file.\n\n"
    "Start with: ingot init DIR; cd DIR; ingot plan stdlib.toml; ingot run stdlib.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(inspect_app, name="inspect")

_ENDED = [128 + number for number in ENDING]


def _end(number: int, _: FrameType | None) -> None:
    """Leave in order what is under way. Who asks again changes nothing, but for Ctrl-C."""
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    """Entry point: a user's error is one sentence and exit code 2, what the machine refuses likewise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what this place's encoding has no sign for
    on_ending(_end)
    warnings.showwarning = _show_warning
    try:
        app()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            sys.exit(0)  # whoever reads has read enough
        if error.code in _ENDED:
            _say_stopped()
        raise
    except UserError as error:
        _fail(str(error))
    except StageFailed as error:
        sys.exit(error.code)
    except KeyboardInterrupt:
        _say_stopped()
        sys.exit(130)
    except OSError as error:
        if (sentence := refused(error)) is None:
            raise
        _fail(sentence)


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Where to write the example recipes.", show_default=False)],
) -> None:
    """Write the example recipes, and the files of functions that they call, to a directory, to start from."""
    from importlib.resources import files

    shipped = (f for f in files("ingot.recipes").iterdir() if f.name.endswith((".toml", ".py")))
    sources = sorted((f for f in shipped if not f.name.startswith("_")), key=lambda f: f.name)
    for source in sources:
        if (target := directory / source.name).exists():
            raise UserError(f"{target}: exists already; choose another directory or move it away")
    directory.mkdir(parents=True, exist_ok=True)
    for source in sources:
        (directory / source.name).write_text(source.read_text())
        print(f"wrote {directory / source.name}")
    print(f"next: ingot plan {directory / 'stdlib.toml'}")


@app.command()
def plan(
    recipe: RecipeArg,
    set: SetOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    nproc: Annotated[int, typer.Option("--nproc", help="Plan for this many ranks.", min=1)] = 1,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Plan for this GPU, such as a100, not this machine.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what `run` would do: every stage as HIT, RESUME or RUN, which setting changed, and what training takes."""
    from ingot.pipeline.graph import load_graphs
    from ingot.pipeline.run import require_files
    from ingot.report.plan import device_of, plan_rows
    from ingot.report.swept import print_any_plan, swept_rows

    device = device_of(gpu)
    graphs = load_graphs(recipe, set, out)
    rows = swept_rows(graphs, lambda graph: plan_rows(graph, device, nproc))
    emit(rows, as_json, lambda: print_any_plan(graphs, rows))
    require_files(graphs, only=[])


@app.command()
def run(
    recipe: RecipeArg,
    set: SetOption = [],  # noqa: B006
    only: OnlyOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Run a recipe: finished stages are kept, interrupted ones go on, changed ones are made anew."""
    from ingot.pipeline.run import require_files
    from ingot.pipeline.sweep import run_all
    from ingot.report.terminal import Progress
    from ingot.stages.job import read_result

    graphs = _graphs(recipe, set, out)
    require_files(graphs, only)
    progress = Progress(graphs, quiet=as_json)
    try:
        done = run_all(graphs, only, progress.stage, progress.point, quiet=as_json)
    finally:  # a half-finished run has a report too
        from ingot.report.swept import print_any_end, write_any_report

        page = write_any_report(graphs)
    results = {name: {"directory": str(path), "result": read_result(path)} for name, path in done.items()}
    emit(results, as_json, lambda: print_any_end(graphs, page))


@app.command()
def status(recipe: RecipeArg, set: SetOption = [], out: OutOption = Path("runs"), as_json: JsonOption = False) -> None:  # noqa: B006
    """Show how far a recipe is: state, last step, loss, speed."""
    from ingot.report.swept import swept_rows
    from ingot.report.terminal import print_status, status_rows

    rows = swept_rows(_graphs(recipe, set, out), status_rows)
    emit(rows, as_json, lambda: print_status(rows))


@app.command()
def report(
    recipe: RecipeArg,
    set: SetOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    to: Annotated[Path | None, typer.Option("--to", help="File to write; default: runs/NAME/report.html.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about a run; of a sweep, one that compares its points."""
    from ingot.report.swept import write_any_report

    page = str(write_any_report(_graphs(recipe, set, out), to))
    emit({"report": page}, as_json, lambda: print(page))


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Stages, runs or sweeps: runs/a/base runs/b, or runs/SWEEP.", show_default=False),
    ],
    metric: Annotated[
        str | None, typer.Option(help="The number that differences are taken of, such as bits_per_byte.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="Page to write; default: runs/compare.html.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: final numbers with intervals over seeds, the settings that differ, the curves."""
    from ingot.report.compare.compare import compare as compared
    from ingot.report.compare.page import write_comparison
    from ingot.report.compare.table import data, print_comparison
    from ingot.report.terminal import console

    found = compared(runs, metric)
    page = write_comparison(found, to or found[0].root / "compare.html", " and ".join(map(str, runs)))

    def show() -> None:
        for comparison in found:
            print_comparison(comparison, console())
        print(f"page  {page}")

    emit([data(c) for c in found], as_json, show)


@app.command()
def sink(
    stages: Annotated[
        list[Path], typer.Argument(help="Stages or runs, such as runs/stdlib/base or runs/stdlib.", show_default=False)
    ],
    to: Annotated[str, typer.Option("--to", help="tensorboard, wandb or trackio.")] = "tensorboard",
    as_json: JsonOption = False,
) -> None:
    """Send what stages have logged so far to a dashboard (`sinks` in a recipe's run table does it while they run)."""
    from ingot.report.finding import root_of, show_in

    shown = show_in(to, stages)

    def show() -> None:
        for stage, events in shown.items():
            print(f"{stage}: {events:,} events")
        if to == "tensorboard":
            roots = ",".join(sorted({str(root_of(Path(s)) / "tensorboard") for s in shown}))
            print(f"next: tensorboard --logdir {roots}")

    emit(shown, as_json, show)


@app.command()
def tune(
    recipe: RecipeArg,
    stage: Annotated[str, typer.Option(help="The train stage.")],
    set: SetOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    steps: Annotated[int, typer.Option(help="Timed steps of a candidate.", min=3)] = 30,
    as_json: JsonOption = False,
) -> None:
    """Try ways to compute a train stage on this machine, some steps each; `run` then begins with the fastest."""
    from dataclasses import asdict

    from ingot.pipeline.tune import described
    from ingot.pipeline.tune import tune as tuned
    from ingot.report.terminal import print_rows

    trials, path = tuned(recipe, set, stage, out, steps, _say)
    rows = [
        {
            "tried": described(trial.candidate),
            "a step": f"{trial.step_s * 1e3:,.1f} ms",
            "to the first": f"{trial.start_s:.1f} s",
            "the whole run": f"{trial.total_s:,.0f} s",
        }
        for trial in trials
    ]

    def show() -> None:
        print_rows(rows)
        print(f"wrote {path}; next: ingot run {recipe}")

    emit({"trials": [asdict(t) for t in trials], "execution": str(path)}, as_json, show)


app.command()(generate)
app.command()(chat)


@app.command()
def trace(
    stage: StageArg,
    step: Annotated[int, typer.Option(help="1-based step, past or future.", min=1)] = 1,
    document: Annotated[
        str, typer.Option(help="Instead of a step: a document's file; shows the steps that it is in.")
    ] = "",
    rows: Annotated[int, typer.Option(help="Rows (or documents) shown.", min=1)] = 4,
    as_json: JsonOption = False,
) -> None:
    """Show the documents in the batch of any step, or the steps of any document; past or future."""
    from itertools import islice

    from ingot.report.terminal import print_document_steps, print_trace
    from ingot.stages.training.trace import trace as traced
    from ingot.stages.training.trace import trace_document

    most = None if as_json else rows
    if document:
        found = list(islice(trace_document(stage, document), most))
        emit(found, as_json, lambda: print_document_steps(found))
        return
    batch = islice(traced(stage, step), most)
    data = [{"source": t.source, "row": t.row, "pieces": t.pieces, "ids": t.ids.tolist()} for t in batch]
    emit(data, as_json, lambda: print_trace(data, step))


app.command("import")(import_)
app.command()(export)


@app.command()
def verify(recipe: RecipeArg, set: SetOption = [], out: OutOption = Path("runs"), as_json: JsonOption = False) -> None:  # noqa: B006
    """Check every finished stage's files against their digests."""
    checked, problems = 0, []
    graphs = _graphs(recipe, set, out)
    stages = {node.key: graph.stage(node) for graph in graphs for node in graph.nodes.values()}
    for directory in stages.values():
        if directory.is_done():
            checked += 1
            problems += directory.verify()
    emit(
        {"stages": checked, "problems": problems},
        as_json,
        lambda: print(f"{checked} stages checked, {len(problems)} problems"),
    )
    if problems:
        raise UserError("\n".join([*problems, "delete the damaged stage's directory and run the recipe again"]))


@app.command()
def gc(
    out: OutOption = Path("runs"),
    delete: Annotated[bool, typer.Option("--delete", help="Delete them; without it they are only listed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List results that no run links to any more, such as those of settings that were changed since; --delete removes
    them, trained models too.
    """
    from ingot.pipeline.gc import delete_all, orphans

    found = orphans(out)
    total = sum(o.bytes for o in found)
    data = [{"directory": str(o.path), "bytes": o.bytes, "what": o.what} for o in found]

    def show() -> None:
        for o in found:
            print(f"{o.bytes / 1e6:10.1f} MB  {o.path}  {o.what}")
        print(f"{len(found)} orphans, {total / 1e6:.1f} MB{'' if delete or not found else '; --delete removes them'}")

    emit(data, as_json, show)
    if delete:
        delete_all(found)


def _graphs(recipe: Path, overrides: list[str], out: Path) -> list[Any]:
    from ingot.pipeline.graph import load_graphs

    return load_graphs(recipe, overrides, out)


def _say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def _say_stopped() -> None:
    with contextlib.suppress(OSError):  # the terminal may be what has ended
        print("stopped; the same command goes on from here", file=sys.stderr)


_show_warning_of_python = warnings.showwarning


def _show_warning(message: Any, category: type[Warning], *place: Any) -> None:
    """A `Notice` is one line without its place in the code."""
    if issubclass(category, Notice):
        print(f"note: {message}", file=sys.stderr)
    else:
        _show_warning_of_python(message, category, *place)


def _fail(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)
