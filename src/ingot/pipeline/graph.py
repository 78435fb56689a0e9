"""From a recipe to nodes with keys.

Edges are the stage names that settings mention. Between a corpus and its readers stands a derived node
`corpus@tokenizer` of kind `tokens`, made here and shared by all who read that pair; a model directory that an `init`
names becomes a derived `import` and its tokenizer likewise. A key is a hash of the kind, its
code version, the settings that determine the result, the raw files, the seed where it is used, and the keys of the
inputs; it names the directory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.core.artifact import FileHashes, digest_json
from ingot.core.errors import UserError, nearest
from ingot.core.functions import is_function
from ingot.core.recipe import Recipe, RunSettings, Settings, canonical, load_recipe, load_recipes
from ingot.corpus.settings import CorpusSettings
from ingot.objectives.settings import OBJECTIVES
from ingot.stages.imports import directory_of, imported_name, is_directory, model_files
from ingot.stages.kinds import KINDS, RECIPE_KINDS
from ingot.stages.sample_settings import GenerateSettings, LabelSettings
from ingot.stages.settings import EvaluateStageSettings, FisherSettings, ImportSettings, JudgeSettings, TrainSettings
from ingot.text.settings import TokenizerSettings, TokensSettings

WITHOUT_TURNS = ("char", "word")
"""Tokenizer types that cannot mark who speaks."""
CORPORA = ("corpus", "generate", "label")
"""Kinds that leave documents."""
READ = ("text", "chat")
"""Formats of which a model's likelihood is measured."""
ASKED = ("chat", "prompts", "pairs")
"""Formats that hold prompts."""


@dataclass(frozen=True)
class Node:
    """One stage with its inputs and its key."""

    name: str
    kind: str
    settings: Settings
    inputs: dict[str, "Node"] = field(hash=False)
    seed: int | None
    raw: str | None
    key: str
    missing: str | None = None
    """Why its files cannot be read; such a node has a key like any other, over `raw = None`, that no run ever makes."""

    @property
    def directory(self) -> str:
        """Name of the directory below the output root's `stages`."""
        return f"{self.kind}-{self.key}"

    @property
    def canonical(self) -> Any:
        return canonical(self.settings)


@dataclass(frozen=True)
class Graph:
    """All nodes of a recipe, inputs before their readers."""

    recipe: Recipe
    nodes: dict[str, Node]

    def needed(self, only: list[str]) -> list[Node]:
        """The named stages and all they stand on, in order; everything where no name is given."""
        for name in only:
            if name not in self.nodes:
                raise UserError(f"--only {name}: no such stage in {self.recipe.path}; {nearest(name, self.nodes)}")
        if not only:
            return list(self.nodes.values())
        wanted = {n.name for name in only for n in _ancestors(self.nodes[name])}
        return [n for n in self.nodes.values() if n.name in wanted]


def load_graph(path: Path, overrides: list[str], root: Path, without_files: bool = False) -> Graph:
    """The graph of a recipe that has no `[sweep]`; see `load_graphs`."""
    recipe = load_recipe(path, overrides, RECIPE_KINDS)
    return _graphs([recipe], root, without_files)[0]


def load_graphs(path: Path, overrides: list[str], root: Path, without_files: bool = False) -> list[Graph]:
    """Read a recipe and give every stage its key; one graph, or one for each point of a `[sweep]`.

    Args:
        path: the recipe.
        overrides: `--set` strings.
        root: output root; digests of raw files are remembered below it.
        without_files: note on a node that its files cannot be read instead of raising, for a plan made before the
            data is there.

    Raises:
        UserError: what is wrong with the recipe or its sources.
    """
    graphs = _graphs(load_recipes(path, overrides, RECIPE_KINDS), root, without_files)
    same: dict[tuple[str, ...], str] = {}
    for graph in graphs:
        before = same.setdefault(tuple(n.key for n in graph.nodes.values()), graph.recipe.home)
        if before != graph.recipe.home:
            raise UserError(
                f"sweep: {before} and {graph.recipe.home} are one and the same: what tells them apart changes no "
                "result; leave that setting out"
            )
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
    name, settings = name or imported_name(source).partition(":")[2], ImportSettings(path=source, adapter=adapter)
    recipe = Recipe(Path("import"), RunSettings(name="imported"), {name: ("import", settings)})
    return _graphs([recipe], root, without_files=False)[0]


