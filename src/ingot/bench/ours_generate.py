"""Our side of `ingot bench generate`: greedy continuations with the KV cache, as generate and chat make them."""

import statistics
from typing import Any

import numpy as np
import torch

from ingot.bench.peaks import read_bytes
from ingot.bench.peers.common import device, peak_bytes, prompts, timed_generation, versions
from ingot.infer.decoder import Decoder
from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from ingot.model.settings import ModelConfig
from ingot.model.transformer import build


def generation(job: dict[str, Any]) -> dict[str, Any]:
    """The job's continuations, in its dtype."""
    config = ModelConfig.model_validate(job["config"])
    rows = list(prompts(job).numpy().astype(np.int64))
    dtype = getattr(torch, job["dtype"])
    decoder = Decoder(build(config, job["seed"]).to(device(), dtype), single=len(rows) == 1)

    def run(new: int) -> list[list[int]]:
        return [c.ids.tolist() for c in generate(decoder, rows, Sampling(max_new=new, temperature=0))]

    return {
        **timed_generation(job, run),
        "parameters": config.parameters,
        "peak_bytes": peak_bytes(),
        "read_gb_s": read_bytes(min(0.5, job["seconds"]), statistics.median) / 1e9,  # in the same minute
        "versions": versions(),
    }
