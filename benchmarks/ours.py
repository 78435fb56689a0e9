"""Our side of a measurement: `python -m benchmarks.ours WHAT`, its job as JSON on standard input.

It computes as a stage's process does: same environment, same choices of hardware, same engine, same loader.
"""

import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.ours_engine import SEED, engine_for
from benchmarks.peaks import duration, gemm_flops, memory
from benchmarks.peers.common import (
    Clock,
    answer,
    device,
    peak_bytes,
    read_job,
    versions,
)
from ingot.convert.hf_weights import write
from ingot.data.batches import Batch, Loader, Source, make_batch
from ingot.data.packing import Concatenated
from ingot.model.config import MAX_LOGITS, ModelConfig
from ingot.model.lm_head import LMHead
from ingot.model.losses import cross_entropy
from ingot.model.transformer import build
from ingot.objectives.lm import LanguageModel
from ingot.plan.flops import attention_flops, training_flops
from ingot.store.reader import Store
from ingot.train.engine import Engine
from ingot.train.execution import AUTOCAST, fastest_precision


def weights(job: dict[str, Any]) -> dict[str, Any]:
    """Write the initial weights under their names in transformers, for the peers."""
    from safetensors.torch import load_file

    directory, path = Path(job["directory"]), job["weights"]
    config = ModelConfig.model_validate(job["config"])
    write(directory, config, dict(build(config, SEED).named_parameters()))
    torch.save(load_file(directory / "model.safetensors"), path)
    (directory / "model.safetensors").unlink()
    return {"weights": path}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """The engine's steps on the rows that the peers train on, in the same order."""
    config = ModelConfig.model_validate(job["config"])
    rows, context = job["shape"]["rows"], config.context
    engine = engine_for(job, LanguageModel(), rows, context)
    clock, execution = Clock(job), engine.execution
    loader = Loader(batches(job["store"], context, rows), 0, 10**6)
    try:
        steps = iter(loader)
        while clock.tick(engine.step(next(steps)).loss):
            pass
        if job.get("profile"):
            profile(engine, next(steps))
    finally:
        loader.close()
    return {
        **clock.result(),
        "parameters": sum(p.numel() for p in engine.named.values()),
        "flops_per_token": linear_flops(config, engine.named),
        "peak_bytes": peak_bytes(),
        "execution": execution.line(),
        "precision": execution.precision,
        "versions": versions(),
    }


def linear_flops(config: ModelConfig, named: Mapping[str, Tensor]) -> int:
    """6 N + 12 L d T with N of the matrices alone, as the peers count: gains and biases are no matrix products."""
    looked_up = {"position_embedding.weight", *(() if config.tied else ("embedding.weight",))}
    multiplied = sum(p.numel() for name, p in named.items() if p.dim() == 2 and name not in looked_up)
    attention = attention_flops(config.depth, config.heads * config.head_size, config.context)
    return training_flops(multiplied, 1) + attention


def batches(store: str, context: int, rows: int) -> Any:
    """0-based step -> its batch: rows in order, and then from the start."""
    opened = Store.open(Path(store))
    source = Source("made", opened, Concatenated(opened.ends, context), isolate=False)

    def make(step: int) -> Batch:
        row_B = np.arange(step * rows, (step + 1) * rows) % source.plan.rows
        return make_batch([source], np.zeros_like(row_B), row_B)

    return make


def profile(engine: Engine, batch: Batch, steps: int = 5) -> None:
    """Print what a step spends its time on, to standard error."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(steps):
            engine.step(batch)
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=60)
    print(f"{steps} steps\n{table}", file=sys.stderr)


def machine(job: dict[str, Any]) -> dict[str, Any]:
    """What the machine can do at most, and with which torch: matrix products, reading memory."""
    on_gpu = torch.cuda.is_available()
    fastest, _ = fastest_precision("cuda" if on_gpu else "cpu")  # without units one product in bf16 takes a minute
    peaks = {
        p: gemm_flops(AUTOCAST.get(p, torch.float32), job["seconds"]) for p in sorted({"fp32", fastest}, reverse=True)
    }
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        **{f"gemm_{precision}_gflop_s": round(flops / 1e9, 1) for precision, flops in peaks.items()},
        "read_gb_s": round(memory()(job["seconds"]) / 1e9, 1),
    }


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Greedy continuations."""
    from benchmarks.ours_generate import generation

    return generation(job)


def align(job: dict[str, Any]) -> dict[str, Any]:
    """Steps of post-training."""
    from benchmarks.ours_align import align  # what only this needs would count as memory of the others

    return align(job)


def loader(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds to make a batch, the median, on this thread."""
    make = batches(job["store"], job["shape"]["context"], job["shape"]["rows"])
    times, began = [], time.perf_counter()
    while len(times) < 20 or time.perf_counter() - began < min(1.0, job["seconds"]):
        start = time.perf_counter()
        make(len(times))
        times.append(time.perf_counter() - start)
    return {"batch_s": statistics.median(times)}


def head(job: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients over a large vocabulary; its logits in chunks, as always, or all at once."""
    where = device()
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    hidden_ND = torch.randn(job["tokens"], job["width"], device=where, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(job["vocab"], job["width"], device=where, dtype=dtype, requires_grad=True)
    labels_N = torch.randint(job["vocab"], (job["tokens"],), device=where)
    limit = MAX_LOGITS["cpu"] if job["chunked"] else job["tokens"] * job["vocab"]

    def step() -> None:
        hidden_ND.grad = weight_VD.grad = None
        loss, _ = cross_entropy(hidden_ND, LMHead(weight_VD), labels_N, max_logits=limit)
        loss.backward()

    return {"seconds": duration(step, job["seconds"]), "peak_bytes": peak_bytes()}


WHAT = {
    "train": train,
    "weights": weights,
    "machine": machine,
    "generate": generate,
    "loader": loader,
    "head": head,
    "align": align,
}


def main() -> None:
    """Do what the argument says."""
    answer(WHAT[sys.argv[1]](read_job()))


if __name__ == "__main__":
    main()
