"""Resolves the stage names in settings to nodes with keys.

`Kind.reads` decides which inputs a stage has; this module turns the names into nodes. Some nodes are derived:

- `corpus@tokenizer` of kind `tokens` encodes a corpus with a tokenizer, once for all stages that read that pair.
- A model directory that a setting names becomes an `import` stage, and its tokenizer a `tokenizer` stage.

A key is a hash of the kind, its version, the settings that determine the result, the raw files, the seed if it is
used, and the keys of the inputs. It names the stage's directory.
"""

from pathlib import Path
from typing import Any

from ingot.core.artifact import DONE, digest_json
from ingot.core.errors import MissingFile, UserError, nearest
from ingot.core.file_hashes import FileHashes
from ingot.core.recipe import Recipe
from ingot.core.settings import Settings, canonical, settings_tree
from ingot.stages.job import read_record, tokens_name
from ingot.stages.kind import Node
from ingot.stages.kinds import KINDS
from ingot.stages.models.imports import imported_name, is_directory, model_files, require_adapter, tokenizer_of
from ingot.stages.models.kind import import_inputs
from ingot.stages.models.settings import ImportSettings
from ingot.stages.tokenize.kind import check_turns
from ingot.stages.tokenize.settings import TokenFilesSettings
from ingot.tokenizer.settings import TokenizerSettings, TokensSettings


