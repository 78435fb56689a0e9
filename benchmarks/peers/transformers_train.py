"""transformers' Llama in a plain loop. Labels are given shifted, so that it predicts as many tokens as the others."""

from common import answer, peak_bytes, read_job, train_plainly, versions, work
from transformers_model import build


def main():
    """Train as the job says."""
    job = read_job()
    model, shape = build(job), job["shape"]
    done = work(model, shape["depth"], shape["heads"] * shape["head_size"], shape["context"])

    def loss_of(ids, targets):
        return model(input_ids=ids, labels=targets, shift_labels=targets, use_cache=False).loss

    result = train_plainly(job, model, loss_of)
    answer({**result, **done, "peak_bytes": peak_bytes(), "versions": versions("transformers")})


if __name__ == "__main__":
    main()
