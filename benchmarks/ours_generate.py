"""Our side of `python -m benchmarks generate`: greedy continuations with the KV cache."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.peaks import memory
from benchmarks.peers.common import device, peak_bytes, prompts, timed_generation, versions
from ingot.infer.decoder import Decoder
from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from ingot.model.config import ModelConfig
from ingot.model.transformer import build

TURNS = 5
"""How often a step and memory are measured, one after the other."""


def generation(job: dict[str, Any]) -> dict[str, Any]:
    """The job's continuations, in its dtype."""
    config = ModelConfig.model_validate(job["config"])
    rows = list(prompts(job).numpy().astype(np.int64))
    dtype = getattr(torch, job["dtype"])
    decoder = Decoder(build(config, job["seed"]).to(device(), dtype))

    def run(new: int) -> list[list[int]]:
        return [c.ids.tolist() for c in generate(decoder, rows, Sampling(max_new=new, temperature=0))]

    return {
        **timed_generation(job, run),
        "parameters": config.parameters,
        "peak_bytes": peak_bytes(),  # before memory is read, which takes some of it
        "in_turn": _in_turn(job, run) if len(rows) == 1 else [],
        "versions": versions(),
    }


def _in_turn(job: dict[str, Any], run: Callable[[int], object]) -> list[tuple[float, float]]:
    """Seconds of a step, and GB/s at which memory is read right then, `TURNS` times: where others share the memory both
    change from second to second, and only their product is of the code."""
    read = memory(statistics.median)
    return [(timed_generation({**job, "seconds": 0}, run)["token_s"], read(0.2) / 1e9) for _ in range(TURNS)]
