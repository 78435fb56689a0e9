"""C7, F5: rows of an update as micro-batch x accumulation x ranks."""

import pytest

from ingot.plan.batch import accumulation


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
    assert accumulation(rows, micro, ranks) == passes
    assert micro * passes * ranks == rows
    assert rows * 1024 == tokens


def test_c7_llama_65b_step() -> None:
    assert 2048 * 2048 == 4_194_304
    assert accumulation(2048, 4, ranks=64) == 8


@pytest.mark.parametrize(("ranks", "passes"), [(1, 128), (2, 64), (8, 16), (64, 2), (128, 1)])
def test_f5_accumulation_follows_the_world_size(ranks: int, passes: int) -> None:
    assert accumulation(512, 4, ranks) == passes


def test_c7_a_short_last_pass_is_a_pass() -> None:
    assert accumulation(10, 4) == 3
    assert accumulation(10, 4, ranks=2) == 2
