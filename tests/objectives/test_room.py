"""What an objective must not know: no file of the room names an optimizer, a rank, a checkpoint or an adapter.

Read from the syntax trees, so from code and not from what docstrings explain. `pyproject.toml` forbids the imports too;
names are what an import does not show, `ctx.optimizer` say.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ingot.objectives

ROOM = Path(ingot.objectives.__file__).parent
FORBIDDEN = {
    *("optim", "optimizer", "optimizers", "adamw", "moments", "backward", "lr"),
    *("rank", "ranks", "mesh", "dist", "distributed", "world"),
    *("checkpoint", "checkpoints", "safetensors", "resume", "save"),
    *("adapter", "adapters", "lora", "dora", "peft"),
}


def _names(tree: ast.AST) -> Iterator[str]:
    """Every identifier: what is imported, defined, passed, read."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.name for alias in names)
                yield getattr(node, "module", None) or ""
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def _forbidden(code: str) -> set[str]:
    words = {word.lower() for name in _names(ast.parse(code)) for word in re.split(r"[._]|(?<=[a-z])(?=[A-Z])", name)}
    return words & FORBIDDEN


@pytest.mark.parametrize("file", sorted(ROOM.glob("*.py")), ids=lambda file: file.stem)
def test_no_objective_names_an_optimizer_a_rank_or_a_checkpoint(file: Path) -> None:
    assert _forbidden(file.read_text()) == set()


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("from ingot.distributed.mesh import Mesh", "mesh"),
        ("import torch.distributed as d", "distributed"),
        ("def loss(self, ctx): return ctx.engine.optimizer", "optimizer"),
        ("ctx.step(save_checkpoint=True)", "checkpoint"),
        ("class LoRAObjective: pass\ndef f(local_rank): pass", "rank"),
    ],
)
def test_control_a_name_anywhere_is_found(code: str, word: str) -> None:
    assert word in _forbidden(code)
    assert _forbidden(f'"""{code}"""  # {code.splitlines()[0]}') == set()
