"""transformers' own `generate`, greedy, with its defaults for the cache."""

import torch
from common import answer, device, peak_bytes, prompts, read_job, timed_generation, versions
from transformers_model import build


def main():
    """Generate as the job says."""
    job = read_job()
    where = device()
    model = build(job).to(where, getattr(torch, job["dtype"])).eval()
    ids = prompts(job).to(where)
    attend = torch.ones_like(ids)

    def generate(new):
        made = model.generate(ids, attention_mask=attend, do_sample=False, min_new_tokens=new, max_new_tokens=new)
        return made[:, ids.shape[1] :].tolist()

    result = timed_generation(job, generate)
    parameters = sum(p.numel() for p in model.parameters())
    answer({**result, "parameters": parameters, "peak_bytes": peak_bytes(), "versions": versions("transformers")})


if __name__ == "__main__":
    main()
