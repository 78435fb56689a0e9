"""Our side of a measurement: `python -m benchmarks.ours COMMAND`, with its job as JSON on standard input.

It works like a stage's process: the same environment, execution choices, engine and loader.
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
from benchmarks.peaks import memory_reader
from benchmarks.peers.common import (
    Clock,
    device,
    peak_bytes,
    print_result,
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
from ingot.train.gemm import duration, gemm_flops


def weights(job: dict[str, Any]) -> dict[str, Any]:
    """Write the initial weights for the peers, with transformers' names."""
    from safetensors.torch import load_file

    directory, path = Path(job["directory"]), job["weights"]
    config = ModelConfig.model_validate(job["config"])
    write(directory, config, dict(build(config, SEED).named_parameters()))
    torch.save(load_file(directory / "model.safetensors"), path)
    (directory / "model.safetensors").unlink()
    return {"weights": path}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Training steps of the engine, on the same rows in the same order as the peers."""
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
        "execution": execution.summary(),
        "precision": execution.precision,
        "versions": versions(),
    }


def linear_flops(config: ModelConfig, named: Mapping[str, Tensor]) -> int:
    """FLOPs per token, 6 N + 12 L d T; N counts only matrices of products, as for the peers, not gains and biases."""
    lookups = {"position_embedding.weight", *(() if config.tied else ("embedding.weight",))}
    matrices = sum(p.numel() for name, p in named.items() if p.dim() == 2 and name not in lookups)
    attention = attention_flops(config.depth, config.heads * config.head_size, config.context)
    return training_flops(matrices, 1) + attention


def batches(store: str, context: int, rows: int) -> Any:
    """A function from a 0-based step to its batch: rows in order, repeated from the start."""
    opened = Store.open(Path(store))
    source = Source("made", opened, Concatenated(opened.ends, context), isolate=False)

    def make(step: int) -> Batch:
        row_B = np.arange(step * rows, (step + 1) * rows) % source.plan.rows
        return make_batch([source], np.zeros_like(row_B), row_B)

    return make


def profile(engine: Engine, batch: Batch, steps: int = 5) -> None:
    """Print a profile of some steps to standard error."""
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
    """Peak rates of matrix products and of reading memory, and the device."""
    on_gpu = torch.cuda.is_available()
    fastest, _ = fastest_precision("cuda" if on_gpu else "cpu")  # bf16 without instructions for it takes a minute
    peaks = {
        p: gemm_flops(AUTOCAST.get(p, torch.float32), job["seconds"]) for p in sorted({"fp32", fastest}, reverse=True)
    }
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        **{f"gemm_{precision}_gflop_s": round(flops / 1e9, 1) for precision, flops in peaks.items()},
        "read_gb_s": round(memory_reader()(job["seconds"]) / 1e9, 1),
    }


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Greedy continuations."""
    from benchmarks.ours_generate import generation  # imported here so that it does not count as memory of `train`

    return generation(job)


def align(job: dict[str, Any]) -> dict[str, Any]:
    """Steps of post-training."""
    from benchmarks.ours_align import align  # imported here so that it does not count as memory of `train`

    return align(job)


def loader(job: dict[str, Any]) -> dict[str, Any]:
    """The median of seconds to make a batch on this thread."""
    make = batches(job["store"], job["shape"]["context"], job["shape"]["rows"])
    times, window_start = [], time.perf_counter()
    while len(times) < 20 or time.perf_counter() - window_start < min(1.0, job["seconds"]):
        start = time.perf_counter()
        make(len(times))
        times.append(time.perf_counter() - start)
    return {"batch_s": statistics.median(times)}


def head(job: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of an LM head with a large vocabulary; with `chunked`, logits are computed in chunks."""
    on = device()
    dtype = torch.bfloat16 if on == "cuda" else torch.float32
    hidden_ND = torch.randn(job["tokens"], job["width"], device=on, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(job["vocab"], job["width"], device=on, dtype=dtype, requires_grad=True)
    labels_N = torch.randint(job["vocab"], (job["tokens"],), device=on)
    limit = MAX_LOGITS["cpu"] if job["chunked"] else job["tokens"] * job["vocab"]

    def step() -> None:
        hidden_ND.grad = weight_VD.grad = None
        loss, _ = cross_entropy(hidden_ND[None], LMHead(weight_VD), labels_N[None], max_logits=limit)
        loss.backward()

    return {"seconds": duration(step, job["seconds"]), "peak_bytes": peak_bytes()}


COMMANDS = {
    "train": train,
    "weights": weights,
    "machine": machine,
    "generate": generate,
    "loader": loader,
    "head": head,
    "align": align,
}


def main() -> None:
    """Run the command that the argument names."""
    print_result(COMMANDS[sys.argv[1]](read_job()))


if __name__ == "__main__":
    main()
