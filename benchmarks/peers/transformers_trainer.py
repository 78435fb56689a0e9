"""transformers' Trainer with its defaults, except for the optimizer's settings and the batch; compiled on a GPU."""

import tempfile

import torch
from common import (
    BETAS,
    CLIP,
    EPS,
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
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers_model import build


class Dataset(torch.utils.data.Dataset):
    """The rows as a dataset of the Trainer."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return 1 << 24  # more than any measurement reads

    def __getitem__(self, number):
        ids, targets = self.rows.row(number)
        return {"input_ids": ids, "labels": targets, "shift_labels": targets}


class Timed(TrainerCallback):
    """Ends the training after the clock's last window."""

    def __init__(self, clock):
        self.clock, self.loss = clock, None

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = not self.clock.tick(self.loss)


class InOrder(Trainer):
    """The Trainer with rows in sequential order; it passes each step's loss to the callback."""

    timed = None

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args, **kwargs):
        self.timed.loss = loss = super().training_step(*args, **kwargs)
        return loss


def main():
    """Run the job."""
    job = read_job()
    model, shape = build(job), job["shape"]
    counts = work(model, shape["depth"], shape["heads"] * shape["head_size"], shape["context"])
    on_gpu = device() == "cuda"
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=shape["rows"],
            max_steps=1 << 20,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP,
            bf16=job["autocast"],
            use_cpu=not on_gpu,
            torch_compile=on_gpu,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        clock = Clock(job)
        timed = Timed(clock)
        trainer = InOrder(model=model, args=arguments, train_dataset=Dataset(Rows(job)), callbacks=[timed])
        trainer.timed = timed
        trainer.train()
    numbers = {**clock.result(), **counts, "peak_bytes": peak_bytes()}
    print_result({**numbers, "versions": versions("transformers", "accelerate")})


if __name__ == "__main__":
    main()
