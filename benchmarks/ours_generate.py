"""Our side of `python -m benchmarks generate`: greedy continuations with the KV cache."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.peaks import memory_reader
from benchmarks.peers.common import device, peak_bytes, prompts, timed_generation, versions
from ingot.infer.decoder import Decoder
from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from ingot.model.config import ModelConfig
from ingot.model.transformer import build
from ingot.stages.models.backend import backend_for

FLOOR_TURNS = 5
"""Number of times that a step and the memory bandwidth are measured in turns."""


def generation(job: dict[str, Any]) -> dict[str, Any]:
    """Times of the job's continuations."""
    config = ModelConfig.model_validate(job["config"])
    rows = list(prompts(job).numpy().astype(np.int64))
    dtype = getattr(torch, job["dtype"])
    model = build(config, job["seed"]).to(device(), dtype)
    model.backend = backend_for(model, device(), dtype)
    decoder = Decoder(model)

    def run(new: int) -> list[list[int]]:
        return [c.ids.tolist() for c in generate(decoder, rows, Sampling(max_new=new, temperature=0))]

    return {
        **timed_generation(job, run),
        "parameters": config.parameters,
        "peak_bytes": peak_bytes(),  # before measuring the memory bandwidth, which allocates memory
        "in_turn": _step_and_bandwidth(job, run) if len(rows) == 1 else [],
        "versions": versions(),
    }


def _step_and_bandwidth(job: dict[str, Any], run: Callable[[int], object]) -> list[tuple[float, float]]:
    """Pairs of seconds per step and memory bandwidth in GB/s, measured one after the other.

    On shared memory both change from second to second; only their product is a property of the code.
    """
    read = memory_reader(statistics.median)
    return [(timed_generation({**job, "seconds": 0}, run)["token_s"], read(0.2) / 1e9) for _ in range(FLOOR_TURNS)]
