"""datatrove's quality filters one after another, or its masking of personal data; read JSONL, write JSONL."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

STEPS = {
    "rules": lambda: [GopherRepetitionFilter(), GopherQualityFilter(), C4QualityFilter(), FineWebQualityFilter()],
    "pii": lambda: [PIIFormatter(email_replacement="[EMAIL]")],
}


def main():
    """Run the steps with one process per core."""
    job = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory() as directory:
        data, cores = Path(directory) / "data", os.cpu_count() or 1
        reader = JsonlReader(job["corpus"], glob_pattern="*.jsonl*")
        pipeline = [reader, *STEPS[job["steps"]](), JsonlWriter(str(data), compression=None)]
        start = time.perf_counter()
        LocalPipelineExecutor(pipeline, tasks=cores, workers=cores, logging_dir=f"{directory}/logs").run()
        seconds = time.perf_counter() - start
        kept = sum(1 for file in data.iterdir() for _ in file.open())
    print(json.dumps({"seconds": seconds, "kept": kept}))


if __name__ == "__main__":
    main()
