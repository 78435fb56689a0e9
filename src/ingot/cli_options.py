"""Options that several commands share, with what they do in a line each: the sampling of `generate` and `chat`."""

from typing import Annotated

import typer

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
BestOption = Annotated[bool, typer.Option("--best", help="The weights with the lowest held-out loss, not the last.")]
