"""Our side of a measurement: `python -m ingot.bench.ours WHAT`, its job as JSON on standard input.

It computes as a stage's process does: same environment, same choices of hardware, same engine, same loader.
"""

import math
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ingot.bench.peaks import duration, gemm_flops, memory
from ingot.bench.peers.common import (
    BETAS,
    CLIP,
    EPS,
    LR,
    WEIGHT_DECAY,
    Clock,
    answer,
    device,
    peak_bytes,
    read_job,
    versions,
)
from ingot.data.batches import Batch, Loader, Source, make_batch
from ingot.data.packing import Windows
from ingot.dist.mesh import Mesh
from ingot.model.head import Head
from ingot.model.hf import write
from ingot.model.ops import cross_entropy
from ingot.model.settings import MAX_LOGITS, ModelConfig
from ingot.model.transformer import build
from ingot.objectives.lm import LanguageModel
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.plan.flops import attention_flops, training_flops
from ingot.text.store import Store
from ingot.text.tokenizer import Tokenizer
from ingot.train.api import Objective
from ingot.train.engine import Engine, Plan
from ingot.train.execution import AUTOCAST, choose, fastest_precision
from ingot.train.settings import LoopSettings

SEED = 1
"""Of the weights that everybody starts with."""


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


def engine_for(
    job: dict[str, Any],
    objective: Objective,
    rows: int,
    longest: int,
    companions: Mapping[str, nn.Module] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Engine:
    """An engine as a stage makes it, with the peers' optimizer and learning rate; it never ends and never evaluates.

    Args:
        rows: of an update.
        longest: tokens of a row.
        companions: frozen models by role, on any device.
    """
    config = ModelConfig.model_validate(job["config"])
    loop = LoopSettings.model_validate(job.get("loop", {}))
    optim = OptimSettings(betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip=CLIP)
    plan = Plan(10**6, SEED, Schedule("constant", LR, 0, 0, 1), optim, loop, 10**6)
    execution = choose(
        loop, job["precision"], longest, rows, depth=config.depth, flops=math.inf, common=config.common_block
    )
    execution.prepare()
    model = build(config, SEED, dtype=execution.parameter_dtype).to(execution.device)
    beside = {name: companion.to(execution.device) for name, companion in (companions or {}).items()}
    return Engine(model, objective, plan, execution, Mesh(), Path("."), beside, tokenizer=tokenizer)


def linear_flops(config: ModelConfig, named: Mapping[str, Tensor]) -> int:
    """6 N + 12 L d T with N of the matrices alone, as the peers count: gains and biases are no matrix products."""
    looked_up = {"position_embedding.weight", *(() if config.tied else ("embedding.weight",))}
    multiplied = sum(p.numel() for name, p in named.items() if p.dim() == 2 and name not in looked_up)
    attention = attention_flops(config.depth, config.heads * config.head_size, config.context)
    return training_flops(multiplied, 1) + attention


def batches(store: str, context: int, rows: int) -> Any:
    """0-based step -> its batch: rows in order, and then from the start."""
    opened = Store.open(Path(store))
    source = Source("made", opened, Windows(opened.ends, context), isolate=False)

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
    from ingot.bench.ours_generate import generation

    return generation(job)


def align(job: dict[str, Any]) -> dict[str, Any]:
    """Steps of post-training."""
    from ingot.bench.ours_align import align  # what only this needs would count as memory of the others

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
        loss, _ = cross_entropy(hidden_ND, Head(weight_VD), labels_N, max_logits=limit)
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
