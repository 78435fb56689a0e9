"""`ingot inspect`: the commands that look inside what a stage made."""

from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.options import JsonOption, StageArg, emit

inspect_app = typer.Typer(help="Look inside what a stage made.", no_args_is_help=True)


@inspect_app.command("corpus")
def inspect_corpus(stage: StageArg, as_json: JsonOption = False) -> None:
    """The funnel of a corpus stage: what came in, what was removed and why, with samples."""
    from ingot.report.inspect.inspect import corpus, print_corpus

    data = corpus(stage)
    emit(data, as_json, lambda: print_corpus(data))


@inspect_app.command("mask")
def inspect_mask(
    stage: Annotated[
        Path,
        typer.Argument(
            help="A tokens or corpus stage, such as runs/stdlib/questions, or a train stage: then as its rows hold it.",
            show_default=False,
        ),
    ],
    rows: Annotated[int, typer.Option(help="Documents shown of each store; of pairs, pairs.", min=1)] = 3,
    as_json: JsonOption = False,
) -> None:
    """What is trained on, token by token, in colour."""
    from ingot.report.inspect.mask import mask, print_mask

    data = mask(stage, rows)
    emit(data, as_json, lambda: print_mask(data))


@inspect_app.command("store")
def inspect_store(stage: StageArg, as_json: JsonOption = False) -> None:
    """A token store's manifest, columns and first document."""
    from ingot.report.inspect.inspect import print_store, store

    data = store(stage)
    emit(data, as_json, lambda: print_store(data))


@inspect_app.command("tokenizer")
def inspect_tokenizer(
    stage: Annotated[
        Path | None, typer.Argument(help="A stage with a tokenizer, such as runs/stdlib/bpe.", show_default=False)
    ] = None,
    text: Annotated[str, typer.Option(help="Show how this text is cut; merged with --steps.")] = "",
    steps: Annotated[bool, typer.Option("--steps", help="Merge step by step, with every reason.")] = False,
    tradeoff: Annotated[bool, typer.Option("--tradeoff", help="What a vocabulary costs and what it saves.")] = False,
    width: Annotated[int, typer.Option(help="Width of the model that --tradeoff reckons with.", min=1)] = 4096,
    layers: Annotated[int, typer.Option(help="Its layers.", min=1)] = 32,
    as_json: JsonOption = False,
) -> None:
    """A vocabulary: its report, how it cuts a text, how merging goes, what its size costs a model."""
    from ingot.report.inspect.tokenizer import print_tokenizer, tokenizer

    data = tokenizer(stage, text, steps, tradeoff, width, layers)
    emit(data, as_json, lambda: print_tokenizer(data))


@inspect_app.command("checkpoint")
def inspect_checkpoint(stage: StageArg, as_json: JsonOption = False) -> None:
    """A train stage's checkpoints: steps, state, tensors, whether their digests hold."""
    from ingot.report.inspect.inspect import checkpoints, print_checkpoints

    data = checkpoints(stage)
    emit(data, as_json, lambda: print_checkpoints(data))
