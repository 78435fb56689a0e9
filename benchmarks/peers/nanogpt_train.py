"""nanoGPT's model in a loop like its own: on a GPU compiled, in bf16, with its fused AdamW and pinned batches."""

import contextlib
import os
import sys
from pathlib import Path

import torch
from common import BETAS, CLIP, LR, WEIGHT_DECAY, Clock, Rows, answer, device, peak_bytes, read_job, versions, work

sys.path.append(os.environ.get("INGOT_PEER_NANOGPT_SOURCE") or str(Path(sys.prefix) / "source"))
from model import GPT, GPTConfig


def build(job):
    """The model of that shape with the weights given, whose matrices transformers keeps transposed."""
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
    given = torch.load(job["weights"], weights_only=True)
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = {name: tensor.t() if name.endswith(turned) else tensor for name, tensor in given.items()}
    model.load_state_dict(weights | {"lm_head.weight": weights["transformer.wte.weight"]})
    return model


def main():
    """Train as the job says; in bf16 on a GPU, as it is shipped."""
    job, where = read_job(), device()
    model, shape = build(job).to(where), job["shape"]
    done = work(model, shape["depth"], shape["width"], shape["context"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    optimizer = model.configure_optimizers(WEIGHT_DECAY, LR, BETAS, where)
    low = job["autocast"] or where == "cuda"
    context = torch.autocast(where, dtype=torch.bfloat16) if low else contextlib.nullcontext()
    if where == "cuda":
        model = torch.compile(model)
    rows, clock, step, going = Rows(job), Clock(job), 0, True

    def batch():
        parts = rows.batch(step)
        return parts if where == "cpu" else [part.pin_memory().to(where, non_blocking=True) for part in parts]

    ids, targets = batch()
    while going:
        with context:
            _, loss = model(ids, targets)
        step += 1
        ids, targets = batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        going = clock.tick(loss)
    precision = "bf16" if low else "fp32"
    answer({**clock.result(), **done, "peak_bytes": peak_bytes(), "precision": precision, "versions": versions()})


if __name__ == "__main__":
    main()
