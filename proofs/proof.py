"""What a proof is, and the results that are kept of it.

A result belongs to (proof, arm, seed) and to the code that made it: the proof's file and all that it imports, of the
product and of the proofs, as syntax trees without comments. It is a file of its own, written whole, so a run that was
stopped goes on, and nothing that was shown with other code is shown again.
"""

import ast
import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ingot
from ingot.core.artifact import atomic_json, digest_json

Numbers = Mapping[str, Any]
"""What an arm measured: numbers by name, and lists of them where a figure needs curves."""
_ROOTS = {"ingot": Path(ingot.__file__).parent, "proofs": Path(__file__).parent}
_BESIDE = ("ingot.core.", "proofs.proof", "proofs.figures")
"""What is imported, but decides no result: recipes and files, how a result is kept and shown."""


@dataclass(frozen=True)
class Gate:
    """A number of an arm must lie between two others."""

    number: str
    low: float = -math.inf
    high: float = math.inf
    why: str = ""
    """Where the borders come from, if they are not the specification's own."""

    def holds(self, numbers: Numbers) -> bool:
        return self.low <= numbers[self.number] <= self.high  # false of a NaN

    def __str__(self) -> str:
        parts = [f"{self.low:g} <= "] if self.low > -math.inf else []
        return "".join([*parts, self.number, f" <= {self.high:g}" if self.high < math.inf else ""])


@dataclass(frozen=True)
class Arm:
    """One way to run the experiment; of a control, at least one gate must not hold."""

    name: str
    gates: Sequence[Gate]
    control: bool = False

    def passes(self, numbers: Numbers) -> bool:
        return all(gate.holds(numbers) for gate in self.gates) != self.control

    def worst(self, every: Sequence[Numbers], gate: Gate) -> float:
        """The number of the seed that is nearest to missing the gate, or furthest beyond it."""
        return min(
            (float(numbers[gate.number]) for numbers in every),
            key=lambda x: min(x - gate.low, gate.high - x) if not math.isnan(x) else -math.inf,
        )


@dataclass(frozen=True)
class Proof:
    """An experiment with a known answer."""

    id: str
    claim: str
    answer: str
    """What is known, and from where."""
    run: Callable[[int, str], Numbers]
    """(seed, arm's name) -> what was measured; decides nothing."""
    arms: Sequence[Arm]
    note: str = ""
    """What a reader must know of the numbers: why a gate is where it is, what was seen."""
    figure: Callable[[Mapping[str, Sequence[Numbers]]], str] | None = None
    """Results of the seeds by arm -> a picture (SVG)."""

    def key(self, arm: Arm, seed: int) -> str:
        """Of a result: changes with all that determines it. Gates do not: they judge."""
        file = inspect.getfile(self.run)
        return digest_json([self.id, arm.name, seed, _syntax_of(file, "run"), _imported(Path(file))])


class Results:
    """Finished results, a file each."""

    def __init__(self, directory: Path):
        self.directory = directory

    def path(self, proof: Proof, arm: Arm, seed: int) -> Path:
        name = "".join(c if c.isalnum() else "-" for c in arm.name)
        return self.directory / f"{proof.id}.{name}.{seed}.{proof.key(arm, seed)[:12]}.json"

    def read(self, proof: Proof, arm: Arm, seed: int) -> dict[str, Any] | None:
        path = self.path(proof, arm, seed)
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, proof: Proof, arm: Arm, seed: int, numbers: Numbers, seconds: float) -> dict[str, Any]:
        """Keep a result, and return it as `read` does."""
        known = {"proof": proof.id, "arm": arm.name, "seed": seed, "seconds": round(seconds, 1), "numbers": numbers}
        atomic_json(self.path(proof, arm, seed), known)
        return known


def _imported(file: Path) -> dict[str, str]:
    """Module -> digest of its syntax tree, of all modules that a file imports, and those import, whenever they do."""
    found: dict[str, str] = {}
    waiting = [*_module(file)[1]]
    while waiting:
        name = waiting.pop()
        root, *rest = name.split(".")
        if name in found or name.startswith(_BESIDE) or root not in _ROOTS or not rest:
            continue
        module = _ROOTS[root].joinpath(*rest).with_suffix(".py")
        if module.exists():
            found[name], more = _module(module)
            waiting += more
    return found


@functools.cache
def _module(file: Path) -> tuple[str, tuple[str, ...]]:
    """Digest of a module's syntax tree, and what could be modules in its imports."""
    tree = ast.parse(file.read_text())
    nodes = list(ast.walk(tree))
    whole = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    parts = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    named = [f"{n.module}.{alias.name}" for n in parts for alias in n.names]
    return digest_json(_bare(tree)), (*whole, *named, *(str(n.module) for n in parts))


def _syntax_of(file: str, name: str) -> str:
    """The same of a proof's file but for its `PROOF` or `PROOFS`: texts and gates decide no result."""
    tree = ast.parse(Path(file).read_text())
    tree.body = [
        n for n in tree.body if not (isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in ("PROOF", "PROOFS"))
    ]
    return digest_json([name, _bare(tree)])


def _bare(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]  # type: ignore[attr-defined]
    return ast.dump(tree)
