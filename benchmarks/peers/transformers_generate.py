"""transformers' `generate`, greedy, with its default cache."""

import torch
from common import device, peak_bytes, print_result, prompts, read_job, timed_generation, versions
from transformers_model import build


def main():
    """Run the job."""
    job = read_job()
    on = device()
    model = build(job).to(on, getattr(torch, job["dtype"])).eval()
    ids = prompts(job).to(on)
    mask = torch.ones_like(ids)

    def generate(new):
        output = model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=new, max_new_tokens=new)
        return output[:, ids.shape[1] :].tolist()

    result = timed_generation(job, generate)
    parameters = sum(p.numel() for p in model.parameters())
    print_result({**result, "parameters": parameters, "peak_bytes": peak_bytes(), "versions": versions("transformers")})


if __name__ == "__main__":
    main()
