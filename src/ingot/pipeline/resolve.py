"""Which stages a stage reads, and its key.

Edges are the stage names that settings mention. Between a corpus and its readers stands a derived node
`corpus@tokenizer` of kind `tokens`, made here and shared by all who read that pair; a model directory that an `init`
names becomes a derived `import` and its tokenizer likewise. A key is a hash of the kind, its code version, the settings
that determine the result, the raw files, the seed where it is used, and the keys of the inputs; it names the directory.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.core.artifact import DONE, FileHashes, digest_json
from ingot.core.errors import MissingFile, UserError, nearest
from ingot.core.functions import is_function
from ingot.core.recipe import Recipe, Settings, canonical, settings_tree
from ingot.corpus.settings import CorpusSettings
from ingot.objectives.settings import OBJECTIVES
from ingot.stages.evaluation.settings import EvaluateStageSettings, FisherSettings, JudgeSettings
from ingot.stages.job import open_stage, tokens_name
from ingot.stages.kinds import KINDS
from ingot.stages.models.imports import directory_of, imported_name, is_directory, model_files
from ingot.stages.synthesis.settings import GenerateSettings, LabelSettings
from ingot.stages.training.settings import ImportSettings, TrainSettings
from ingot.tokenizer.files import has_template
from ingot.tokenizer.settings import TokenizerSettings, TokensSettings

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
    """Why its files cannot be read. Where they are gone and the run's link is to a result that is the same otherwise,
    the node has that result's key; else a key over `raw = None`, that no run ever makes."""

    @property
    def directory(self) -> str:
        """Name of the directory below the output root's `stages`."""
        return f"{self.kind}-{self.key}"

    @property
    def canonical(self) -> Any:
        return canonical(self.settings)


class Builder:
    """Depth-first resolution, so that inputs come before their readers and a circle is noticed."""

    def __init__(self, recipe: Recipe, hashes: FileHashes, links: Path):
        self.recipe, self.hashes, self.links = recipe, hashes, links
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
            _check_room(settings, inputs.get("init"), where)
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
            inputs = {"tokenizer": self._import_tokenizer(derived, settings, reader)}
            self._add(derived, "import", settings, inputs, reader)
        elif self.nodes[derived].settings != ImportSettings(path=name):
            raise UserError(
                f"{reader}: '{name}' and another directory are both called {derived}; make one a stage of kind import"
            )
        return self.nodes[derived]

    def _import_tokenizer(self, name: str, settings: ImportSettings, where: str) -> Node:
        """The tokenizer of the import `name`: a stage's, or the one in its directory as a node of its own."""
        if settings.tokenizer:
            return self.node(settings.tokenizer, f"{where}.tokenizer", ("tokenizer",))
        derived = f"{name}.tokenizer"  # by the import's name: two directories may be called alike
        if derived in self.recipe.stages:
            raise UserError(f"stage.{derived}: the tokenizer in {settings.path} has this name; rename the stage")
        problem = None
        try:
            model_files(settings.path)
        except UserError as error:
            problem = error  # says more than that there is no tokenizer
        settings_of_file = TokenizerSettings(type="file", path=directory_of(settings.path))
        self._add(derived, "tokenizer", settings_of_file, {}, where, problem)
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
                f"{where}.data: missing, and this recipe trains no model here on running text or conversations; name "
                "the corpora to judge on"
            )
        return list(found)

    def _check_data(self, settings: TrainSettings, reader: str) -> None:
        """Every mixture has a corpus that the objective learns from; running text and conversations may be replayed."""
        kind = settings.objective.kind
        own = OBJECTIVES[kind].formats
        for part in settings.parts:
            found = {name: self._format(name) for name in settings.mixture(part)}
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
        settings = tokenizer.settings
        assert isinstance(settings, TokenizerSettings)
        if form != "text" and settings.path and not settings.template and not has_template(settings.path):
            raise UserError(
                f"{reader}: '{name}' has format = \"{form}\", but {settings.path} has no chat template: make a stage "
                f'of its tokenizer (type = "file", path = "{settings.path}", template = "turns") and name it as the '
                "`tokenizer` of a stage of kind import"
            )

    def _tokens(self, name: str, tokenizer: Node, reader: str) -> Node:
        """The tokens node of a corpus, or the tokens stage of that name."""
        source = self.node(name, reader, (*CORPORA, "tokens"))
        if source.kind == "tokens":
            if source.inputs["tokenizer"].key != tokenizer.key:
                other = source.inputs["tokenizer"].name
                raise UserError(f"{reader}: '{name}' was encoded by '{other}', expected '{tokenizer.name}'")
            return source
        derived = tokens_name(name, tokenizer.name)
        if derived not in self.nodes:
            self._check_turns(name, tokenizer, reader)
            settings = TokensSettings(corpus=name, tokenizer=tokenizer.name)
            self._add(derived, "tokens", settings, {"corpus": source, "tokenizer": tokenizer})
        return self.nodes[derived]

    def _add(
        self,
        name: str,
        kind: str,
        settings: Settings,
        inputs: dict[str, Node],
        where: str | None = None,
        problem: UserError | None = None,
    ) -> None:
        """A node with its key; `where` the recipe names it, and a problem with its files that is known already."""
        described = KINDS[kind]
        own = getattr(settings, "seed", None)
        seed = (self.recipe.run.seed if own is None else own) if described.seeded else None
        made_from = {
            "kind": kind,
            "version": described.version,
            "settings": canonical(settings),
            "inputs": {role: node.key for role, node in inputs.items()},
            "seed": seed,
        }
        raw = missing = None
        try:
            if problem:
                raise problem
            raw = described.raw(settings, self.hashes) if described.raw else None
        except UserError as error:
            missing = f"{where or f'stage.{name}'}: {error}"
            raw = self._raw_before(name, settings, made_from) if isinstance(error, MissingFile) else None
        self.nodes[name] = Node(name, kind, settings, inputs, seed, raw, _key(made_from, raw), missing)

    def _raw_before(self, name: str, settings: Settings, made_from: dict[str, Any]) -> str | None:
        """The digest of the files that the run's linked result was made from; None unless all else is as it was, paths
        that are part of no key included: another path that is not there is a mistake.
        """
        link = self.links / name
        if not (link / DONE).exists():
            return None
        before = open_stage(link)
        same = digest_json(before["settings"]) == digest_json(settings_tree(settings))
        return before["raw"] if same and _key(made_from, before["raw"]) == before["key"] else None


def _key(made_from: dict[str, Any], raw: str | None) -> str:
    return digest_json({**made_from, "raw": raw})[:20]


def _check_room(settings: TrainSettings, init: Node | None, where: str) -> None:
    """Completions fit beside their prompts; where the context comes with files, the stage itself finds out."""
    came = init and _context(init)
    try:
        for part in settings.parts:
            if context := settings.context_of(part, came or 0):
                settings.objective.room_for_prompts(context)
    except UserError as error:
        raise UserError(f"{where}.{error}") from None


def _context(node: Node) -> int | None:
    """The longest rows of a model, as far as the recipe says it."""
    settings = node.settings
    if not isinstance(settings, TrainSettings):
        return None
    came = settings.model.context if settings.model else _context(node.inputs["init"])
    return came and settings.longest(came)


def _is_reward_model(node: Node) -> bool:
    return isinstance(node.settings, TrainSettings) and node.settings.objective.kind == "reward"
