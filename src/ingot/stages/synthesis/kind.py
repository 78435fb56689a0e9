"""The kinds that create data with models: `generate` and `label`."""

from typing import Any

from ingot.core.artifact import digest_json
from ingot.core.file_hashes import FileHashes
from ingot.core.functions import function_files, is_function
from ingot.stages.kind import Kind, Node, Resolve
from ingot.stages.models.kind import LOADING_SOURCES, MODEL_SOURCES
from ingot.stages.synthesis import human_labels
from ingot.stages.synthesis.settings import GenerateSettings, LabelSettings
from ingot.stages.tokenize.kind import check_turns
from ingot.stages.training.kind import check_format, companion


def _generate_reads(settings: GenerateSettings, resolve: Resolve) -> dict[str, Node]:
    prompts = resolve.stage(settings.data, "data", "documents")
    check_format(settings.data, ("prompts",), "data", "a generate stage answers", resolve)
    if settings.model is None:
        return {"data": prompts}
    model = resolve.model(settings.model, "model")
    check_turns(settings.data, resolve.format_of(settings.data), model.inputs["tokenizer"], "model", resolve)
    return {"model": model, "tokenizer": model.inputs["tokenizer"], "data": prompts}


def _generate_facts(settings: GenerateSettings) -> dict[str, Any]:
    calls = settings.endpoint and f"calls {settings.endpoint.url} ({settings.endpoint.model})"
    model = {"calls": calls} if calls else {"model": settings.model}
    return {**model, "data": settings.data, "samples": settings.samples}


def _generate_waiting_for(settings: GenerateSettings) -> str | None:
    return settings.endpoint.missing_key() if settings.endpoint else None


GENERATE = Kind(
    GenerateSettings,
    5,
    "ingot.stages.synthesis.generate:run",
    (
        *MODEL_SOURCES,
        *("distributed", "data/sampler.py", *LOADING_SOURCES),
        *(f"stages/synthesis/{name}.py" for name in ("generate", "instructions", "local_model")),
        *(f"stages/synthesis/{name}.py" for name in ("endpoint", "remote_model")),
        *("corpus/dedup.py", "corpus/readers/messages.py", "corpus/readers/row_formats.py"),
    ),
    makes="documents",
    reads=_generate_reads,
    facts=_generate_facts,
    seeded=True,
    waiting_for=_generate_waiting_for,
)


def _label_reads(settings: LabelSettings, resolve: Resolve) -> dict[str, Node]:
    samples = resolve.stage(settings.data, "data", "documents")
    if samples.kind != "generate":
        resolve.refuse("data", f"stage '{settings.data}' is a {samples.kind}, expected a generate")
    check_format(settings.data, ("chat",), "data", "a label stage compares answers of format", resolve)
    inputs, tokenizer = {"samples": samples}, samples.inputs.get("tokenizer")
    if settings.reward:  # answers of an endpoint belong to no tokenizer
        tokenizer = tokenizer or resolve.model(settings.reward, "by").inputs["tokenizer"]
        inputs["reward"] = companion("reward", settings.reward, tokenizer, "by", resolve, scores=True)
    return inputs | ({"tokenizer": tokenizer} if tokenizer else {})


def _label_digest(settings: LabelSettings, hashes: FileHashes) -> str | None:
    """Digest of the files of the scoring function, or of the file of human labels."""
    if settings.label_file:
        return human_labels.digest(settings.label_file, hashes)
    if not is_function(settings.by):
        return None
    return digest_json([hashes.digest(file) for file in function_files(settings.by, "by")])


def _label_waiting_for(settings: LabelSettings) -> str | None:
    return human_labels.waiting_for(settings.label_file) if settings.label_file else None


def _label_facts(settings: LabelSettings) -> dict[str, Any]:
    return {"data": settings.data, "by": settings.by, "format": settings.format}


LABEL = Kind(
    LabelSettings,
    7,
    "ingot.stages.synthesis.label:run",
    (
        *MODEL_SOURCES,
        *("distributed", "objectives"),
        *LOADING_SOURCES,
        *("stages/models/reward_scores.py", "corpus/readers/messages.py", "corpus/readers/row_formats.py"),
        *(f"stages/synthesis/{name}.py" for name in ("label", "human_labels", "majority")),
    ),
    makes="documents",
    reads=_label_reads,
    facts=_label_facts,
    raw=_label_digest,
    waiting_for=_label_waiting_for,
)
