"""The commands that read runs: `ingot status`, `report`, `compare`, `runs` and `verify`. They write only pages."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.cli.options import JsonOption, OutOption, RecipeArg, RunArg, SetOption, emit, last_run_of
from ingot.core.errors import UserError, print_message


def status(
    recipe: RunArg = None,
    set: SetOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Show the progress of a run: state, last step, loss, speed."""
    from ingot.report.sweep import sweep_rows
    from ingot.report.terminal import print_status, status_rows

    rows = sweep_rows(_run_graphs(recipe, set, out), status_rows)
    emit(rows, as_json, lambda: print_status(rows))


def report(
    recipe: RunArg = None,
    set: SetOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    to: Annotated[Path | None, typer.Option("--to", help="File to write; default: runs/NAME/report.html.")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page on this machine; it updates itself while a run goes on.")
    ] = False,
    port: Annotated[int, typer.Option("--port", help="Port of --live; 0: any free one.", min=0, max=65535)] = 8765,
    as_json: JsonOption = False,
) -> None:
    """Write a self-contained HTML page about a run, or one that compares the points of a sweep."""
    from ingot.report.sweep import write_any_report

    if live and (to or as_json):
        raise UserError("--live serves the page instead of writing it; leave out --to and --json")
    to = to and to.absolute()  # the run may have been started in another directory
    graphs = _run_graphs(recipe, set, out)
    if live:
        return _serve(graphs, port)
    page = str(write_any_report(graphs, to))
    emit({"report": page}, as_json, lambda: print(page))


def without(
    documents: Annotated[
        list[str],
        typer.Argument(
            help="PATH#OFFSET of documents, as trace shows them, or PATH for all of a file.", show_default=False
        ),
    ],
    recipe: RecipeArg,
    to: Annotated[
        Path | None, typer.Option("--to", help="Recipe to write; default: NAME-without.toml beside the recipe.")
    ] = None,
    out: OutOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Write a recipe that leaves documents out of the training data, and show what it makes again."""
    from ingot.core.artifact import atomic_write
    from ingot.pipeline.without import without as left_out

    path = to or recipe.with_name(f"{recipe.stem}-without.toml")
    if path.exists():
        raise UserError(f"{path}: exists already; choose another name with --to")
    result = left_out(recipe, documents, path.stem, out)
    atomic_write(path, result.recipe)

    def show() -> None:
        for corpus, names in result.corpora.items():
            print(f"{corpus}: without {', '.join(names)}")
        if result.unsearched:
            print(f"{', '.join(result.unsearched)}: not searched for the documents, because it has not run")
        for reader in result.readers:
            first = (
                f"first trained on them at step {reader.steps[0]:,}" if reader.steps else "trained on them in no step"
            )
            print(f"{reader.name}: {first} of {reader.last:,}")
        print(f"made again: {', '.join(result.again)}; reused: {', '.join(result.reused) or 'nothing'}")
        print("a train stage goes on from its newest checkpoint before the first step that differs, or says why not")
        print(f"wrote {path}\nnext: ingot run {path}")

    readers = [reader._asdict() for reader in result.readers]
    emit({**result._asdict(), "recipe": str(path), "readers": readers}, as_json, show)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Stages, runs or sweeps: runs/a/base runs/b, or runs/SWEEP; default: the stages of the last run.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    metric: Annotated[
        str | None, typer.Option(help="The metric to compute differences of, such as bits_per_byte.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="Page to write; default: runs/compare.html.")] = None,
    out: OutOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Compare runs: final metrics with intervals over seeds, the settings that differ, the curves."""
    from ingot.report.compare.compare import compare as compared
    from ingot.report.compare.page import write_comparison
    from ingot.report.compare.table import data, print_comparison
    from ingot.report.terminal import console

    runs = runs or [last_run_of(out)]
    comparisons = compared(runs, metric)
    page = write_comparison(comparisons, to or comparisons[0].root / "compare.html", " and ".join(map(str, runs)))

    def show() -> None:
        for comparison in comparisons:
            print_comparison(comparison, console())
        print(f"page  {page}")

    emit([data(c) for c in comparisons], as_json, show)


def list_runs(out: OutOption = Path("runs"), as_json: JsonOption = False) -> None:
    """List the runs, the newest first: when, state, stages done, and the verdict of the last training."""
    from ingot.report.runs import print_runs, run_rows

    rows = run_rows(out)
    emit(rows, as_json, lambda: print_runs(rows, out))


def verify(
    recipe: RunArg = None,
    set: SetOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Check the files of every stage that is done against their digests, and those of its search indexes."""
    from ingot.store.search import index_problems

    checked, problems, indexes = 0, [], []
    graphs = _run_graphs(recipe, set, out)
    stages = {node.key: graph.stage(node) for graph in graphs for node in graph.nodes.values()}
    for directory in stages.values():
        if directory.is_done():
            checked += 1
            problems += directory.verify()
            indexes += index_problems(directory.path)
    emit(
        {"stages": checked, "problems": problems + indexes},
        as_json,
        lambda: print(f"{checked} stages checked, {len(problems + indexes)} problems"),
    )
    if problems:
        problems.append("delete the damaged stage's directory and run the recipe again")
    if problems or indexes:
        raise UserError("\n".join(problems + indexes))


def verify_resume(
    recipe: RecipeArg,
    stage: Annotated[str, typer.Option(help="The train stage.")],
    set: SetOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    steps: Annotated[int, typer.Option(help="Steps of both runs.", min=2)] = 50,
    kills: Annotated[int, typer.Option(help="How often the second run is killed.", min=1)] = 3,
    as_json: JsonOption = False,
) -> None:
    """Run the first steps of a train stage twice, once killed at random, and compare the checkpoints to the bit."""
    from dataclasses import asdict

    from ingot.pipeline.verify_resume import verify_resume as verified

    verdict = verified(_run_graphs(recipe, set, out)[0], stage, steps, kills, print_message)
    resumed = ", ".join(f"{step:,}" for step in verdict.resumed_from)

    def show() -> None:
        equal = f"{verdict.tensors:,} tensors ({verdict.bytes:,} bytes) and the state are equal to the bit"
        found = f"these differ: {', '.join(verdict.differences)}" if verdict.differences else equal
        print(f"{stage}: killed {kills:,} times, resumed after step {resumed}; after step {verdict.steps:,} {found}")

    emit(asdict(verdict), as_json, show)
    if verdict.differences:
        raise UserError(
            f"{stage}: the killed run differs from the undisturbed one; a GPU may add in any order, on a CPU "
            "this is a fault to report"
        )


def _run_graphs(recipe: Path | None, overrides: list[str], out: Path) -> list[Any]:
    """The graphs of a run, by its directory or its recipe; by default of the last run."""
    from ingot.pipeline.runs import run_graphs

    return run_graphs(recipe or last_run_of(out), overrides, out)


def _serve(graphs: list[Any], port: int) -> None:
    from ingot.report.live import live_server

    with live_server(graphs, port) as server:
        print(f"open http://{server.server_name}:{server.server_port}/ (Ctrl-C ends)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
