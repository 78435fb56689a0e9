"""What `ingot plan` knows of a train stage's inputs before it runs. No torch.

The vocabulary is known from the tokenizer's result or its settings, the shape of a model to start from by its
directory, the sizes of corpora once they are encoded.
"""

from collections.abc import Callable
from typing import Any

from ingot.core.artifact import StageDir
from ingot.core.errors import UserError
from ingot.model.config import ModelConfig
from ingot.plan.machine import Device, cpu
from ingot.stages.job import MODEL, TOKENIZER, Input, in_role, read_config, read_result
from ingot.stages.kind import Node
from ingot.stages.models.imports import read_shape
from ingot.stages.models.settings import ImportSettings
from ingot.stages.training.data import open_data
from ingot.stages.training.forecast import ForecastInputs, forecast
from ingot.stages.training.phases import longest
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import SourceSizes
from ingot.tokenizer.byte_bpe import load_tokenizer
from ingot.tokenizer.settings import SMALLEST_VOCAB, TokenizerSettings

Directory = Callable[[Node], StageDir]


def forecast_of(node: Node, directory: Directory, device: Device, ranks: int) -> dict[str, Any]:
    """All figures of `forecast`, or why they are not known yet."""
    settings = node.settings
    assert isinstance(settings, TrainSettings)
    if settings.loop.device == "cpu" and device.is_gpu:
        device = cpu()
    try:
        config = _start(node, directory)
        if config is None:
            made_by = node.inputs.get("init", node.inputs["tokenizer"]).name
            return {"unknown": f"its size is known once {made_by} has run"}
        sizes = _sizes(node, directory, config)
        return forecast(
            settings, ForecastInputs(config, device, ranks, sizes, _isolated(node), _frozen(node, directory, config))
        )
    except UserError as error:
        return {"unknown": str(error)}


def _start(node: Node, directory: Directory) -> ModelConfig | None:
    """The shape that a train stage begins with, at the context of phases that set none."""
    settings = node.settings
    assert isinstance(settings, TrainSettings)
    if "init" in node.inputs:
        return _trained(node.inputs["init"], directory)
    vocab = _vocab(node.inputs["tokenizer"], directory)
    assert settings.model
    return settings.model.resolve(vocab) if vocab else None


def _vocab(node: Node, directory: Directory) -> int | None:
    """Ids of a tokenizer that was made, or will be: subword types end at what is set, others at what their text has."""
    settings = node.settings
    assert isinstance(settings, TokenizerSettings)
    done = directory(node).is_done()
    made = read_result(directory(node).path).get("vocab") if done else None
    return made or (settings.vocab if settings.type in SMALLEST_VOCAB else None)


def _trained(node: Node, directory: Directory) -> ModelConfig | None:
    """The shape of the model that a stage leaves behind."""
    stage = directory(node).path
    if (stage / MODEL).exists():
        return read_config(stage)
    if isinstance(node.settings, TrainSettings) and (start := _start(node, directory)):
        return longest(node.settings, start)
    if isinstance(node.settings, ImportSettings) and not node.missing:
        return read_shape(node.settings.path)
    return None


def _sizes(node: Node, directory: Directory, config: ModelConfig) -> SourceSizes | None:
    """BatchSizes of the corpora, where all of them are encoded."""
    assert isinstance(node.settings, TrainSettings)
    stores = in_role(node.inputs, "data")
    if not all(directory(n).is_done() for n in (*stores.values(), node.inputs["tokenizer"])):
        return None
    inputs = {name: Input(n.name, n.key, directory(n).path) for name, n in stores.items()}
    tokenizer = load_tokenizer(directory(node.inputs["tokenizer"]).path / TOKENIZER)
    return open_data(node.settings, inputs, config, tokenizer).source_size


def _frozen(node: Node, directory: Directory, config: ModelConfig) -> int:
    """Parameters of the models that are loaded beside it, each for its role; of a size that is not known yet, its own.

    What an adapter lies on is its reference too, and in memory already.
    """
    assert isinstance(node.settings, TrainSettings)
    roles = in_role(node.inputs, "companion")
    if node.settings.adapter and roles.get("reference") is node.inputs.get("init"):
        del roles["reference"]
    return sum((_trained(companion, directory) or config).parameters for companion in roles.values())


def _isolated(node: Node) -> bool:
    """Whether rows hold documents that do not see each other: as set, else where conversations are packed whole. Pairs
    and prompts have a row each."""
    assert isinstance(node.settings, TrainSettings)
    corpora = [n.inputs["corpus"].settings for role, n in node.inputs.items() if role.startswith("data:")]
    return any(node.settings.packing.isolates(getattr(corpus, "format", "text")) for corpus in corpora)
