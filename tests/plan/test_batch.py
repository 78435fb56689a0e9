"""C7, F5: rows of an update as micro-batch x accumulation x ranks, in the forward passes that the engine makes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.data.batches import Batch
from ingot.distributed.mesh import Mesh, current
from ingot.model.config import ModelSettings
from ingot.model.transformer import build
from ingot.objectives.lm import LanguageModel
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.plan.batch import accumulation
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution
from ingot.train.settings import LoopSettings
from tests.distributed.ranks import on_ranks

T = 4
"""Tokens of a row; the tables' have 1,024 or 2,048."""


class _Alike(Mesh):
    """Ranks that all hold as many rows as this one."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(self.size)


def _passes(rows: int, micro: int, ranks: int = 1, mesh: Mesh | None = None) -> tuple[list[int], int]:
    """The rows of each forward pass of a rank in one update, and the tokens of the update over all ranks."""
    model = build(ModelSettings(depth=1, width=8, heads=1, ffn=16, context=T).resolve(5), seed=1)
    plan = Plan(1, 1, Schedule("constant", 1e-3, 0, 0, 1), OptimSettings(), LoopSettings(), 10)
    execution = Execution("cpu", "fp32", 1, micro, "test", context=T)
    engine = Engine(model, LanguageModel(), plan, execution, mesh or _Alike(0, ranks), Path("unused"))
    passes: list[int] = []
    model.register_forward_hook(lambda _, inputs, out: passes.append(len(out.hidden)))
    own = rows // ranks
    ids = np.arange(own * T).reshape(own, T) % 5
    _, counts, _ = engine.gradients(Batch(ids, ids, ids, None, ids[:, 0], np.arange(own)))
    return passes, counts["token"]


@pytest.mark.parametrize(
    ("micro", "passes", "ranks", "rows", "tokens"),
    [
        (12, 4, 1, 48, 49_152),
        (12, 5, 8, 480, 491_520),
        (12, 40, 1, 480, 491_520),
        (12, 10, 4, 480, 491_520),
        (12, 64, 1, 768, 786_432),
        (32, 16, 1, 512, 524_288),
        (4, 32, 1, 128, 131_072),
        (16, 4, 1, 64, 65_536),
    ],
)
def test_c7_tables(micro: int, passes: int, ranks: int, rows: int, tokens: int) -> None:
    made, counted = _passes(rows, micro, ranks)
    assert made == [micro] * passes
    assert counted * 1024 // T == tokens
    assert accumulation(rows, micro, ranks) == passes


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tables"), [(8, [(480, 12, 5)]), (4, [(480, 12, 10), (768, 12, 16)])])
def test_c7_tables_on_real_ranks(ranks: int, tables: list[tuple[int, int, int]]) -> None:
    torch.set_num_threads(1)

    def rank(_: int) -> None:
        for rows, micro, passes in tables:
            assert _passes(rows, micro, ranks, current()) == ([micro] * passes, rows * T)

    on_ranks(ranks, rank)


def test_c7_llama_65b_step() -> None:
    made, counted = _passes(2048, 4, ranks=64)
    assert made == [4] * 8
    assert counted * 2048 // T == 4_194_304
    assert accumulation(2048, 4, ranks=64) == 8


@pytest.mark.parametrize(("ranks", "passes"), [(1, 128), (2, 64), (8, 16), (64, 2), (128, 1)])
def test_f5_accumulation_follows_the_world_size(ranks: int, passes: int) -> None:
    made, counted = _passes(512, 4, ranks)
    assert (made, counted) == ([4] * passes, 512 * T)
    assert accumulation(512, 4, ranks) == passes


def test_c7_a_short_last_pass_is_a_pass() -> None:
    assert _passes(10, 4)[0] == [4, 4, 2]
    assert _passes(10, 4, ranks=2)[0] == [4, 1]
    assert accumulation(10, 4) == 3
    assert accumulation(10, 4, ranks=2) == 2
