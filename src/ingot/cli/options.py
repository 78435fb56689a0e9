"""Arguments and options that several commands have, and output as text or as JSON."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.core.errors import UserError, print_message, printable

RecipeArg = Annotated[Path, typer.Argument(help="The recipe, a TOML file, or a run: runs/NAME.", show_default=False)]
OptionalRecipeArg = Annotated[
    Path | None, typer.Argument(help="The recipe, a TOML file, or a run: runs/NAME.", show_default=False)
]
RunArg = Annotated[
    Path | None,
    typer.Argument(help="A run, runs/NAME, or its recipe; default: the last run.", show_default=False),
]
StageArg = Annotated[Path, typer.Argument(help="A stage's directory, such as runs/stdlib/base.", show_default=False)]
SetOption = Annotated[
    list[str], typer.Option("--set", help="Override a setting: --set stage.base.seed=2", metavar="NAME=VALUE")
]
OutOption = Annotated[Path, typer.Option("--out", help="Output root.")]
OnlyOption = Annotated[list[str], typer.Option("--only", help="Only this stage and what it needs; may be repeated.")]
NprocOption = Annotated[
    int | None,
    typer.Option(
        help="Processes of each train stage on this machine; they share its rows, and with `mesh` its model. Default: "
        "one, or as many as `mesh` names.",
        min=1,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else.")
]
MaxNewOption = Annotated[int, typer.Option(help="Longest text, in tokens.", min=1)]
TemperatureOption = Annotated[
    float,
    typer.Option(
        help="Lower is more predictable, higher more varied; 0: always the most likely token. Usual: 0.6 to 1.", min=0
    ),
]
TopKOption = Annotated[
    int, typer.Option(help="Sample from this many most likely tokens only; 0: from all. Usual: 20 to 50.", min=0)
]
TopPOption = Annotated[
    float,
    typer.Option(
        help="Sample from the smallest set of most likely tokens with this total probability; 1: from all. "
        "Usual: 0.9 to 0.95.",
        min=0,
        max=1,
    ),
]
MinPOption = Annotated[
    float,
    typer.Option(
        help="Drop tokens with less than this fraction of the most likely token's probability; 0: none. Usual: 0.05 to "
        "0.1, which keeps texts of a temperature above 1 readable.",
        min=0,
        max=1,
    ),
]
PenaltyOption = Annotated[
    float,
    typer.Option(
        help="Above 1 makes tokens that the text already contains less likely; 1: no change. Usual: 1.05 to 1.2."
    ),
]
WordsOption = Annotated[
    int, typer.Option(help="Shortest part of a text that is searched for by itself, in words.", min=1)
]
StopOption = Annotated[
    list[str],
    typer.Option("--stop", help="Text that ends an answer, not part of it; may be repeated.", metavar="TEXT"),
]
SeedOption = Annotated[int, typer.Option(help="The same seed gives the same text.")]
BestOption = Annotated[
    bool,
    typer.Option(
        "--best",
        help="Use the best checkpoint (lowest held-out loss; for ppo and grpo highest reward) instead of the last one.",
    ),
]
StepOption = Annotated[
    int | None, typer.Option("--step", help="Use the checkpoint of this step, where it still exists.", min=0)
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="Of matrix multiplications: fp32, or bf16, which is faster on GPUs and on CPUs with bf16 instructions "
        "and may give other texts."
    ),
]


def seconds_of(text: str, option: str) -> float:
    """A time such as 8h, 90m, 1h30m or 45s, in seconds.

    Raises:
        UserError: the text is none.
    """
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text.strip())
    parts = [float(part or 0) for part in match.groups()] if match else []
    seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not seconds:
        raise UserError(f"{option}: found {text!r}, expected a time such as 8h, 90m or 45s")
    return seconds


def last_run_of(out: Path) -> Path:
    """The directory of the last run, which is named on standard error."""
    from ingot.pipeline.runs import last_run

    path = last_run(out)
    print_message(f"last run: {path}")
    return path


def emit(data: Any, as_json: bool, show: Any) -> None:
    """Print `data` as one JSON document, or call `show` to print it as text."""
    if as_json:
        print(printable(json.dumps(_finite(data), indent=1, ensure_ascii=False, allow_nan=False)))
    else:
        show()


def _finite(data: Any) -> Any:
    """The data with None in place of NaN and infinity, which JSON cannot represent."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {name: _finite(value) for name, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data
