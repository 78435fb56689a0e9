"""The types of a proof, and the storage of its results.

A result belongs to (proof, arm, seed) and to a digest of the code: the syntax trees, without comments, of the proof's
file and of everything that it imports from ingot and proofs. Each result is a file that is written atomically, so an
interrupted run resumes, and a result of other code is never used.
"""

import ast
import functools
import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ingot
from ingot.core.artifact import atomic_json, digest_json

Numbers = Mapping[str, Any]
"""Measurements of an arm by name: numbers, and lists of numbers for the curves of a figure."""
_ROOTS = {"ingot": Path(ingot.__file__).parent, "proofs": Path(__file__).parent}
_IGNORED = ("ingot.core.", "proofs.proof", "proofs.figures")
"""Prefixes of imported modules that do not influence results: recipes, files, and the display of results."""


@dataclass(frozen=True)
class Gate:
    """A bound on a measurement: low <= number <= high."""

    number: str
    low: float = -math.inf
    high: float = math.inf
    why: str = ""
    """The reason for the bounds, if it is not obvious from the proof's answer."""

    def holds(self, numbers: Numbers) -> bool:
        return self.low <= numbers[self.number] <= self.high  # false for NaN

    def __str__(self) -> str:
        parts = [f"{self.low:g} <= "] if self.low > -math.inf else []
        return "".join([*parts, self.number, f" <= {self.high:g}" if self.high < math.inf else ""])


@dataclass(frozen=True)
class Arm:
    """A variant of the experiment; all its gates must hold, and for a control at least one must not."""

    name: str
    gates: Sequence[Gate]
    control: bool = False

    def passes(self, numbers: Numbers) -> bool:
        return all(gate.holds(numbers) for gate in self.gates) != self.control

    def worst(self, by_seed: Sequence[Numbers], gate: Gate) -> float:
        """The measurement of the seed that is nearest to failing the gate, or fails it by most."""
        return min(
            (float(numbers[gate.number]) for numbers in by_seed),
            key=lambda x: min(x - gate.low, gate.high - x) if not math.isnan(x) else -math.inf,
        )


@dataclass(frozen=True)
class Proof:
    """An experiment with a known answer."""

    id: str
    claim: str
    answer: str
    """The known answer and its source."""
    run: Callable[[int, str], Numbers]
    """(seed, arm's name) -> measurements."""
    arms: Sequence[Arm]
    note: str = ""
    """Remarks on the measurements for the page."""
    figure: Callable[[Mapping[str, Sequence[Numbers]]], str] | None = None
    """Arm's name -> measurements of each seed -> a figure (SVG)."""

    def key(self, arm: Arm, seed: int) -> str:
        """The key of a result: a digest of everything that determines it, which gates do not."""
        file = inspect.getfile(self.run)
        return digest_json([self.id, arm.name, seed, _syntax_of(file, "run"), _imported(Path(file))])


class Results:
    """A directory of results, one file each."""

    def __init__(self, directory: Path):
        self.directory = directory

    def path(self, proof: Proof, arm: Arm, seed: int) -> Path:
        name = "".join(c if c.isalnum() else "-" for c in arm.name)
        return self.directory / f"{proof.id}.{name}.{seed}.{proof.key(arm, seed)[:12]}.json"

    def read(self, proof: Proof, arm: Arm, seed: int) -> dict[str, Any] | None:
        path = self.path(proof, arm, seed)
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, proof: Proof, arm: Arm, seed: int, numbers: Numbers, seconds: float) -> dict[str, Any]:
        """Store a result and return it as `read` does."""
        result = {"proof": proof.id, "arm": arm.name, "seed": seed, "seconds": round(seconds, 1), "numbers": numbers}
        atomic_json(self.path(proof, arm, seed), result)
        return result


def run_arm(proof: Proof, arm: Arm, seed: int, results: Results) -> bool:
    """Run an arm unless it has a result, and print the outcome; whether it is the expected one."""
    result = results.read(proof, arm, seed)
    if result is None:
        start = time.perf_counter()
        numbers = proof.run(seed, arm.name)
        result = results.write(proof, arm, seed, numbers, time.perf_counter() - start)
    passed = arm.passes(result["numbers"])
    numbers = ", ".join(f"{n} {v:.5g}" for n, v in result["numbers"].items() if isinstance(v, int | float))
    kind = "control" if arm.control else "arm"
    outcome = "as expected" if passed else "NOT AS EXPECTED"
    print(f"{proof.id} {kind} '{arm.name}' seed {seed}: {outcome} ({result['seconds']:.0f} s): {numbers}", flush=True)
    return passed


def _imported(file: Path) -> dict[str, str]:
    """Module -> digest of its syntax tree, for all modules that a file imports directly or indirectly.

    Imports inside functions count too.
    """
    digests: dict[str, str] = {}
    queue = [*_module(file)[1]]
    while queue:
        name = queue.pop()
        root, *rest = name.split(".")
        if name in digests or name.startswith(_IGNORED) or root not in _ROOTS or not rest:
            continue
        module = _ROOTS[root].joinpath(*rest).with_suffix(".py")
        if module.exists():
            digests[name], imports = _module(module)
            queue += imports
    return digests


@functools.cache
def _module(file: Path) -> tuple[str, tuple[str, ...]]:
    """Digest of a module's syntax tree, and all names in its imports that may be modules."""
    tree = ast.parse(file.read_text())
    nodes = list(ast.walk(tree))
    modules = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    imports_from = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    members = [f"{n.module}.{alias.name}" for n in imports_from for alias in n.names]
    return digest_json(_dump(tree)), (*modules, *members, *(str(n.module) for n in imports_from))


def _syntax_of(file: str, name: str) -> str:
    """Digest of a proof's file without its `PROOF` or `PROOFS`, whose texts and gates do not influence results."""
    tree = ast.parse(Path(file).read_text())
    tree.body = [
        n for n in tree.body if not (isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in ("PROOF", "PROOFS"))
    ]
    return digest_json([name, _dump(tree)])


def _dump(tree: ast.AST) -> str:
    """The syntax tree as text, without docstrings and other constant expressions."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]  # type: ignore[attr-defined]
    return ast.dump(tree)
