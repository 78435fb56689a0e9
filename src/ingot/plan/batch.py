"""Gradient accumulation."""

import math


def accumulation(rows: int, micro: int, ranks: int = 1) -> int:
    """Micro-batches per update and rank: micro x accumulation x ranks = rows (the last micro-batch may be smaller)."""
    return math.ceil(rows / (micro * ranks))
