"""The interface of a stage kind: its settings, its inputs, its builder, and its parts of plans and reports. No torch.

A new kind is one package beside this file and one line in `KINDS` (`kinds.py`). By default a kind's inputs are the
stages that its settings name, and its panel lists the metrics of its result.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingot.core.file_hashes import FileHashes
from ingot.core.settings import Settings, canonical, stage_fields


@dataclass(frozen=True)
class Node:
    """A stage of a recipe with its inputs and its key."""

    name: str
    kind: str
    settings: Settings
    inputs: dict[str, "Node"] = field(hash=False)
    """Role -> stage, such as `tokenizer` or `data:clean`."""
    seed: int | None
    raw: str | None
    """Digest of raw inputs: files that are not stages."""
    key: str
    missing: str | None = None
    """Error message where its raw files cannot be read, else None. If the run links to a result of the same settings,
    the node has the key of that result; otherwise a key with `raw = None`, which never exists on disk."""
    files: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Digest of each raw file, by path."""

    @property
    def directory(self) -> str:
        """Name of the directory below the output root's `stages`."""
        return f"{self.kind}-{self.key}"

    @property
    def canonical(self) -> Any:
        return canonical(self.settings)


class Resolve(Protocol):
    """Resolves the stage names in the settings of one stage (`pipeline/resolve.py`).

    The argument `setting` is the setting with the name, for errors. The methods that return a node raise UserError for
    a name that refers to no suitable stage.
    """

    name: str
    """Name of the stage whose inputs are resolved."""
    where: str
    """The stage in errors: stage.NAME."""

    def stage(self, name: str, setting: str, *makes: str) -> Node:
        """The stage of that name, whose output must be one of `makes` (any if empty)."""
        ...

    def model(self, name: str, setting: str) -> Node:
        """A stage that makes a model, or a derived import of a model's directory."""
        ...

    def tokens(self, name: str, tokenizer: Node, setting: str) -> Node:
        """The corpus of that name, encoded with the tokenizer, or the tokens stage of that name."""
        ...

    def format_of(self, name: str) -> str:
        """The format of a corpus, or of the corpus behind a tokens stage."""
        ...

    def directory_tokenizer(self, settings: Any) -> Node:
        """A derived stage with the tokenizer of an import (`ImportSettings`)."""
        ...

    def settings_of(self, name: str) -> Settings | None:
        """The settings of a stage of the recipe; None if there is no such stage."""
        ...

    def refuse(self, setting: str, problem: str) -> None:
        """Raise a UserError about a setting."""
        ...


def named_inputs(settings: Any, resolve: Resolve) -> dict[str, Node]:
    """The stages that settings name, by role: FIELD, or FIELD:NAME where a field names several."""
    inputs: dict[str, Node] = {}
    for name, mark, stages in stage_fields(settings):
        several = not isinstance(getattr(settings, name), str)
        for stage in stages:
            node = resolve.stage(stage, name, *([mark.makes] if mark.makes else []))
            inputs[f"{name}:{stage}" if several else name] = node
    return inputs


@dataclass(frozen=True)
class Kind:
    """A stage kind.

    Functions that import torch are given as strings `module:function`, because the parent process must not load it.
    """

    settings: type[Settings]
    version: int
    """Part of the key; increased when the same settings and inputs give another result."""
    builder: str
    """`module:function`: function(Job) -> result, called in the child process."""
    sources: tuple[str, ...]
    """Packages and modules of ingot that determine the result. A test asks for a new version when they change."""
    makes: str = "numbers"
    """Output that other stages read: documents, tokens, tokenizer, model or importance; "numbers": metrics only."""
    reads: Callable[[Any, Resolve], dict[str, Node]] = named_inputs
    """(settings, resolve) -> inputs by role."""
    facts: Callable[[Any], dict[str, Any]] = lambda settings: {}
    """The settings that `ingot plan` shows."""
    evaluates: Callable[[Any], list[str]] = lambda settings: []
    """(settings) -> files with items that models are evaluated on."""
    keep_out: Callable[[Any, list[str]], Any] = lambda settings, files: settings
    """(settings, files that the recipe evaluates) -> settings under which the stage's result contains none of them."""
    seeded: bool = False
    """Whether the run's seed is part of the key."""
    raw: Callable[[Any, FileHashes], str | None] | None = None
    """(settings, hashes) -> digest of files that the stage reads; None where the settings name no file."""
    waiting_for: Callable[[Any], str | None] | None = None
    """(settings) -> the human input that the stage needs before it can run; None when it is complete."""
    short_spin: Callable[[Any], bool] = lambda settings: False
    """(settings) -> whether waiting threads sleep soon (`core/process.py: SHORT_SPIN`). Training benefits, because its
    parallel loops are long; sampling becomes slower."""
    forecast: str = ""
    """`module:function`: function(node, directory of a node, device, ranks) -> figures for `ingot plan`; "": none."""
    panel: str = "ingot.report.html.panels:scalars"
    """`module:function`: function(stage's directory) -> HTML for the report."""


def load(name: str) -> Any:
    """Import the function that `module:function` names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
