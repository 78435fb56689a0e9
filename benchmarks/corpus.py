"""The workload of the corpus benchmark: generated prose in JSONL, and our process, `python -m benchmarks.corpus`.

One document in ten is too short to be kept, and one in twenty contains an e-mail address that every pipeline detects.
The numbers of kept documents and masked addresses therefore show whether two pipelines did the same work.
"""

import contextlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ingot.corpus.documents import iter_texts
from ingot.pipeline.graph import load_graphs
from ingot.pipeline.run import run

RECIPE = """
[run]
name = "bench"

[stage.text]
kind    = "corpus"
sources = ["{corpus}/*.jsonl"]
"""
FILES = 8


def write_prose(directory: Path, megabytes: float) -> dict[str, int]:
    """Write documents of 200 to 800 words to `FILES` files.

    Returns:
        `bytes`, `documents`, and the expected numbers of `kept` documents and `masked` addresses.
    """
    draw = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(5000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    directory.mkdir(parents=True)
    facts = {"bytes": 0, "documents": 0, "kept": 0, "masked": 0}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((directory / f"{i}.jsonl").open("w")) for i in range(FILES)]
        while facts["bytes"] < megabytes * 1e6:
            number = facts["documents"]
            short = number % 10 == 0
            document = draw.choices(words, weights, k=60 if short else draw.randint(200, 800))
            if number % 20 == 1:
                document[7] = f"{document[7]}@{document[8]}.org"
                facts["masked"] += 1
            lines = (" ".join(document[i : i + 15]).capitalize() + "." for i in range(0, len(document), 15))
            text = f"Entry {number}.\n" + "\n".join(lines)
            files[number % FILES].write(json.dumps({"id": str(number), "text": text}) + "\n")
            facts["bytes"] += len(text)
            facts["documents"] += 1
            facts["kept"] += not short
    return facts


def main() -> None:
    """Run a corpus stage with its default settings, and print its duration and counts."""
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as directory:
        root = Path(directory)
        recipe = root / "bench.toml"
        recipe.write_text(RECIPE.format(corpus=job["corpus"]))
        start = time.perf_counter()
        (graph,) = load_graphs(recipe, [], root)
        stage = run(graph, ["text"], lambda *_: None, quiet=True)["text"]
        seconds = time.perf_counter() - start
        texts = list(iter_texts(stage))
    print(json.dumps({"seconds": seconds, "kept": len(texts), "masked": sum(t.count("[EMAIL]") for t in texts)}))


if __name__ == "__main__":
    main()
