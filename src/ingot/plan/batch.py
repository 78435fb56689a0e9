"""How the rows of an update are split over forward passes and ranks."""

import math


def accumulation(rows: int, micro: int, ranks: int = 1) -> int:
    """Forward passes an update and rank: micro x accumulation x ranks = rows (the last pass may be short)."""
    return math.ceil(rows / (micro * ranks))
