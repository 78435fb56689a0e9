"""`ingot without`: a recipe in which documents are left out of the training data, and what that makes again.

Only the corpora that have the documents or copies of them get the setting `without` (`corpus/left_out.py`). Their keys
change, and with them those of the stages that depend on them; all others are reused. A train stage among them goes on
from a checkpoint of the old run where all steps before are the same (`stages/training/earlier_run.py`), which the
batches of both say.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ingot.core.errors import UserError
from ingot.core.recipe import dump_toml, read_table
from ingot.corpus.documents import read_documents
from ingot.corpus.left_out import matches, paths_of
from ingot.pipeline.graph import Graph, Node, load_graphs
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
    corpora: dict[str, list[str]]
    """Corpus -> the documents that are left out of it, with copies of documents of other corpora."""
    unsearched: list[str]
    """Corpora that have not run, so that nobody knows whether they have the documents."""
    again: list[str]
    """The stages with a new key."""
    reused: list[str]
    """The other stages that are done."""
    readers: list[Reader]


def without(recipe: Path, names: Sequence[str], run: str, root: Path) -> LeftOut:
    """Leave documents out of a recipe.

    Args:
        recipe: its TOML file.
        names: documents, PATH#OFFSET or PATH.
        run: name of the new run.
        root: output root, with the finished corpora of the recipe.

    Raises:
        UserError: a document is in no finished corpus of the recipe, or the new run's name is taken.
    """
    if recipe.is_dir():
        raise UserError(f"{recipe}: is a directory, expected a recipe's TOML file")
    graphs = load_graphs(recipe, [], root)
    _, _, table = read_table(recipe)
    by_corpus = _corpora_of(graphs, names)
    if (root / run).exists():
        raise UserError(f"{root / run}: exists already, and the new run would take its name; choose another with --to")
    for corpus, found in by_corpus.items():
        settings = table["stage"][corpus]
        settings["without"] = [*dict.fromkeys([*settings.get("without", []), *found])]
    table["run"] = {**table.get("run", {}), "name": run}
    changed = load_graphs(table, [], root)
    keys = {node.key for graph in graphs for node in graph.nodes.values()}
    nodes = {name: node for graph in changed for name, node in graph.nodes.items()}
    again = [name for name, node in nodes.items() if node.key not in keys]
    all_names = [*dict.fromkeys(name for found in by_corpus.values() for name in found)]
    readers = [reader for graph in graphs for reader in _readers(graph, all_names) if reader.name in again]
    kept = [name for name, node in nodes.items() if name not in again and _is_done(changed, node)]
    unsearched = [n.name for n in graphs[0].nodes.values() if n.kind == "corpus" and not _is_done(graphs, n)]
    return LeftOut(dump_toml(table), by_corpus, unsearched, again, kept, readers)


def _is_done(graphs: Sequence[Graph], node: Node) -> bool:
    return graphs[0].stage(node).is_done()


def _corpora_of(graphs: Sequence[Graph], names: Sequence[str]) -> dict[str, list[str]]:
    """Corpus stage -> the documents that it has, and PATH#OFFSET of copies of documents of other corpora.

    Raises:
        UserError: a document that none has.
    """
    by_corpus: dict[str, list[str]] = {}
    corpora = [node for node in graphs[0].nodes.values() if node.kind == "corpus"]
    done = [node for node in corpora if graphs[0].stage(node).is_done()]
    clusters: set[int] = set()
    for node in done:
        for path, offset, cluster in _documents(graphs[0].stage(node).path):
            for name in names:
                if matches(name, path, offset):
                    clusters.add(cluster)
                    if name not in by_corpus.setdefault(node.name, []):
                        by_corpus[node.name].append(name)
    for name in names:
        if not any(name in found for found in by_corpus.values()):
            where = (
                f"of {', '.join(node.name for node in done)}" if done else "of a finished corpus; run the recipe first"
            )
            raise UserError(
                f"{name}: found no such document, expected PATH or PATH#OFFSET of a document {where}; of equal "
                "documents name the one that is kept, as `ingot trace --text` shows it"
            )
    for node in done:  # copies in one corpus are left out by `corpus/left_out.py`
        copies = [
            f"{path}#{offset}"
            for path, offset, cluster in _documents(graphs[0].stage(node).path)
            if cluster in clusters and not any(matches(name, path, offset) for name in names)
        ]
        if copies:
            by_corpus[node.name] = [*by_corpus.get(node.name, []), *copies]
    return by_corpus


def _documents(corpus: Path) -> Iterator[tuple[str, int, int]]:
    """Path, offset and cluster, which copies share, of each document."""
    columns = ["path", "offset", "cluster"]
    for batch in read_documents(corpus, columns=columns):
        yield from zip(*(batch[column].to_pylist() for column in columns), strict=True)


def _readers(graph: Graph, names: Sequence[str]) -> list[Reader]:
    readers = []
    for node in graph.nodes.values():
        stage = graph.stage(node).path
        if node.kind == "train" and (stage / TOKENIZER).exists():  # else it has trained on nothing yet
            data, timeline, _ = open_training_data(stage)
            steps: set[int] = set()
            for source in data.train_sources:
                for name in names:
                    for document in chain.from_iterable(map(source.store.find, paths_of(name))):
                        identity: dict[str, Any] = source.store.identity(document)
                        if matches(name, identity["path"], identity["offset"]):
                            steps.update(steps_of(data, timeline, data.names.index(source.name), document))
            readers.append(Reader(node.name, sorted(steps), timeline.steps))
    return readers
