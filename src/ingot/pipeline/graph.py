"""The graph of a recipe's stages, and checks across stages. `resolve.py` creates the nodes and their keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.core import dashboards
from ingot.core.artifact import STAGES, StageDir
from ingot.core.errors import UserError, nearest
from ingot.core.file_hashes import FileHashes
from ingot.core.recipe import Recipe, RunSettings, load_recipe, load_recipes, name_problem
from ingot.pipeline.resolve import Resolver
from ingot.stages.kind import Node
from ingot.stages.kinds import RECIPE_KINDS
from ingot.stages.models.imports import imported_name, is_directory
from ingot.stages.models.settings import ImportSettings
from ingot.stages.synthesis.settings import LabelSettings


@dataclass(frozen=True)
class Graph:
    """All nodes of a recipe, in topological order: inputs first."""

    recipe: Recipe
    nodes: dict[str, Node]
    root: Path
    """The output root: a directory for each run, and `stages` with the results."""

    @property
    def run(self) -> Path:
        """Directory of the run; of a sweep, the parent directory of its points."""
        return self.root / self.recipe.run.name

    @property
    def home(self) -> Path:
        """Directory of the links to stages: the run's, or in a sweep the point's."""
        return self.root / self.recipe.home

    def stage(self, node: Node) -> StageDir:
        """The directory of a node."""
        return StageDir(self.root / STAGES / node.directory)

    def link(self, node: Node) -> Path:
        """`runs/NAME/STAGE`, the link to the stage's current directory."""
        return self.home / node.name

    def visited(self, node: Node) -> bool:
        """Whether the run has started or reused the node's result; another run may have made the same result."""
        link, stage = self.link(node), self.stage(node)
        return stage.exists() and link.exists() and link.samefile(stage.path)

    def needed(self, only: list[str]) -> list[Node]:
        """The named stages and all their direct and indirect inputs, in topological order; all stages by default."""
        for name in only:
            if name not in self.nodes:
                raise UserError(f"--only {name}: no such stage in {self.recipe.path}; {nearest(name, self.nodes)}")
        if not only:
            return list(self.nodes.values())
        wanted = set(only)
        for node in reversed(self.nodes.values()):  # consumers before their inputs
            if node.name in wanted:
                wanted |= {source.name for source in node.inputs.values()}
        return [n for n in self.nodes.values() if n.name in wanted]


def load_graph(path: Path, overrides: list[str], root: Path) -> Graph:
    """The graph of a recipe without `[sweep]`; see `load_graphs`."""
    recipe = load_recipe(path, overrides, RECIPE_KINDS)
    return _graphs([recipe], root)[0]


def load_graphs(source: Path | Mapping[str, Any], overrides: list[str], root: Path) -> list[Graph]:
    """Read a recipe and resolve its stages. Returns one graph, or one for each point of a `[sweep]`.

    Args:
        source: the recipe: a TOML file, or its content as a table.
        overrides: `--set` strings.
        root: output root; digests of raw files are cached below it.

    Raises:
        UserError: an error in the recipe. Files that cannot be read are recorded in `Node.missing` instead.
    """
    graphs = _graphs(load_recipes(source, overrides, RECIPE_KINDS), root)
    _check_distinct_points(graphs)
    _check_distinct_label_files(graphs)
    return graphs


def import_graph(source: str, root: Path, name: str | None = None, adapter: str | None = None) -> Graph:
    """The graph of `ingot import`: one model directory and its tokenizer, in a run called `imported`.

    Args:
        source: `hf:DIR`, or the directory of a finished train stage.
        root: output root.
        name: name of the stage; default: name of the directory.
        adapter: directory of an adapter to merge into the model.

    Raises:
        UserError: `source` is not a directory, or the name is invalid.
    """
    if not is_directory(source):
        raise UserError(f"found '{source}', expected hf:DIR (or the directory of a train stage that is done)")
    settings = ImportSettings(path=source, adapter=adapter)
    name = imported_name(source).partition(":")[2] if name is None else name
    if problem := name_problem(name):
        raise UserError(f"--name: found {name!r}, and {problem}; choose another with --name")
    recipe = Recipe(Path("import"), RunSettings(name="imported"), {name: ("import", settings)})
    return _graphs([recipe], root)[0]


def _graphs(recipes: list[Recipe], root: Path) -> list[Graph]:
    _require_dashboards(recipes[0].run)
    hashes = FileHashes(root / STAGES / "file-digests.json")
    graphs, errors = [], dict[str, None]()  # an ordered set: consumers of an invalid stage repeat its error
    for recipe in recipes:
        resolver = Resolver(recipe, hashes, root / recipe.home)
        for name in recipe.stages:
            try:
                resolver.node(name)
            except UserError as error:
                errors[str(error)] = None
        graphs.append(Graph(recipe, resolver.nodes, root))
    hashes.save()
    if errors:
        raise UserError("\n".join(errors))
    return graphs


def _require_dashboards(run: RunSettings) -> None:
    try:
        dashboards.require(run.sinks)
    except UserError as error:
        raise UserError(f"run.sinks: {error}") from None


def _check_distinct_points(graphs: list[Graph]) -> None:
    """Raise a UserError for two points with the same stage keys. Keys with missing files are not compared."""
    points: dict[tuple[str, ...], str] = {}
    for graph in graphs:
        if any(node.missing for node in graph.nodes.values()):
            continue
        first = points.setdefault(tuple(n.key for n in graph.nodes.values()), graph.recipe.home)
        if first != graph.recipe.home:
            raise UserError(
                f"sweep: {first} and {graph.recipe.home} have the same stages, because the setting that differs does "
                "not change any result; leave that setting out"
            )


def _check_distinct_label_files(graphs: list[Graph]) -> None:
    """Raise a UserError for a file of human labels that two sets of samples would use."""
    owners: dict[Path, Node] = {}
    for node in (node for graph in graphs for node in graph.nodes.values()):
        if isinstance(node.settings, LabelSettings) and (file := node.settings.label_file):
            owner = owners.setdefault(file, node)
            if owner.inputs["samples"].key != node.inputs["samples"].key:
                user = f"stage.{owner.name}" if owner.name != node.name else "another point of the sweep"
                raise UserError(
                    f"stage.{node.name}.by: found '{file}', which {user} uses for other samples, expected one file for "
                    "each set of samples; name another file, or sweep only settings of later stages"
                )
