"""datatrove's local executor: read JSONL, mask e-mail addresses, filter documents, write JSONL."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter


def is_kept(document):
    """The bounds for prose of our corpus stage."""
    words = document.text.split()
    if not 128 <= len(words) <= 4096:
        return False
    if not 3 <= sum(map(len, words)) / len(words) <= 10:
        return False
    special = sum(not (c.isalnum() or c.isspace()) for c in document.text)
    return special <= 0.3 * len(document.text) and len({w.lower() for w in words}) >= 0.2 * len(words)


def main():
    """Run the pipeline with one process per core."""
    job = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        pipeline = [
            JsonlReader(job["corpus"]),
            PIIFormatter(email_replacement="[EMAIL]"),
            LambdaFilter(is_kept),
            JsonlWriter(str(data), compression=None),
        ]
        start = time.perf_counter()
        LocalPipelineExecutor(pipeline, tasks=os.cpu_count() or 1, logging_dir=f"{directory}/logs").run()
        seconds = time.perf_counter() - start
        texts = [json.loads(line)["text"] for file in data.iterdir() for line in file.open()]
    print(json.dumps({"seconds": seconds, "kept": len(texts), "masked": sum(t.count("[EMAIL]") for t in texts)}))


if __name__ == "__main__":
    main()
