"""transformers' model in a plain loop, with shifted labels, so that it predicts as many tokens as the other peers."""

from common import peak_bytes, print_result, read_job, train_plainly, versions, work
from transformers_model import build


def main():
    """Run the job."""
    job = read_job()
    model, shape = build(job), job["shape"]
    counts = work(model, shape["depth"], shape["heads"] * shape["head_size"], shape["context"])

    def loss_of(ids, targets):
        return model(input_ids=ids, labels=targets, shift_labels=targets, use_cache=False).loss

    result = train_plainly(job, model, loss_of)
    print_result({**result, **counts, "peak_bytes": peak_bytes(), "versions": versions("transformers")})


if __name__ == "__main__":
    main()