def _graphs(recipes: list[Recipe], root: Path, without_files: bool) -> list[Graph]:
    hashes = FileHashes(root / "stages" / "file-digests.json")
    graphs, errors = [], dict[str, None]()  # in order, each once: readers of a broken stage repeat its sentence
    for recipe in recipes:
        builder = _Builder(recipe, hashes, without_files)
        for name in recipe.stages:
            try:
                builder.node(name, reader=None)
            except UserError as error:
                errors[str(error)] = None
        graphs.append(Graph(recipe, builder.nodes))
    hashes.save()
    if errors:
        raise UserError("\n".join(errors))
    return graphs


class _Builder:
    """Depth-first resolution, so that inputs come before their readers and a circle is noticed."""

    def __init__(self, recipe: Recipe, hashes: FileHashes, without_files: bool):
        self.recipe, self.hashes, self.without_files = recipe, hashes, without_files
        self.nodes: dict[str, Node] = {}
        self._open: list[str] = []

    def node(self, name: str, reader: str | None, kinds: tuple[str, ...] = ()) -> Node:
        if name not in self.recipe.stages:
            raise UserError(f"{reader}: no stage '{name}'; {nearest(name, self.recipe.stages)}")
        kind, settings = self.recipe.stages[name]
        if kinds and kind not in kinds:
            raise UserError(f"{reader}: stage '{name}' is a {kind}, expected a {' or '.join(kinds)}")
        if name in self._open:
            raise UserError(
                f"stage.{name}: reads itself by way of {' -> '.join([*self._open, name])}; break the circle"
            )
        if name not in self.nodes:
            self._open.append(name)
            try:
                inputs = self._inputs(name, settings)
            finally:
                self._open.pop()
            self._add(name, kind, settings, inputs)
        return self.nodes[name]

    def _inputs(self, name: str, settings: Settings) -> dict[str, Node]:
        where = f"stage.{name}"
        if isinstance(settings, TokenizerSettings):
            return {f"corpus:{c}": self.node(c, f"{where}.from", ("corpus",)) for c in settings.source}
        if isinstance(settings, TokensSettings):
            corpus = self.node(settings.corpus, f"{where}.corpus", CORPORA)
            return {"corpus": corpus, "tokenizer": self.node(settings.tokenizer, f"{where}.tokenizer", ("tokenizer",))}
        if isinstance(settings, ImportSettings):
            return {"tokenizer": self._import_tokenizer(name, settings, where)}
        if isinstance(settings, TrainSettings):
            inputs: dict[str, Node] = {}
            if settings.init:
                inputs["init"] = self._model(settings.init, f"{where}.init")
                inputs["tokenizer"] = inputs["init"].inputs["tokenizer"]
            else:
                assert settings.tokenizer
                inputs["tokenizer"] = self.node(settings.tokenizer, f"{where}.tokenizer", ("tokenizer",))
            for corpus in settings.corpora:
                inputs[f"data:{corpus}"] = self._tokens(corpus, inputs["tokenizer"], f"{where}.data")
            self._check_data(settings, f"{where}.data")
            for role, stage in settings.companions().items():
                inputs[f"companion:{role}"] = self._companion(role, stage, inputs["tokenizer"], where)
            for stage in settings.fishers:
                inputs[f"fisher:{stage}"] = self._fisher(stage, inputs["tokenizer"], f"{where}.penalties")
            return inputs
        if isinstance(settings, EvaluateStageSettings):
            models = {m: self._model(m, f"{where}.models") for m in settings.models}
            inputs = {f"model:{model.name}": model for model in models.values()}
            corpora = settings.data or self._corpora(where, settings)
            for model in models.values():
                for corpus in corpora:
                    tokens = self._tokens(corpus, model.inputs["tokenizer"], f"{where}.data")
                    self._check_format(corpus, READ, f"{where}.data", "likelihood is measured on")
                    inputs[f"data:{tokens.name}"] = tokens
            return inputs
        if isinstance(settings, FisherSettings):
            return self._fisher_inputs(settings, where)
        if isinstance(settings, JudgeSettings):
            return self._judge_inputs(settings, where)
        if isinstance(settings, GenerateSettings):
            return self._generate_inputs(settings, where)
        if isinstance(settings, LabelSettings):
            samples = self.node(settings.data, f"{where}.data", ("generate",))
            inputs = {"samples": samples, "tokenizer": samples.inputs["tokenizer"]}
            if settings.reward:
                inputs["reward"] = self._companion("reward", settings.reward, inputs["tokenizer"], f"{where}.by")
            return inputs
        return {}

    def _generate_inputs(self, settings: GenerateSettings, where: str) -> dict[str, Node]:
        model = self._model(settings.model, f"{where}.model")
        prompts = self.node(settings.data, f"{where}.data", ("corpus",))
        self._check_format(settings.data, ("prompts",), f"{where}.data", "a generate stage answers")
        self._check_turns(settings.data, model.inputs["tokenizer"], f"{where}.model")
        return {"model": model, "tokenizer": model.inputs["tokenizer"], "data": prompts}

    def _companion(self, role: str, name: str, tokenizer: Node, where: str) -> Node:
        """A frozen model that a train stage reads beside its own: of the same tokens."""
        node = self._model(name, f"{where} ({role})")
        if role in ("reward", "gold") and not _is_reward_model(node):
            raise UserError(
                f"{where}: '{name}' is no reward model, expected a train stage with objective = \"reward\", or a "
                'function "file.py:function"'
            )
        if node.inputs["tokenizer"].key != tokenizer.key:
            other = node.inputs["tokenizer"].name
            raise UserError(
                f"{where}: its {role} '{name}' reads the tokens of '{other}', expected '{tokenizer.name}', the "
                "tokenizer of this stage: the same text would be other tokens; train one of the two anew"
            )
        return node

    def _judge_inputs(self, settings: JudgeSettings, where: str) -> dict[str, Node]:
        against = self._model(settings.against, f"{where}.against")
        tokenizer = against.inputs["tokenizer"]
        inputs = {"against": against}
        for name in settings.models:
            inputs[f"model:{name}"] = self._companion("model", name, tokenizer, where)
        inputs["data"] = self._tokens(settings.data, tokenizer, f"{where}.data")
        self._check_format(settings.data, ASKED, f"{where}.data", "prompts are taken from")
        for name in settings.by:
            if not is_function(name):
                node = self._model(name, f"{where}.by")
                rewards = _is_reward_model(node)
                inputs[f"judge:{name}"] = self._companion("judge", name, tokenizer, where) if rewards else node
        return inputs

    def _fisher_inputs(self, settings: FisherSettings, where: str) -> dict[str, Node]:
        model = self._model(settings.model, f"{where}.model")
        inputs = {"model": model, "tokenizer": model.inputs["tokenizer"]}
        for corpus in settings.data:
            inputs[f"data:{corpus}"] = self._tokens(corpus, inputs["tokenizer"], f"{where}.data")
            self._check_format(corpus, READ, f"{where}.data", "a fisher stage reads")
        if settings.previous:
            inputs["previous"] = self._fisher(settings.previous, inputs["tokenizer"], f"{where}.previous")
        return inputs

    def _fisher(self, name: str, tokenizer: Node, reader: str) -> Node:
        """A fisher stage of a model with that tokenizer."""
        node = self.node(name, reader, ("fisher",))
        if node.inputs["tokenizer"].key != tokenizer.key:
            other = node.inputs["tokenizer"].name
            raise UserError(
                f"{reader}: '{name}' is of a model that reads '{other}', expected '{tokenizer.name}'; "
                "an importance of weights holds for the model it was measured on, and those trained from it"
            )
        return node

    def _model(self, name: str, reader: str) -> Node:
        """A train or import stage, or the directory of a model made elsewhere as a derived import."""
        if name in self.recipe.stages or not is_directory(name):
            return self.node(name, reader, ("train", "import"))
        derived = imported_name(name)
        if derived not in self.nodes:
            settings = ImportSettings(path=name)
            self._add(derived, "import", settings, {"tokenizer": self._import_tokenizer(derived, settings, reader)})
        elif self.nodes[derived].settings != ImportSettings(path=name):
            raise UserError(
                f"{reader}: '{name}' and another directory are both called {derived}; make one a stage of kind import"
            )
        return self.nodes[derived]

    def _import_tokenizer(self, name: str, settings: ImportSettings, where: str) -> Node:
        """The tokenizer of the import `name`: a stage's, or the one in its directory as a node of its own."""
        if not self.without_files:
            try:
                model_files(settings.path)  # before its tokenizer, whose absence would say less
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
        if settings.tokenizer:
            return self.node(settings.tokenizer, f"{where}.tokenizer", ("tokenizer",))
        derived = f"{name}.tokenizer"  # by the import's name: two directories may be called alike
        if derived in self.recipe.stages:
            raise UserError(f"stage.{derived}: the tokenizer in {settings.path} has this name; rename the stage")
        settings_of_file = TokenizerSettings(type="file", path=directory_of(settings.path))
        self._add(derived, "tokenizer", settings_of_file, {})
        return self.nodes[derived]

    def _corpora(self, where: str, settings: EvaluateStageSettings) -> list[str]:
        """What the models were trained on; there may be nothing where they sit tasks."""
        found: dict[str, None] = {}
        for model in settings.models:
            trained = self.recipe.stages[model][1] if model in self.recipe.stages else None
            if isinstance(trained, TrainSettings):
                found |= dict.fromkeys(name for name in trained.corpora if self._format(name) in READ)
        if not found and not settings.tasks:
            raise UserError(
                f"{where}.data: missing, and no model here was trained by this recipe; name the corpora to judge on"
            )
        return list(found)

    def _check_data(self, settings: TrainSettings, reader: str) -> None:
        """Every mixture has a corpus that the objective learns from; running text and conversations may be replayed."""
        kind = settings.objective.kind
        own = OBJECTIVES[kind].formats
        for data in (phase.data or settings.data for phase in settings.phases or (settings,)):
            found = {name: self._format(name) for name in data or ()}
            if found and not set(found.values()) & set(own):
                self._check_format(next(iter(found)), own, reader, f"objective {kind} learns from")
        for corpus in settings.corpora:
            known = tuple(dict.fromkeys((*own, *READ)))
            self._check_format(corpus, known, reader, f"objective {kind} learns from and replays")

    def _format(self, name: str) -> str:
        """The format of a corpus, or of the corpus behind a tokens stage."""
        settings = self.recipe.stages[name][1]
        if isinstance(settings, TokensSettings):
            settings = self.recipe.stages[settings.corpus][1]
        assert isinstance(settings, CorpusSettings | GenerateSettings | LabelSettings)
        return settings.format

    def _check_format(self, name: str, known: tuple[str, ...], reader: str, what: str) -> None:
        found = self._format(name)
        if found not in known:
            raise UserError(
                f"{reader}: '{name}' has format = \"{found}\", but {what} {' and '.join(known)}; "
                "name a corpus of one of these"
            )

    def _check_turns(self, name: str, tokenizer: Node, reader: str) -> None:
        kind, form = getattr(tokenizer.settings, "type", None), self._format(name)
        if kind in WITHOUT_TURNS and form != "text":
            raise UserError(
                f"{reader}: '{name}' has format = \"{form}\", but '{tokenizer.name}' is of type {kind}, which has "
                'no special tokens to mark turns with; use type = "byte-bpe"'
            )

    def _tokens(self, name: str, tokenizer: Node, reader: str) -> Node:
        """The tokens node of a corpus, or the tokens stage of that name."""
        source = self.node(name, reader, (*CORPORA, "tokens"))
        if source.kind == "tokens":
            if source.inputs["tokenizer"].key != tokenizer.key:
                other = source.inputs["tokenizer"].name
                raise UserError(f"{reader}: '{name}' was encoded by '{other}', expected '{tokenizer.name}'")
            return source
        derived = f"{name}@{tokenizer.name}"
        if derived not in self.nodes:
            self._check_turns(name, tokenizer, reader)
            settings = TokensSettings(corpus=name, tokenizer=tokenizer.name)
            self._add(derived, "tokens", settings, {"corpus": source, "tokenizer": tokenizer})
        return self.nodes[derived]

    def _add(self, name: str, kind: str, settings: Settings, inputs: dict[str, Node]) -> None:
        described = KINDS[kind]
        raw = missing = None
        try:
            raw = described.raw(settings, self.hashes) if described.raw else None
        except UserError as error:
            missing = f"stage.{name}: {error}"
            if not self.without_files:
                raise UserError(missing) from None
        own = getattr(settings, "seed", None)
        seed = (self.recipe.run.seed if own is None else own) if described.seeded else None
        key = digest_json(
            {
                "kind": kind,
                "version": described.version,
                "settings": canonical(settings),
                "inputs": {role: node.key for role, node in inputs.items()},
                "seed": seed,
                "raw": raw,
            }
        )[:20]
        self.nodes[name] = Node(name, kind, settings, inputs, seed, raw, key, missing)


def _ancestors(node: Node) -> Iterator[Node]:
    yield node
    for source in node.inputs.values():
        yield from _ancestors(source)


def _is_reward_model(node: Node) -> bool:
    return isinstance(node.settings, TrainSettings) and node.settings.objective.kind == "reward"
