"""A recipe's stages as a graph, and the rules for a complete recipe. `resolve.py` makes the stages and their keys."""

from dataclasses import dataclass
from pathlib import Path

from ingot.core import dashboards
from ingot.core.artifact import STAGES, FileHashes, StageDir
from ingot.core.errors import UserError, nearest
from ingot.core.recipe import Recipe, RunSettings, load_recipe, load_recipes, name_problem
from ingot.pipeline.resolve import Resolver
from ingot.stages.kind import Node
from ingot.stages.kinds import RECIPE_KINDS
from ingot.stages.models.imports import imported_name, is_directory
from ingot.stages.models.settings import ImportSettings
from ingot.stages.synthesis.settings import LabelSettings


@dataclass(frozen=True)
class Graph:
    """All nodes of a recipe, inputs before their readers."""

    recipe: Recipe
    nodes: dict[str, Node]
    root: Path
    """The output root: runs, and `stages`, where their results are."""

    @property
    def run(self) -> Path:
        """Directory of the run; of a sweep the one that has all its points."""
        return self.root / self.recipe.run.name

    @property
    def home(self) -> Path:
        """Directory of the run's links; in a sweep the point's."""
        return self.root / self.recipe.home

    def stage(self, node: Node) -> StageDir:
        """The directory of a node's result."""
        return StageDir(self.root / STAGES / node.directory)

    def link(self, node: Node) -> Path:
        """`runs/NAME/STAGE`, the link to the stage's current directory."""
        return self.home / node.name

    def needed(self, only: list[str]) -> list[Node]:
        """The named stages and all they stand on, in order; everything where no name is given."""
        for name in only:
            if name not in self.nodes:
                raise UserError(f"--only {name}: no such stage in {self.recipe.path}; {nearest(name, self.nodes)}")
        if not only:
            return list(self.nodes.values())
        wanted = set(only)
        for node in reversed(self.nodes.values()):  # readers before their inputs
            if node.name in wanted:
                wanted |= {source.name for source in node.inputs.values()}
        return [n for n in self.nodes.values() if n.name in wanted]


def load_graph(path: Path, overrides: list[str], root: Path) -> Graph:
    """The graph of a recipe that has no `[sweep]`; see `load_graphs`."""
    recipe = load_recipe(path, overrides, RECIPE_KINDS)
    return _graphs([recipe], root)[0]


def load_graphs(path: Path, overrides: list[str], root: Path) -> list[Graph]:
    """Read a recipe and give every stage its key; one graph, or one for each point of a `[sweep]`.

    Args:
        path: the recipe.
        overrides: `--set` strings.
        root: output root; digests of raw files are remembered below it.

    Raises:
        UserError: what is wrong with the recipe; files that cannot be read are noted on their nodes.
    """
    graphs = _graphs(load_recipes(path, overrides, RECIPE_KINDS), root)
    _refuse_equal_points(graphs)
    _refuse_shared_answers(graphs)
    return graphs


def import_graph(source: str, root: Path, name: str | None = None, adapter: str | None = None) -> Graph:
    """The graph of `ingot import`: one model directory and its tokenizer, in a run called `imported`.

    Args:
        source: `hf:DIR`, or the directory of a finished train stage.
        root: output root.
        name: of the stage; default: the directory's own.
        adapter: directory of an adapter to merge into it.

    Raises:
        UserError: not a directory of a model.
    """
    if not is_directory(source):
        raise UserError(f"found '{source}', expected hf:DIR (or the directory of a finished train stage)")
    settings = ImportSettings(path=source, adapter=adapter)
    name = imported_name(source).partition(":")[2] if name is None else name
    if problem := name_problem(name):
        raise UserError(f"--name: found {name!r}, and {problem}; choose another with --name")
    recipe = Recipe(Path("import"), RunSettings(name="imported"), {name: ("import", settings)})
    return _graphs([recipe], root)[0]


def _graphs(recipes: list[Recipe], root: Path) -> list[Graph]:
    _require_dashboards(recipes[0].run)
    hashes = FileHashes(root / STAGES / "file-digests.json")
    graphs, errors = [], dict[str, None]()  # in order, each once: readers of a broken stage repeat its sentence
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


def _refuse_equal_points(graphs: list[Graph]) -> None:
    """Points whose stages all have the same keys; where files are missing, keys tell nothing."""
    same: dict[tuple[str, ...], str] = {}
    for graph in graphs:
        if any(node.missing for node in graph.nodes.values()):
            continue
        before = same.setdefault(tuple(n.key for n in graph.nodes.values()), graph.recipe.home)
        if before != graph.recipe.home:
            raise UserError(
                f"sweep: {before} and {graph.recipe.home} are one and the same: what tells them apart changes no "
                "result; leave that setting out"
            )


def _refuse_shared_answers(graphs: list[Graph]) -> None:
    """One file of people's answers for two sets of samples."""
    owners: dict[Path, Node] = {}
    for node in (node for graph in graphs for node in graph.nodes.values()):
        if isinstance(node.settings, LabelSettings) and (file := node.settings.people):
            other = owners.setdefault(file, node)
            if other.inputs["samples"].key != node.inputs["samples"].key:
                elsewhere = f"stage.{other.name}" if other.name != node.name else "another point of the sweep"
                raise UserError(
                    f"stage.{node.name}.by: '{file}' is for the samples of {elsewhere} too, expected a file for each: "
                    "people answer about one set of samples; name another file, or sweep what comes after it"
                )
