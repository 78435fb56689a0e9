"""The commands that use a model: `ingot generate`, `chat`, `import` and `export`."""

import json
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from ingot.cli.options import (
    BestOption,
    JsonOption,
    MaxNewOption,
    MinPOption,
    OutOption,
    PenaltyOption,
    PrecisionOption,
    SeedOption,
    StageArg,
    StepOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    WordsOption,
    emit,
    last_run_of,
)
from ingot.core.errors import UserError, print_message, printable


def generate(
    stage: StageArg,
    prompts: Annotated[list[str], typer.Argument(help="Texts to continue; default: an empty one.")] = [],  # noqa: B006
    file: Annotated[
        Path | None,
        typer.Option("--prompts", help='File of prompts: one a line, or .jsonl of {"prompt": "..."}.', metavar="FILE"),
    ] = None,
    samples: Annotated[int, typer.Option(help="Texts for each prompt.", min=1)] = 1,
    max_new: MaxNewOption = 200,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    stop: StopOption = [],  # noqa: B006
    seed: SeedOption = 0,
    best: BestOption = False,
    step: StepOption = None,
    precision: PrecisionOption = "fp32",
    as_json: JsonOption = False,
    as_jsonl: Annotated[bool, typer.Option("--jsonl", help="Print a line of JSON for each text.")] = False,
    sources: Annotated[
        bool, typer.Option("--sources", help="Mark the parts that are in the training data, and show their places.")
    ] = False,
    words: WordsOption = 5,
) -> None:
    """Continue texts with a trained model. A single text is printed while it is generated."""
    from ingot.cli.chat import load_for_generation, print_record, read_prompts, records, report_truncation, with_sources

    texts = [*prompts, *(read_prompts(file) if file else [])] or [""]
    model = load_for_generation(stage, best, precision, step)
    options: dict[str, Any] = {
        "max_new": max_new,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop,
        "seed": seed,
    }
    if as_json or as_jsonl or sources or len(texts) * samples > 1:
        answers = records(texts, samples, model.complete(texts, samples=samples, **options))
        if sources:
            answers = with_sources(answers, stage, words, all_places=as_json or as_jsonl)
        if as_json:
            return emit(list(answers), True, None)
        for number, record in enumerate(answers, 1):
            if as_jsonl:
                print(printable(json.dumps(record, ensure_ascii=False)), flush=True)
            else:
                print(f"--- {number} of {len(texts) * samples}")
                print_record(record)
                report_truncation(record["stop_reason"], record["tokens"])
    else:
        stream = model.stream(texts[0], **options)
        print(texts[0], end="", flush=True)
        for piece in stream:
            print(piece, end="", flush=True)
        print()
        report_truncation(stream.answer.completion.stop_reason, len(stream.answer.completion.ids))


def chat(
    stage: Annotated[
        Path | None,
        typer.Argument(
            help="A stage's directory, such as runs/stdlib/chat, or a run; default: the last run's model for it.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_new: MaxNewOption = 512,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    stop: StopOption = [],  # noqa: B006
    seed: SeedOption = 0,
    best: BestOption = False,
    step: StepOption = None,
    precision: PrecisionOption = "fp32",
    out: OutOption = Path("runs"),
) -> None:
    """Chat with a model that was trained on conversations. /help lists the commands, Ctrl-D ends."""
    from ingot.cli.chat import Dialogue, chat_stage, load_for_generation, require_conversations

    chosen = chat_stage(stage or last_run_of(out))
    if chosen != stage:
        print_message(f"{chosen}: /help lists the commands, Ctrl-D ends")
    stage = chosen
    require_conversations(stage)
    Dialogue(
        load_for_generation(stage, best, precision, step),
        system,
        max_new,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        seed=seed,
    ).run()


def import_(
    source: Annotated[str, typer.Argument(help="hf:DIR, a model in the Hugging Face layout.", show_default=False)],
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the stage, runs/imported/NAME; default: the directory's.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="Directory of an adapter in PEFT's format to merge into it.", metavar="DIR")
    ] = None,
    out: OutOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Import a model as a stage, for generate, chat, export, and as the start of a recipe.

    A recipe can also import it itself, with init = "hf:DIR".
    """
    from ingot.pipeline.graph import import_graph
    from ingot.pipeline.run import run as run_graph
    from ingot.report.terminal import stage_line
    from ingot.stages.job import read_result

    graph = import_graph(source, out, name, adapter)
    run_graph(graph, [], (lambda *_: None) if as_json else stage_line, quiet=as_json)
    name = list(graph.nodes)[-1]
    directory = graph.home / name
    data = {"directory": str(directory), "result": read_result(directory)}
    emit(data, as_json, lambda: print(f"{directory}: {data['result']['parameters']:,} parameters"))


def export(
    stage: StageArg,
    directory: Annotated[Path, typer.Argument(help="New directory to write.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="hf: the complete model, for transformers; peft: only its adapter; nanogpt, llm.c, megatron or "
            "datatrove: the ids of a token store.",
        ),
    ] = "hf",
    dtype: Annotated[str, typer.Option(help="Number format of the written weights: float32 or bfloat16.")] = "float32",
    best: BestOption = False,
    step: StepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a trained model with its tokenizer for other tools, or only its adapter; or the ids of a token store."""
    from ingot.store.token_formats import TokenFormat

    token_formats = get_args(TokenFormat)
    if to not in ("hf", "peft", *token_formats):
        raise UserError(f"--to: found '{to}', expected hf, peft, {', '.join(token_formats)}")
    if to in token_formats and (best or step is not None or dtype != "float32"):
        raise UserError(
            f"--to {to}: found --best, --step or --dtype, expected none, which are for models; leave it out"
        )
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype: found '{dtype}', expected float32 or bfloat16")
    if to in token_formats:
        from ingot.stages.tokenize.export import export_tokens

        files = export_tokens(stage, directory, cast(TokenFormat, to), print_message)
    else:
        from ingot.stages.models.export import export_hf, export_peft

        files = (export_hf if to == "hf" else export_peft)(stage, directory, dtype, best, print_message, step)
    data = {"directory": str(directory), "files": {f.name: f.stat().st_size for f in files}}
    emit(data, as_json, lambda: print("\n".join(f"{f.stat().st_size:>14,}  {f}" for f in files)))
