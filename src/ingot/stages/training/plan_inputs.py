"""Collects the inputs of a train stage's forecast before the stage runs. No torch.

The vocabulary comes from the tokenizer's result or settings, the configuration of the initial model from its directory
or settings, and the sizes of corpora from their stores.
"""

from collections.abc import Callable
from typing import Any

from ingot.core.artifact import StageDir
from ingot.core.errors import UserError
from ingot.model.config import ModelConfig
from ingot.plan.machine import Device, cpu
from ingot.stages.job import MODEL, TOKENIZER, Input, in_role, read_config, read_result
from ingot.stages.kind import Node
from ingot.stages.models.imports import read_model_config
from ingot.stages.models.settings import ImportSettings
from ingot.stages.training.costs import costs
from ingot.stages.training.data import Data, open_data
from ingot.stages.training.forecast import ForecastInputs, forecast
from ingot.stages.training.initial_layers import with_initial_layers
from ingot.stages.training.phases import build_timeline, trained_config
from ingot.stages.training.settings import TrainSettings
from ingot.tokenizer.byte_bpe import load_tokenizer
from ingot.tokenizer.settings import MIN_VOCAB, TokenizerSettings

Directory = Callable[[Node], StageDir]
"""Node -> its directory."""


def forecast_of(
    node: Node, directory: Directory, device: Device, ranks: int, here: bool, per_hour: float | None = None
) -> dict[str, Any]:
    """The figures of `forecast` and `costs`, or `unknown` with the reason that they cannot be computed yet.

    Args:
        here: whether the device is this machine's.
        per_hour: price of an hour of a device.
    """
    settings = node.settings
    assert isinstance(settings, TrainSettings)
    try:
        inputs = forecast_inputs(node, directory, device, ranks, here)
        figures = forecast(settings, inputs)
        return figures | costs(settings, inputs, figures, per_hour) if "length" in figures else figures
    except UserError as error:
        return {"unknown": str(error)}


def forecast_inputs(node: Node, directory: Directory, device: Device, ranks: int, here: bool) -> ForecastInputs:
    """What is known about a stage before it runs.

    Raises:
        UserError: its initial model is not known yet.
    """
    settings = node.settings
    assert isinstance(settings, TrainSettings)
    config = _initial_config(node, directory)
    if config is None:
        source = node.inputs.get("init", node.inputs["tokenizer"]).name
        raise UserError(f"its size is known once {source} has run")
    data = _data(node, directory, config)
    return ForecastInputs(
        config,
        cpu() if settings.loop.device == "cpu" and device.is_gpu else device,
        ranks,
        data and data.source_size,
        _isolated(node),
        _companion_parameters(node, directory, config, data),
        data and data.held_out_tokens,
        here,
    )


def _initial_config(node: Node, directory: Directory) -> ModelConfig | None:
    """Configuration of the initial model of a train stage; None if it is not known yet."""
    settings = node.settings
    assert isinstance(settings, TrainSettings)
    if "init" in node.inputs:
        config = _config_of(node.inputs["init"], directory)
        return config and with_initial_layers(config, settings.init_layers)
    vocab = _vocab(node.inputs["tokenizer"], directory)
    assert settings.model
    return settings.model.resolve(vocab) if vocab else None


def _vocab(node: Node, directory: Directory) -> int | None:
    """Vocabulary size of a tokenizer stage.

    Before the stage has run, it is the setting for subword types, and unknown for types whose vocabulary depends on
    the text.
    """
    settings = node.settings
    assert isinstance(settings, TokenizerSettings)
    done = directory(node).is_done()
    trained = read_result(directory(node).path).get("vocab") if done else None
    return trained or (settings.vocab if settings.type in MIN_VOCAB else None)


def _config_of(node: Node, directory: Directory) -> ModelConfig | None:
    """Configuration of the model that a stage makes; None if it is not known yet."""
    stage = directory(node).path
    if (stage / MODEL).exists():
        return read_config(stage)
    if isinstance(node.settings, TrainSettings) and (initial := _initial_config(node, directory)):
        return trained_config(node.settings, initial)
    if isinstance(node.settings, ImportSettings) and not node.missing:
        return read_model_config(node.settings.path)
    return None


def _data(node: Node, directory: Directory, config: ModelConfig) -> Data | None:
    """The corpora; None unless all of them are encoded."""
    assert isinstance(node.settings, TrainSettings)
    stores = in_role(node.inputs, "data")
    if not all(directory(n).is_done() for n in (*stores.values(), node.inputs["tokenizer"])):
        return None
    inputs = {name: Input(n.name, n.key, directory(n).path) for name, n in stores.items()}
    tokenizer = load_tokenizer(directory(node.inputs["tokenizer"]).path / TOKENIZER)
    return open_data(node.settings, inputs, config, tokenizer)


def _companion_parameters(node: Node, directory: Directory, config: ModelConfig, data: Data | None) -> int:
    """Parameters of the companions that steps read. A companion of unknown size counts like the model itself.

    A reference that is the base model of the adapter is not counted, because it is in memory already.
    """
    assert isinstance(node.settings, TrainSettings)
    roles = in_role(node.inputs, "companion")
    if data and node.settings.objective.releases_companions:
        _, all_are = data.complete(build_timeline(node.settings, config, data.source_size))
        if all_are:
            for role in node.settings.objective.companions():
                roles.pop(role, None)
    if node.settings.adapter and roles.get("reference") is node.inputs.get("init"):
        del roles["reference"]
    return sum((_config_of(companion, directory) or config).parameters for companion in roles.values())


def _isolated(node: Node) -> bool:
    """Whether attention is masked between the documents of a row (`PackingSettings.isolates`) for any corpus."""
    assert isinstance(node.settings, TrainSettings)
    encoded = [n.inputs.get("corpus") for role, n in node.inputs.items() if role.startswith("data:")]
    formats = [getattr(corpus.settings, "format", "text") if corpus else "text" for corpus in encoded]
    return any(map(node.settings.packing.isolates, formats))
