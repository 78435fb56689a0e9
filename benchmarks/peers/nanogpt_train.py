"""nanoGPT's model in a loop like its own; on a GPU compiled, in bf16, with fused AdamW and pinned batches."""

import contextlib
import os
import sys
from pathlib import Path

import torch
from common import (
    BETAS,
    CLIP,
    LR,
    WEIGHT_DECAY,
    Clock,
    Rows,
    device,
    peak_bytes,
    print_result,
    read_job,
    versions,
    work,
)

sys.path.append(os.environ.get("INGOT_PEER_NANOGPT_SOURCE") or str(Path(sys.prefix) / "source"))
from model import GPT, GPTConfig


def build(job):
    """The model with the job's weights, which are in transformers' layout: Conv1D matrices are transposed."""
    shape = job["shape"]
    model = GPT(
        GPTConfig(
            block_size=shape["context"],
            vocab_size=shape["vocab"],
            n_layer=shape["depth"],
            n_head=shape["heads"],
            n_embd=shape["width"],
            dropout=0.0,
            bias=True,
        )
    )
    tensors = torch.load(job["weights"], weights_only=True)
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = {name: tensor.t() if name.endswith(transposed) else tensor for name, tensor in tensors.items()}
    model.load_state_dict(weights | {"lm_head.weight": weights["transformer.wte.weight"]})
    return model


def main():
    """Run the job; in bf16 on a GPU, which is nanoGPT's default."""
    job, on = read_job(), device()
    model, shape = build(job).to(on), job["shape"]
    counts = work(model, shape["depth"], shape["width"], shape["context"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    optimizer = model.configure_optimizers(WEIGHT_DECAY, LR, BETAS, on)
    bf16 = job["autocast"] or on == "cuda"
    context = torch.autocast(on, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()
    if on == "cuda":
        model = torch.compile(model)
    rows, clock, step, running = Rows(job), Clock(job), 0, True

    def batch():
        tensors = rows.batch(step)
        return tensors if on == "cpu" else [tensor.pin_memory().to(on, non_blocking=True) for tensor in tensors]

    ids, targets = batch()
    while running:
        with context:
            _, loss = model(ids, targets)
        step += 1
        ids, targets = batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running = clock.tick(loss)
    precision = "bf16" if bf16 else "fp32"
    print_result(
        {**clock.result(), **counts, "peak_bytes": peak_bytes(), "precision": precision, "versions": versions()}
    )


if __name__ == "__main__":
    main()
