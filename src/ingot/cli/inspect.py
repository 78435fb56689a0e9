"""`ingot inspect`: commands that show the contents of a stage's directory."""

from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.options import JsonOption, StageArg, emit

inspect_app = typer.Typer(help="Show the contents of a stage's directory.", no_args_is_help=True)


@inspect_app.command("corpus")
def inspect_corpus(stage: StageArg, as_json: JsonOption = False) -> None:
    """Show a corpus stage: how many documents were read, and which were removed for which reason, with samples."""
    from ingot.report.inspect.inspect import corpus, print_corpus

    data = corpus(stage)
    emit(data, as_json, lambda: print_corpus(data))


@inspect_app.command("mask")
def inspect_mask(
    stage: Annotated[
        Path,
        typer.Argument(
            help="A tokens or corpus stage, such as runs/stdlib/questions, or a train stage, which shows packed rows.",
            show_default=False,
        ),
    ],
    rows: Annotated[int, typer.Option(help="Documents (or pairs) shown of each store.", min=1)] = 3,
    as_json: JsonOption = False,
) -> None:
    """Show which tokens are training targets, in colour."""
    from ingot.report.inspect.mask import mask, print_mask

    data = mask(stage, rows)
    emit(data, as_json, lambda: print_mask(data))


@inspect_app.command("store")
def inspect_store(stage: StageArg, as_json: JsonOption = False) -> None:
    """Show a token store's manifest, columns and first document."""
    from ingot.report.inspect.inspect import print_store, store

    data = store(stage)
    emit(data, as_json, lambda: print_store(data))


@inspect_app.command("tokenizer")
def inspect_tokenizer(
    stage: Annotated[
        Path | None, typer.Argument(help="A stage with a tokenizer, such as runs/stdlib/bpe.", show_default=False)
    ] = None,
    text: Annotated[
        str, typer.Option(help="Show the tokens of this text; with --steps, the merges that lead to them.")
    ] = "",
    steps: Annotated[
        bool,
        typer.Option(
            "--steps",
            help="Show the merges of the stage's tokenizer on a text; without a stage, how a BPE learns them.",
        ),
    ] = False,
    tradeoff: Annotated[bool, typer.Option("--tradeoff", help="Show cost and benefit by vocabulary size.")] = False,
    width: Annotated[int, typer.Option(help="Model width for --tradeoff.", min=1)] = 4096,
    layers: Annotated[int, typer.Option(help="Model layers for --tradeoff.", min=1)] = 32,
    as_json: JsonOption = False,
) -> None:
    """Show a tokenizer: its report, the tokens of a text, its merges, and the cost of its vocabulary size."""
    from ingot.report.inspect.tokenizer import print_tokenizer, tokenizer

    data = tokenizer(stage, text, steps, tradeoff, width, layers)
    emit(data, as_json, lambda: print_tokenizer(data))


@inspect_app.command("checkpoint")
def inspect_checkpoint(stage: StageArg, as_json: JsonOption = False) -> None:
    """Show a train stage's checkpoints: steps, state, tensors, and whether their digests match."""
    from ingot.report.inspect.inspect import checkpoints, print_checkpoints

    data = checkpoints(stage)
    emit(data, as_json, lambda: print_checkpoints(data))
