"""What a proof is, and the results that are kept of it.

A result belongs to (proof, arm, seed) and to the code that made it: the proof's file, the worlds, and the rooms of the
product that learn, as syntax trees without comments. It is a file of its own, written whole, so a run that was stopped
goes on, and nothing that was shown with other code is shown again.
"""

import ast
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ingot
from ingot.core.artifact import atomic_json, digest_json

Numbers = Mapping[str, Any]
"""What an arm measured: numbers by name, and lists of them where a figure needs curves."""
_ROOT = Path(ingot.__file__).parent
ROOMS = (
    "data",
    "infer",
    "model",
    "objectives",
    "optim",
    "text/base.py",
    "text/store.py",
    "train",
    "evaluate/fisher.py",
)
"""Code of the product that decides what a proof measures."""


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
    needs: Sequence[str] = field(default=())
    """Further files, of this directory or of the product, whose code decides the result."""

    def key(self, arm: Arm, seed: int) -> str:
        """Of a result: changes with all that determines it. Gates do not: they judge."""
        return digest_json([self.id, arm.name, seed, _syntax_of(inspect.getfile(self.run), "run"), self._code()])

    def _code(self) -> dict[str, str]:
        here = Path(__file__).parent
        files = [here / name if (here / name).exists() else _ROOT / name for name in ("worlds.py", *self.needs)]
        for room in ROOMS:
            files += [_ROOT / room] if room.endswith(".py") else sorted((_ROOT / room).rglob("*.py"))
        return {str(file.relative_to(_ROOT if _ROOT in file.parents else here)): _syntax(file) for file in files}


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


_TREES: dict[str, str] = {}


def _syntax(file: Path) -> str:
    """Digest of a file's syntax tree without docstrings."""
    if str(file) not in _TREES:
        _TREES[str(file)] = digest_json(_bare(ast.parse(file.read_text())))
    return _TREES[str(file)]


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
