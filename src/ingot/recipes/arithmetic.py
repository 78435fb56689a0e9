"""Sums of two numbers below 100 for grpo-arithmetic.toml: run it to write them.

Digits of an answer are reversed and fill three places, so that each follows from the two digits above it and a carry.
"""

import json
import random
from pathlib import Path

SHOWN = 4000
"""Sums in shown.jsonl, with answers to learn from; the other 6,000 are only asked."""


def answer(a: int, b: int) -> str:
    """57, 68 -> "521"."""
    return f"{a + b:03d}"[::-1]


def main() -> None:
    """Write all 10,000 sums, none in both files."""
    sums = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(sums)
    for name, part, field in (("shown", sums[:SHOWN], "completion"), ("asked", sums[SHOWN:], "answer")):
        rows = [{"prompt": f"{a:02d}+{b:02d}=", field: answer(a, b)} for a, b in part]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"wrote {name}.jsonl: {len(rows):,} sums")


if __name__ == "__main__":
    main()
