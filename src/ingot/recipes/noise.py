"""Text that no model has seen, for ablations.toml: run it to write noise.txt, random letters and signs."""

import random
import string
from pathlib import Path

LINES = 4000


def main() -> None:
    """Write lines of 80 random characters."""
    draw = random.Random(0)
    signs = string.ascii_letters + string.digits + string.punctuation
    lines = ("".join(draw.choices(signs, k=80)) for _ in range(LINES))
    Path("noise.txt").write_text("\n".join(lines) + "\n")
    print(f"wrote noise.txt: {LINES:,} lines")


if __name__ == "__main__":
    main()
