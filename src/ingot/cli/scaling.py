"""The command `ingot scaling`."""

import math
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.options import JsonOption, OutOption, RecipeArg, SetOption, emit, seconds_of
from ingot.core.errors import UserError


def scaling(
    recipe: RecipeArg,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Name the best model for these FLOPs, or this time here: 1e17, 8h, 30m."),
    ] = None,
    served: Annotated[
        float | None,
        typer.Option("--served", help="Tokens that it will read and write: also the cheapest model in all.", min=1),
    ] = None,
    stage: Annotated[str | None, typer.Option(help="The train stage, if the sweep varies several.")] = None,
    set: SetOption = [],  # noqa: B006
    out: OutOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Train the series of a sweep, fit L(N, D) to it, and name the best model and length for a budget."""
    from ingot.pipeline.graph import load_graphs
    from ingot.pipeline.run import require_files
    from ingot.pipeline.runs import is_run, run_graphs
    from ingot.pipeline.sweep import run_all
    from ingot.report import scaling as law
    from ingot.report.sweep import write_any_report
    from ingot.report.terminal import Progress

    flops, seconds = _budget(budget)
    if served is not None and not math.isfinite(served):
        raise UserError(f"--served: found {served}, expected a number of tokens, such as 1e12")
    if served and not budget:
        raise UserError(
            "--served: found no --budget, which sets the loss that is aimed at; add for example --budget 2h"
        )
    graphs = (run_graphs if is_run(recipe) else load_graphs)(recipe, set, out)
    law.series(graphs, stage)
    require_files(graphs, [])
    progress = Progress(graphs, quiet=as_json)
    try:
        run_all(graphs, [], progress.stage, progress.point, quiet=as_json)
    finally:
        page = write_any_report(graphs)
    found = law.scaling_of(graphs, stage)
    if not as_json:  # at once: the answer may be refused, and the law was not
        for line in law.sentences(found):
            print(line)
    answer = law.answer(found, flops, seconds, served) if budget else None

    def show() -> None:
        if answer:
            for line in law.answer_lines(found, answer):
                print(line)
        print(f"report  {page}")

    emit({**law.data(found, answer), "report": str(page)}, as_json, show)


def _budget(text: str | None) -> tuple[float | None, float | None]:
    """FLOPs, or seconds."""
    if text is None:
        return None, None
    try:
        flops = float(text)
    except ValueError:
        return None, seconds_of(text, "--budget")
    if not 1e6 <= flops <= 1e30:
        raise UserError(f"--budget: found {text}, expected FLOPs such as 1e17 (1e6 to 1e30), or a time such as 8h")
    return flops, None
