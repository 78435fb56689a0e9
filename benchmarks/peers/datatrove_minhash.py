"""datatrove's near-duplicate removal: signatures, buckets, clusters, filter; read JSONL, write JSONL."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig


def main():
    """Run the four stages with one process per core."""
    job = json.loads(sys.stdin.readline())
    config = MinhashConfig(hash_config=HashConfig(precision=64), num_buckets=14, hashes_per_bucket=8)
    with tempfile.TemporaryDirectory() as directory:
        data, cores = Path(directory) / "data", os.cpu_count() or 1
        reader = JsonlReader(job["corpus"], glob_pattern="*.jsonl*")
        signatures, buckets, removed = (f"{directory}/{name}" for name in ("signatures", "buckets", "removed"))
        stages = [
            ([reader, MinhashDedupSignature(output_folder=signatures, config=config)], cores),
            ([MinhashDedupBuckets(input_folder=signatures, output_folder=buckets, config=config)], 14),
            ([MinhashDedupCluster(input_folder=buckets, output_folder=removed, config=config)], 1),
            ([reader, MinhashDedupFilter(input_folder=removed), JsonlWriter(str(data), compression=None)], cores),
        ]
        start = time.perf_counter()
        for number, (pipeline, tasks) in enumerate(stages):
            logs = f"{directory}/logs/{number}"
            LocalPipelineExecutor(pipeline, tasks=tasks, workers=cores, logging_dir=logs).run()
        seconds = time.perf_counter() - start
        kept = [json.loads(line)["id"] for file in data.iterdir() for line in file.open()]
    print(json.dumps({"seconds": seconds, "kept": len(kept), "ids": kept}))


if __name__ == "__main__":
    main()
