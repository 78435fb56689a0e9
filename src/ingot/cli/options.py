"""What commands share: arguments and options with a line of help each, and printing as words or as JSON."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

RecipeArg = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", show_default=False)]
StageArg = Annotated[Path, typer.Argument(help="A stage's directory, such as runs/stdlib/base.", show_default=False)]
SetOption = Annotated[
    list[str], typer.Option("--set", help="Override a setting: --set stage.base.seed=2", metavar="NAME=VALUE")
]
OutOption = Annotated[Path, typer.Option("--out", help="Output root.")]
OnlyOption = Annotated[list[str], typer.Option("--only", help="Only this stage and what it needs; may be repeated.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else.")
]
MaxNewOption = Annotated[int, typer.Option(help="Longest text, in tokens.", min=1)]
TemperatureOption = Annotated[
    float,
    typer.Option(
        help="Below 1 plays safe, above 1 wanders, 0 takes the likeliest token each time. Usual: 0.6 to 1.", min=0
    ),
]
TopKOption = Annotated[
    int, typer.Option(help="Draw from this many likeliest tokens only; 0: from all. Usual: 20 to 50.", min=0)
]
TopPOption = Annotated[
    float,
    typer.Option(
        help="Draw from the fewest likeliest tokens that hold this probability; 1: from all. Usual: 0.9 to 0.95.",
        min=0,
        max=1,
    ),
]
MinPOption = Annotated[
    float,
    typer.Option(
        help="Drop tokens less likely than this share of the likeliest; 0: none. Usual: 0.05 to 0.1, which lets a "
        "temperature above 1 stay readable.",
        min=0,
        max=1,
    ),
]
PenaltyOption = Annotated[
    float,
    typer.Option(
        help="Above 1 makes tokens that the text holds already less likely; 1: no change. Usual: 1.05 to 1.2."
    ),
]
StopOption = Annotated[
    list[str], typer.Option("--stop", help="Text that ends an answer and is cut off; may be repeated.", metavar="TEXT")
]
SeedOption = Annotated[int, typer.Option(help="The same seed gives the same text.")]
BestOption = Annotated[
    bool,
    typer.Option(
        "--best",
        help="The best weights, not the last: of the lowest held-out loss, of ppo and grpo of the highest reward.",
    ),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="Of the matrix products: fp32, or bf16, which is faster on CPUs with bf16 instructions and on GPUs and "
        "may choose other words."
    ),
]


def emit(data: Any, as_json: bool, show: Any) -> None:
    """Print `data` as one JSON document, or call `show` to print it for people."""
    if as_json:
        print(json.dumps(_finite(data), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        show()


def _finite(data: Any) -> Any:
    """The same with null for what is no number, which JSON has no word for."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {name: _finite(value) for name, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data
