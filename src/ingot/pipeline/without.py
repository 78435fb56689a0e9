"""`ingot without`: a recipe in which documents are left out of the training data, and what that makes again.

Only the corpora that have the documents get the setting `without` (`corpus/left_out.py`). Their keys change, and with
them those of the stages that depend on them; all others are reused. A train stage among them goes on from a checkpoint
of the old run where all steps before are the same (`stages/training/earlier_run.py`), which the batches of both say.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ingot.core.errors import UserError
from ingot.core.recipe import dump_toml, read_table
from ingot.corpus.documents import read_documents
from ingot.corpus.left_out import matches, parse
from ingot.pipeline.graph import Graph, load_graphs
from ingot.stages.job import TOKENIZER
from ingot.stages.training.trace import open_training_data, steps_of


class Reader(NamedTuple):
    """A train stage of the old recipe that was started, and the steps whose batch has part of the documents."""

    name: str
    steps: list[int]
    last: int
    """Its last step."""


class LeftOut(NamedTuple):
    """The new recipe, and what depends on the documents."""

    recipe: str
    """TOML."""
    corpora: list[str]
    again: list[str]
    """The stages with a new key."""
    reused: list[str]
    readers: list[Reader]


def without(recipe: Path, names: Sequence[str], run: str, root: Path) -> LeftOut:
    """Leave documents out of a recipe.

    Args:
        recipe: its TOML file.
        names: documents, PATH#OFFSET or PATH.
        run: name of the new run.
        root: output root, with the finished corpora of the recipe.

    Raises:
        UserError: a document is in no finished corpus of the recipe.
    """
    if recipe.is_dir():
        raise UserError(f"{recipe}: is a directory, expected a recipe's TOML file")
    graphs = load_graphs(recipe, [], root)
    _, _, table = read_table(recipe)
    by_corpus = _corpora_of(graphs, names)
    for corpus, found in by_corpus.items():
        settings = table["stage"][corpus]
        settings["without"] = [*dict.fromkeys([*settings.get("without", []), *found])]
    table["run"] = {**table.get("run", {}), "name": run}
    changed = load_graphs(table, [], root)
    keys = {node.key for graph in graphs for node in graph.nodes.values()}
    nodes = {name: node for graph in changed for name, node in graph.nodes.items()}
    again = [name for name, node in nodes.items() if node.key not in keys]
    readers = [reader for graph in graphs for reader in _readers(graph, names) if reader.name in again]
    return LeftOut(dump_toml(table), [*by_corpus], again, [name for name in nodes if name not in again], readers)


def _corpora_of(graphs: Sequence[Graph], names: Sequence[str]) -> dict[str, list[str]]:
    """Corpus stage -> the documents that it has.

    Raises:
        UserError: a document that none has.
    """
    by_corpus: dict[str, list[str]] = {}
    corpora = [node for node in graphs[0].nodes.values() if node.kind == "corpus"]
    done = [node for node in corpora if graphs[0].stage(node).is_done()]
    for node in done:
        batches = [*read_documents(graphs[0].stage(node).path, columns=["path", "offset"])]
        places = {place for b in batches for place in zip(b["path"].to_pylist(), b["offset"].to_pylist(), strict=True)}
        if found := [name for name in names if any(matches(name, *place) for place in places)]:
            by_corpus[node.name] = found
    for name in names:
        if not any(name in found for found in by_corpus.values()):
            where = (
                f"of {', '.join(node.name for node in done)}" if done else "of a finished corpus; run the recipe first"
            )
            raise UserError(f"{name}: found no such document, expected PATH or PATH#OFFSET of a document {where}")
    return by_corpus


def _readers(graph: Graph, names: Sequence[str]) -> list[Reader]:
    readers = []
    for node in graph.nodes.values():
        stage = graph.stage(node).path
        if node.kind == "train" and (stage / TOKENIZER).exists():  # else it has trained on nothing yet
            data, timeline, _ = open_training_data(stage)
            steps: set[int] = set()
            for source in data.train_sources:
                for name in names:
                    for document in source.store.find(parse(name)[0]):
                        identity: dict[str, Any] = source.store.identity(document)
                        if matches(name, identity["path"], identity["offset"]):
                            steps.update(steps_of(data, timeline, data.names.index(source.name), document))
            readers.append(Reader(node.name, sorted(steps), timeline.steps))
    return readers