class Resolver:
    """Resolves the stages of a recipe depth first, so that `nodes` is in topological order and cycles are found.

    Args:
        recipe: the recipe.
        hashes: digests of raw files.
        links: directory of the run's links to stages.
    """

    def __init__(self, recipe: Recipe, hashes: FileHashes, links: Path):
        self.recipe, self.hashes, self.links = recipe, hashes, links
        self.nodes: dict[str, Node] = {}
        self._open: list[str] = []
        self._evaluated = sorted({f for kind, s in recipe.stages.values() for f in KINDS[kind].evaluates(s)})

    def node(self, name: str, where: str | None = None, makes: tuple[str, ...] = ()) -> Node:
        """The node of a stage of the recipe, after its inputs have been resolved.

        Args:
            name: name of the stage.
            where: the setting that names it, for errors.
            makes: accepted outputs (`Kind.makes`); (): any.

        Raises:
            UserError: there is no such stage, it has another output, or it is part of a cycle.
        """
        if name not in self.recipe.stages:
            raise UserError(f"{where}: no stage '{name}'; {nearest(name, self.recipe.stages)}")
        kind, given = self.recipe.stages[name]
        settings = KINDS[kind].keep_out(given, self._evaluated)
        if makes and KINDS[kind].makes not in makes:
            expected = " or ".join(n for n, k in KINDS.items() if k.makes in makes)
            raise UserError(f"{where}: stage '{name}' is a {kind}, expected a {expected}")
        if name in self._open:
            raise UserError(
                f"stage.{name}: found the cycle {' -> '.join([*self._open, name])}, expected none; break the cycle"
            )
        if name not in self.nodes:
            self._open.append(name)
            try:
                inputs = KINDS[kind].reads(settings, _StageResolver(self, name))
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
            name: name of the stage.
            kind: its kind.
            settings: its settings.
            inputs: role -> node.
            where: the setting that names it, where that is not the stage's own table; for errors.
            problem: a known error of its raw files.
        """
        definition = KINDS[kind]
        own = getattr(settings, "seed", None)
        seed = (self.recipe.run.seed if own is None else own) if definition.seeded else None
        key_content = {
            "kind": kind,
            "version": definition.version,
            "settings": canonical(settings),
            "inputs": {role: node.key for role, node in inputs.items()},
            "seed": seed,
        }
        raw = missing = None
        self.hashes.read.clear()
        try:
            if problem:
                raise problem
            raw = definition.raw(settings, self.hashes) if definition.raw else None
        except UserError as error:
            missing = f"{where or f'stage.{name}'}: {error}"
            raw = self._previous_raw(name, settings, key_content) if isinstance(error, MissingFile) else None
        self.nodes[name] = Node(
            name, kind, settings, inputs, seed, raw, _key(key_content, raw), missing, dict(self.hashes.read)
        )
        return self.nodes[name]

    def _previous_raw(self, name: str, settings: Settings, key_content: dict[str, Any]) -> str | None:
        """The digest of raw files of the result that the run links to, for files that have been deleted since.

        None if any setting has changed, even one that is not in the key: a new path that does not exist is an error.
        """
        link = self.links / name
        if not (link / DONE).exists():
            return None
        record = read_record(link)
        same = digest_json(record["settings"]) == digest_json(settings_tree(settings))
        return record["raw"] if same and _key(key_content, record["raw"]) == record["key"] else None


class _StageResolver:
    """Implements `stages/kind.py: Resolve` for one stage."""

    def __init__(self, resolver: Resolver, name: str, where: str | None = None):
        self._resolver, self.name, self.where = resolver, name, where or f"stage.{name}"

    def _where(self, setting: str) -> str:
        if not setting:
            return self.where
        return f"{self.where} {setting}" if setting.startswith("(") else f"{self.where}.{setting}"

    def refuse(self, setting: str, problem: str) -> None:
        raise UserError(f"{self._where(setting)}: {problem}")

    def settings_of(self, name: str) -> Settings | None:
        return self._resolver.recipe.stages[name][1] if name in self._resolver.recipe.stages else None

    def stage(self, name: str, setting: str, *makes: str) -> Node:
        return self._resolver.node(name, self._where(setting), makes)

    def model(self, name: str, setting: str) -> Node:
        if name in self._resolver.recipe.stages or not is_directory(name):
            return self.stage(name, setting, "model")
        derived, settings = imported_name(name), ImportSettings(path=name)
        if derived not in self._resolver.nodes:
            where = self._where(setting)
            inputs = import_inputs(settings, _StageResolver(self._resolver, derived, where))
            return self._resolver.add(derived, "import", settings, inputs, where)
        if self._resolver.nodes[derived].settings != settings:
            self.refuse(
                setting,
                f"found '{name}' and another directory with the name {derived}, expected different names; make one a "
                "stage of kind import",
            )
        return self._resolver.nodes[derived]

    def directory_tokenizer(self, settings: ImportSettings) -> Node:
        name = f"{self.name}.tokenizer"  # from the import's name, because two directories may have the same name
        if name in self._resolver.recipe.stages:
            raise UserError(f"stage.{name}: this is the name of the tokenizer in {settings.path}; rename the stage")
        problem = None
        try:
            model_files(settings.path)
            require_adapter(settings)
        except UserError as error:
            problem = error  # more specific than the missing tokenizer
        path, template = tokenizer_of(settings)
        tokenizer = TokenizerSettings(type="file", path=path, template=template and str(template))
        return self._resolver.add(name, "tokenizer", tokenizer, {}, self.where, problem)

    def tokens(self, name: str, tokenizer: Node, setting: str) -> Node:
        source = self.stage(name, setting, "documents", "tokens")
        if KINDS[source.kind].makes == "tokens":
            if source.inputs["tokenizer"].key != tokenizer.key:
                encoder = source.inputs["tokenizer"].name
                self.refuse(setting, f"'{name}' was encoded by '{encoder}', expected '{tokenizer.name}'")
            return source
        derived = tokens_name(name, tokenizer.name)
        if derived not in self._resolver.nodes:
            check_turns(name, self.format_of(name), tokenizer, setting, self)
            settings = TokensSettings(corpus=name, tokenizer=tokenizer.name)
            self._resolver.add(derived, "tokens", settings, {"corpus": source, "tokenizer": tokenizer})
        return self._resolver.nodes[derived]

    def format_of(self, name: str) -> str:
        settings = self.settings_of(name)
        while not hasattr(settings, "format") and (
            source := getattr(settings, "corpus", None) or getattr(settings, "data", None)
        ):
            settings = self.settings_of(source)
        return "text" if isinstance(settings, TokenFilesSettings) else getattr(settings, "format", "text")


def _key(content: dict[str, Any], raw: str | None) -> str:
    return digest_json({**content, "raw": raw})[:20]
