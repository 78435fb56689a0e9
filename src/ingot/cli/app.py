"""The command line. Commands import what they need, so that `--help` is fast and never loads torch."""

import io
import math
import os
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from ingot import __version__
from ingot.cli.init import init
from ingot.cli.inspect import inspect_app
from ingot.cli.models import chat, export, generate, import_
from ingot.cli.options import (
    JsonOption,
    NprocOption,
    OnlyOption,
    OptionalRecipeArg,
    OutOption,
    RecipeArg,
    SetOption,
    StageArg,
    WordsOption,
    emit,
)
from ingot.cli.runs import compare, list_runs, report, status, verify, verify_resume, without
from ingot.cli.scaling import scaling
from ingot.core.errors import StageFailed, UserError, os_error_message, print_message, printable, show_warning
from ingot.core.process import TERMINATION_SIGNALS, handle_termination, open_standard_streams

app = typer.Typer(
    help="From raw text to a trained, aligned language model, from one recipe file.\n\n"
    "Start with: ingot init --text DIR mine.toml; ingot run mine.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(inspect_app, name="inspect")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"ingot {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


_SIGNAL_EXIT_CODES = [128 + number for number in TERMINATION_SIGNALS]


def _terminate(number: int, _: FrameType | None) -> None:
    """End the command in good order. Further termination signals are ignored; Ctrl-C is not."""
    for other in TERMINATION_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    """Entry point. Errors that a user can fix print one message and exit with code 2."""
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters outside the terminal's encoding
    handle_termination(_terminate)
    warnings.showwarning = show_warning
    try:
        _run_command()
    except SystemExit as error:
        if error.code in _SIGNAL_EXIT_CODES:
            _print_stopped()
        raise
    except UserError as error:
        _fail(str(error))
    except StageFailed as error:
        sys.exit(error.code)
    except KeyboardInterrupt:
        _print_stopped()
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)  # the reader of the pipe has closed it
    except Exception as error:
        if (message := os_error_message(error, "standard output or a file")) is None:
            raise
        _fail(message)
    finally:
        _discard_unwritten()


def _run_command() -> None:
    """Run the command, and write what is buffered for standard output while an error still gets a message."""
    try:
        app()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        sys.stdout.flush()
        raise


def _discard_unwritten() -> None:
    """Discard what cannot be written to the standard streams, so that Python's flush at exit does not fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


app.command()(init)


@app.command()
def plan(
    recipe: OptionalRecipeArg = None,
    set: SetOption = [],  # noqa: B006
    only: OnlyOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    nproc: NprocOption = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Plan for this GPU, such as a100.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure some steps of each train stage on this machine first.")
    ] = False,
    price: Annotated[float | None, typer.Option(help="Price of an hour of one device, for the cost.", min=0)] = None,
    stages: Annotated[
        bool, typer.Option("--stages", help="Instead of a recipe: what each stage of a large model costs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what `run` would do: the state of every stage, which setting changed, and the cost of training."""
    from ingot.pipeline.measure import measure_all
    from ingot.pipeline.run import check_meshes, require_files
    from ingot.report.plan import device_of, plan_rows, print_stage_costs, stage_cost_rows
    from ingot.report.sweep import print_any_plan, sweep_rows

    if price is not None and not math.isfinite(price):
        raise UserError(f"found --price {price}, expected a number")
    if stages:
        if recipe or set or only or nproc or gpu or measure:
            raise UserError(
                "found --stages with a recipe or its options, expected at most --price and --json beside it"
            )
        costs = stage_cost_rows(price)
        emit(costs, as_json, lambda: print_stage_costs(costs))
        return
    if recipe is None:
        raise UserError("found no recipe, expected a TOML file or a run, or --stages")
    if measure and gpu:
        raise UserError(f"found --measure with --gpu {gpu}, expected one of them: only this machine can be measured")
    device = device_of(gpu)
    graphs = _graphs(recipe, set, out)
    for graph in graphs:
        check_meshes(graph, only, nproc)
    for graph in graphs if measure else ():
        measure_all(graph, device, nproc, only, print_message)
    rows = sweep_rows(graphs, lambda graph: plan_rows(graph, device, nproc, only, gpu is None, price), only)
    emit(rows, as_json, lambda: print_any_plan(graphs, rows))
    require_files(graphs, only)


@app.command()
def run(
    recipe: RecipeArg,
    set: SetOption = [],  # noqa: B006
    only: OnlyOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    nproc: NprocOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a recipe: stages that are done are reused, interrupted ones resume, changed ones run again."""
    from ingot.pipeline.run import require_files
    from ingot.pipeline.sweep import run_all
    from ingot.report.terminal import Progress
    from ingot.stages.job import read_result

    graphs = _graphs(recipe, set, out)
    require_files(graphs, only)
    progress = Progress(graphs, quiet=as_json)
    try:
        done = run_all(graphs, only, progress.stage, progress.point, quiet=as_json, nproc=nproc)
    finally:  # an unfinished run gets a report too
        from ingot.report.sweep import print_any_end, write_any_report

        page = write_any_report(graphs)
    results = {name: {"directory": str(path), "result": read_result(path)} for name, path in done.items()}
    emit(results, as_json, lambda: print_any_end(graphs, page))


app.command()(scaling)
app.command()(status)
app.command()(report)
app.command()(compare)
app.command("runs")(list_runs)
app.command()(verify)
app.command("verify-resume")(verify_resume)


@app.command()
def sink(
    stages: Annotated[
        list[Path], typer.Argument(help="Stages or runs, such as runs/stdlib/base or runs/stdlib.", show_default=False)
    ],
    to: Annotated[str, typer.Option("--to", help="tensorboard, wandb or trackio.")] = "tensorboard",
    as_json: JsonOption = False,
) -> None:
    """Send the metrics that stages have logged to a dashboard. (`sinks` in the run table sends them during a run.)"""
    from ingot.report.stage_paths import root_of, send_to_dashboard

    event_counts = send_to_dashboard(to, stages)

    def show() -> None:
        for stage, events in event_counts.items():
            print(printable(f"{stage}: {events:,} events"))
        if to == "tensorboard":
            roots = ",".join(sorted({str(root_of(Path(s)) / "tensorboard") for s in event_counts}))
            print(f"next: tensorboard --logdir {roots}")

    emit(event_counts, as_json, show)


@app.command()
def tune(
    recipe: RecipeArg,
    stage: Annotated[str, typer.Option(help="The train stage.")],
    set: SetOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    steps: Annotated[int, typer.Option(help="Most timed steps of a measurement.", min=3)] = 30,
    as_json: JsonOption = False,
) -> None:
    """Measure execution settings of a train stage in a minute; `run` then uses the fastest if it clearly wins."""
    from dataclasses import asdict

    from ingot.pipeline.tune import describe
    from ingot.pipeline.tune import tune as tuned
    from ingot.report.terminal import print_rows

    decision, path = tuned(recipe, set, stage, out, steps, print_message)
    rows = [
        {
            "candidate": describe(trial.candidate),
            "step": f"{trial.step_s * 1e3:,.1f} ms",
            "first step after": f"{trial.start_s:.1f} s",
            "complete run": f"{trial.total_s:,.0f} s",
        }
        for trial in decision.trials
    ]

    def show() -> None:
        print_rows(rows)
        print(decision.reason)
        print(f"wrote {path}; next: ingot run {recipe}" if path else f"next: ingot run {recipe}")

    execution = str(path) if path else None
    emit({**asdict(decision), "execution": execution}, as_json, show)


app.command()(generate)
app.command()(chat)


@app.command()
def trace(
    stage: StageArg,
    step: Annotated[int | None, typer.Option(help="1-based step, past or future; default: 1.", min=1)] = None,
    document: Annotated[
        str | None, typer.Option(help="A document's file: show the steps that contain it, instead of a step's batch.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="A text: show its places in the training data, or those of its longest parts.")
    ] = None,
    words: WordsOption = 5,
    rows: Annotated[
        int | None, typer.Option(help="Rows, documents or places shown; default: 4, with --json all.", min=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the documents in the batch of a step, past or future; or the steps that contain a document or a text."""
    from itertools import islice

    from ingot.report.terminal import print_document_steps, print_trace
    from ingot.stages.training.trace import repair, trace_document
    from ingot.stages.training.trace import trace as traced

    limit = rows or (None if as_json else 4)
    asked = {"--text": text, "--document": document, "--step": step}
    if len(given := [name for name, value in asked.items() if value is not None]) > 1:
        raise UserError(f"{given[0]}: found {given[1]} beside it, expected one of them; leave one out")
    if text is not None:
        from ingot.core.events import Display
        from ingot.report.places import print_found
        from ingot.stages.training.search import TrainingSearch

        found = TrainingSearch(stage, Display(quiet=as_json)).find(text, words, limit)
        return emit(found, as_json, lambda: print_found(found))
    if document is not None:
        documents = list(islice(trace_document(stage, document), limit))
        emit(documents, as_json, lambda: print_document_steps(documents))
        return
    step = step or 1
    batch = islice(traced(stage, step), limit)
    data = [{"source": t.source, "row": t.row, "pieces": t.pieces, "ids": t.ids.tolist()} for t in batch]
    if note := repair(stage, step):
        data = [{**row, "note": note} for row in data]
    emit(data, as_json, lambda: print_trace(data, step, note))


app.command()(without)
app.command("import")(import_)
app.command()(export)


@app.command()
def gc(
    out: OutOption = Path("runs"),
    delete: Annotated[bool, typer.Option("--delete", help="Delete the results; default: only list them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List results that no run links to any more, for example those of earlier settings. --delete removes them,
    including trained models.
    """
    from ingot.pipeline.gc import delete_all, orphans

    unused = orphans(out)
    total = sum(o.bytes for o in unused)
    data = [{"directory": str(o.path), "bytes": o.bytes, "what": o.description} for o in unused]

    def show() -> None:
        for o in unused:
            print(printable(f"{o.bytes / 1e6:10.1f} MB  {o.path}  {o.description}"))
        print(f"{len(unused)} orphans, {total / 1e6:.1f} MB{'' if delete or not unused else '; --delete removes them'}")

    emit(data, as_json, show)
    if delete:
        delete_all(unused)


def _graphs(recipe: Path, overrides: list[str], out: Path) -> list[Any]:
    """The graphs of a recipe as it stands, or of a run's directory as it was recorded."""
    from ingot.pipeline.graph import load_graphs
    from ingot.pipeline.runs import is_run, run_graphs

    return (run_graphs if is_run(recipe) else load_graphs)(recipe, overrides, out)


def _print_stopped() -> None:
    print_message("stopped; the same command resumes from here")


def _fail(message: str) -> None:
    print_message(f"error: {message}")
    sys.exit(2)
