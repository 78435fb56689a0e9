"""The command `ingot init`."""

from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.options import seconds_of
from ingot.core.artifact import atomic_write
from ingot.core.errors import UserError


def init(
    target: Annotated[
        Path,
        typer.Argument(
            help="With --text, --chat or --pairs: the recipe to write, NAME.toml. Else the directory for the examples.",
            show_default=False,
        ),
    ],
    text: Annotated[
        str | None, typer.Option("--text", help="Folder, file or glob of text to train on.", metavar="DIR")
    ] = None,
    chat: Annotated[str | None, typer.Option("--chat", help="Conversations to train on.", metavar="FILE")] = None,
    pairs: Annotated[
        str | None, typer.Option("--pairs", help="Pairs of a better and a worse answer, for DPO.", metavar="FILE")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Start from this model, with LoRA: hf:DIR, or runs/NAME/STAGE; default: a new one."
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            "--time", help="With --text: the best model for this time here, which is measured: 8h, 30m.", metavar="TIME"
        ),
    ] = None,
) -> None:
    """Write a recipe for files of your own, or the example recipes to a directory."""
    if time and (chat or pairs or model or not text):
        raise UserError(
            "--time: sizes a new model for a text, expected it with --text alone; leave the other options out"
        )
    if text or chat or pairs or model:
        return _write_recipe(target, text, chat, pairs, model, time)
    from importlib.resources import files

    packaged = (f for f in files("ingot.recipes").iterdir() if f.name.endswith((".toml", ".py")))
    sources = sorted((f for f in packaged if not f.name.startswith("_")), key=lambda f: f.name)
    for source in sources:
        if (path := target / source.name).exists():
            raise UserError(f"{path}: exists already; choose another directory or move it away")
    target.mkdir(parents=True, exist_ok=True)
    for source in sources:
        atomic_write(target / source.name, source.read_text())
        print(f"wrote {target / source.name}")
    print(f"next: ingot plan {target / 'stdlib.toml'}")


def _write_recipe(
    path: Path, text: str | None, chat: str | None, pairs: str | None, model: str | None, time: str | None
) -> None:
    from ingot.pipeline.new_recipe import new_recipe
    from ingot.plan.machine import this_machine

    seconds = seconds_of(time, "--time") if time else None
    atomic_write(path, new_recipe(path, text, chat, pairs, model, this_machine(), seconds))
    print(f"wrote {path}\nnext: ingot run {path}")
