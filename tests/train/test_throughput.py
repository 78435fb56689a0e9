"""Which rank the others wait for."""

import pytest

from ingot.train.throughput import straggler


@pytest.mark.parametrize(
    ("waiting", "seconds", "rank"),
    [
        ([0.3, 0.02, 0.31, 0.3], 600, 1),
        ([0.3, 0.28, 0.31, 0.3], 600, None),
        ([0.3, 0.02], 20, None),
        ([0.0], 600, None),
    ],
)
def test_D11_the_rank_that_keeps_the_others_waiting_is_named(
    waiting: list[float], seconds: float, rank: int | None
) -> None:
    sentence = straggler(waiting, seconds)
    assert sentence is None if rank is None else sentence and sentence.startswith(f"rank {rank} is the slowest")
