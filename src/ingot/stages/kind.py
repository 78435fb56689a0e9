"""What a stage kind is: its settings, and all that the rest of the product asks about it. No torch.

A new kind is one package beside this file and one line in `KINDS` (`kinds.py`). The defaults make a kind complete: its
inputs are the stages that its settings name, its panel lists the numbers of its result.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingot.core.artifact import FileHashes
from ingot.core.settings import Settings, canonical, stage_fields


@dataclass(frozen=True)
class Node:
    """One stage of a recipe with its inputs and its key."""

    name: str
    kind: str
    settings: Settings
    inputs: dict[str, "Node"] = field(hash=False)
    """Role -> stage, such as `tokenizer` or `data:clean`."""
    seed: int | None
    raw: str | None
    """Digest of inputs that are no stages."""
    key: str
    missing: str | None = None
    """Why its files cannot be read. Where they are gone and the run's link is to a result that is the same otherwise,
    the node has that result's key; else a key over `raw = None`, that no run ever makes."""

    @property
    def directory(self) -> str:
        """Name of the directory below the output root's `stages`."""
        return f"{self.kind}-{self.key}"

    @property
    def canonical(self) -> Any:
        return canonical(self.settings)


class Resolve(Protocol):
    """Turns the names in the settings of one stage into its inputs (`pipeline/resolve.py`).

    `setting` is where the name stands, as errors say it. All raise UserError for a name that is no such stage.
    """

    name: str
    """Of the stage whose inputs are resolved."""
    where: str
    """The stage as errors name it: stage.NAME."""

    def stage(self, name: str, setting: str, *makes: str) -> Node:
        """The stage of that name, which must make one of these."""
        ...

    def model(self, name: str, setting: str) -> Node:
        """A stage that makes a model, or the directory of one made elsewhere as a derived import."""
        ...

    def tokens(self, name: str, tokenizer: Node, setting: str) -> Node:
        """A corpus encoded by that tokenizer, or the tokens stage of that name."""
        ...

    def format_of(self, name: str) -> str:
        """The format of a corpus, or of the corpus behind a tokens stage."""
        ...

    def directory_tokenizer(self, directory: str) -> Node:
        """The tokenizer in a model's directory, as a node of its own."""
        ...

    def settings_of(self, name: str) -> Settings | None:
        """The settings of a stage of the recipe; None where there is none of that name."""
        ...

    def refuse(self, setting: str, problem: str) -> None:
        """Raise a UserError about a setting."""
        ...


def named_inputs(settings: Any, resolve: Resolve) -> dict[str, Node]:
    """The stages that settings name, by field, or by field:NAME where a field names several."""
    inputs: dict[str, Node] = {}
    for name, mark, stages in stage_fields(settings):
        several = not isinstance(getattr(settings, name), str)
        for stage in stages:
            found = resolve.stage(stage, name, *([mark.makes] if mark.makes else []))
            inputs[f"{name}:{stage}" if several else name] = found
    return inputs


def no_facts(settings: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Kind:
    """One kind of stage. Functions are named as `module:function` where they import what a parent process must not."""

    settings: type[Settings]
    version: int
    """Part of every key: raised when the same settings and inputs give another result."""
    builder: str
    """`module:function`, called as function(Job) -> result in the child process."""
    sources: tuple[str, ...]
    """Packages and modules below ingot that determine the result (a test compares them with the version)."""
    makes: str = "numbers"
    """What other stages find in its directory: documents, tokens, tokenizer, model, importance, or numbers alone."""
    reads: Callable[[Any, Resolve], dict[str, Node]] = named_inputs
    """(settings, resolve) -> its inputs by role."""
    facts: Callable[[Any], dict[str, Any]] = no_facts
    """A few settings that tell stages apart in `ingot plan`."""
    seeded: bool = False
    """Whether the run's seed is part of the key."""
    raw: Callable[[Any, FileHashes], str | None] | None = None
    """Digest of inputs that are no stages (files); None where the settings name none."""
    waits: Callable[[Any], str | None] | None = None
    """Why a stage cannot be made before people have done something; None when they have."""
    sleeps_between_loops: Callable[[Any], bool] = lambda settings: False
    """Whether its threads may sleep between parallel loops. That suits long loops such as training's, not sampling."""
    forecast: str = ""
    """function(node, directory of a node, device, ranks) -> figures for `ingot plan`; "" for none."""
    panel: str = "ingot.report.html.panels:scalars"
    """function(stage's directory) -> HTML, for the report."""


def load(name: str) -> Any:
    """The function that `module:function` names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
