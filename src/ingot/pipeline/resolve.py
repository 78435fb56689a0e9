"""From the names in settings to stages with keys.

What a stage reads is its kind's business (`Kind.reads`); here names become nodes. Between a corpus and its readers
stands a derived node `corpus@tokenizer` of kind `tokens`, shared by all who read that pair; a model directory that an
`init` names becomes a derived `import`, and its tokenizer likewise. A key is a hash of the kind, its version, the
settings that determine the result, the raw files, the seed where it is used, and the keys of the inputs; it names the
directory.
"""

from pathlib import Path
from typing import Any

from ingot.core.artifact import DONE, FileHashes, digest_json
from ingot.core.errors import MissingFile, UserError, nearest
from ingot.core.recipe import Recipe
from ingot.core.settings import Settings, canonical, settings_tree
from ingot.stages.job import open_stage, tokens_name
from ingot.stages.kind import Node
from ingot.stages.kinds import KINDS
from ingot.stages.models.imports import directory_of, imported_name, is_directory, model_files
from ingot.stages.models.kind import import_inputs
from ingot.stages.models.settings import ImportSettings
from ingot.stages.tokenize.kind import check_turns
from ingot.tokenizer.settings import TokenizerSettings, TokensSettings


class Resolver:
    """Depth-first resolution of a recipe, so that inputs come before their readers and a circle is noticed."""

    def __init__(self, recipe: Recipe, hashes: FileHashes, links: Path):
        self.recipe, self.hashes, self.links = recipe, hashes, links
        self.nodes: dict[str, Node] = {}
        self._open: list[str] = []

    def node(self, name: str, where: str | None = None, makes: tuple[str, ...] = ()) -> Node:
        """The stage of that name, with all that it reads.

        Args:
            where: the setting that names it.
            makes: what it must make; (): anything.

        Raises:
            UserError: there is no such stage, it makes something else, or it reads itself.
        """
        if name not in self.recipe.stages:
            raise UserError(f"{where}: no stage '{name}'; {nearest(name, self.recipe.stages)}")
        kind, settings = self.recipe.stages[name]
        if makes and KINDS[kind].makes not in makes:
            expected = " or ".join(n for n, k in KINDS.items() if k.makes in makes)
            raise UserError(f"{where}: stage '{name}' is a {kind}, expected a {expected}")
        if name in self._open:
            raise UserError(
                f"stage.{name}: reads itself by way of {' -> '.join([*self._open, name])}; break the circle"
            )
        if name not in self.nodes:
            self._open.append(name)
            try:
                inputs = KINDS[kind].reads(settings, _OneStage(self, name))
            finally:
                self._open.pop()
            self.add(name, kind, settings, inputs)
        return self.nodes[name]

    def add(
        self,
        name: str,
        kind: str,
        settings: Settings,
        inputs: dict[str, Node],
        where: str | None = None,
        problem: UserError | None = None,
    ) -> Node:
        """Add a node with its key.

        Args:
            where: the setting that names it, if not the stage's own table.
            problem: one with its files that is known already.
        """
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
        return self.nodes[name]

    def _raw_before(self, name: str, settings: Settings, made_from: dict[str, Any]) -> str | None:
        """The digest of the files that the run's linked result was made from.

        None unless all else is as it was, paths that are part of no key included: another path that is not there is a
        mistake.
        """
        link = self.links / name
        if not (link / DONE).exists():
            return None
        before = open_stage(link)
        same = digest_json(before["settings"]) == digest_json(settings_tree(settings))
        return before["raw"] if same and _key(made_from, before["raw"]) == before["key"] else None


class _OneStage:
    """`Resolve` for the settings of one stage."""

    def __init__(self, resolver: Resolver, name: str, where: str | None = None):
        self._all, self.name, self.where = resolver, name, where or f"stage.{name}"

    def _where(self, setting: str) -> str:
        if not setting:
            return self.where
        return f"{self.where} {setting}" if setting.startswith("(") else f"{self.where}.{setting}"

    def refuse(self, setting: str, problem: str) -> None:
        raise UserError(f"{self._where(setting)}: {problem}")

    def settings_of(self, name: str) -> Settings | None:
        return self._all.recipe.stages[name][1] if name in self._all.recipe.stages else None

    def stage(self, name: str, setting: str, *makes: str) -> Node:
        return self._all.node(name, self._where(setting), makes)

    def model(self, name: str, setting: str) -> Node:
        if name in self._all.recipe.stages or not is_directory(name):
            return self.stage(name, setting, "model")
        derived, settings = imported_name(name), ImportSettings(path=name)
        if derived not in self._all.nodes:
            where = self._where(setting)
            inputs = import_inputs(settings, _OneStage(self._all, derived, where))
            return self._all.add(derived, "import", settings, inputs, where)
        if self._all.nodes[derived].settings != settings:
            self.refuse(
                setting, f"'{name}' and another directory are both called {derived}; make one a stage of kind import"
            )
        return self._all.nodes[derived]

    def directory_tokenizer(self, directory: str) -> Node:
        name = f"{self.name}.tokenizer"  # by the import's name: two directories may be called alike
        if name in self._all.recipe.stages:
            raise UserError(f"stage.{name}: the tokenizer in {directory} has this name; rename the stage")
        problem = None
        try:
            model_files(directory)
        except UserError as error:
            problem = error  # says more than that there is no tokenizer
        in_directory = TokenizerSettings(type="file", path=directory_of(directory))
        return self._all.add(name, "tokenizer", in_directory, {}, self.where, problem)

    def tokens(self, name: str, tokenizer: Node, setting: str) -> Node:
        source = self.stage(name, setting, "documents", "tokens")
        if KINDS[source.kind].makes == "tokens":
            if source.inputs["tokenizer"].key != tokenizer.key:
                other = source.inputs["tokenizer"].name
                self.refuse(setting, f"'{name}' was encoded by '{other}', expected '{tokenizer.name}'")
            return source
        derived = tokens_name(name, tokenizer.name)
        if derived not in self._all.nodes:
            check_turns(name, self.format_of(name), tokenizer, setting, self)
            settings = TokensSettings(corpus=name, tokenizer=tokenizer.name)
            self._all.add(derived, "tokens", settings, {"corpus": source, "tokenizer": tokenizer})
        return self._all.nodes[derived]

    def format_of(self, name: str) -> str:
        settings = self.settings_of(name)
        if isinstance(settings, TokensSettings):
            settings = self.settings_of(settings.corpus)
        return getattr(settings, "format", "text")


def _key(made_from: dict[str, Any], raw: str | None) -> str:
    return digest_json({**made_from, "raw": raw})[:20]
