"""trl's DPO, GRPO and PPO trainers with their defaults, except for the batch, lengths, optimizer and the job's tuning.

Each id is a word, so that the speed of a tokenizer is not measured. No id ends a completion, so all completions have
the maximum length.
"""

import contextlib
import tempfile

import torch
from common import (
    BETAS,
    CLIP,
    EPS,
    LR,
    WEIGHT_DECAY,
    Clock,
    peak_bytes,
    preferences,
    print_result,
    questions,
    read_job,
    record_updates,
    versions,
)
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers_model import build
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.experimental.ppo import PPOConfig, PPOTrainer


class Timed(TrainerCallback):
    """Times steps, and ends the training after the clock's last window."""

    def __init__(self, clock):
        self.clock, self.tokens, self.loss = clock, 0, torch.zeros(())

    def on_step_end(self, args, state, control, **kwargs):
        if not self.clock.tick(self.loss):
            control.should_training_stop = True
            if isinstance(args, PPOConfig):
                raise Finished  # PPOTrainer ignores should_training_stop


class Finished(Exception):
    """Ends a PPO training."""


class RecordingDPOTrainer(DPOTrainer):
    """The trainer; it passes each step's loss and number of trained tokens to the callback."""

    timed = None

    def training_step(self, model, inputs, *args, **kwargs):
        self.timed.tokens = int(inputs["completion_mask"].sum())
        self.timed.loss = loss = super().training_step(model, inputs, *args, **kwargs)
        return loss


def tokenizer(job, end):
    """A tokenizer whose words are ids; `<end>` is the model's last id, and `<never>` is not an id of the model."""
    vocab = job["shape"]["vocab"]
    words = {f"{i}": i for i in range(vocab - 1)} | {"<end>": vocab - 1, "<never>": vocab}
    word_level = Tokenizer(models.WordLevel(words, unk_token="0"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=word_level, eos_token=end, pad_token="<never>", padding_side="left")


def text(ids):
    """Ids as words."""
    return " ".join(map(str, ids))


def common_arguments(job, directory, rows):
    """Arguments of all trainers."""
    return {
        "output_dir": directory,
        "per_device_train_batch_size": rows,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": CLIP,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        **job.get("tuned", {}),
    }


def dpo(job, directory, timed):
    """A DPO trainer whose dataset is exactly one batch of pairs."""
    pairs, prompt = preferences(job), job["prompt"]
    rows = [
        {
            "prompt": text(chosen[:prompt]),
            "chosen": f" {text(chosen[prompt:-1])} <end>",
            "rejected": f" {text(rejected[prompt:-1])} <end>",
        }
        for chosen, rejected in pairs
    ]
    trainer = RecordingDPOTrainer(
        model=build(job),
        ref_model=build(job),
        args=DPOConfig(**common_arguments(job, directory, len(pairs)), max_steps=1 << 20),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(job, "<end>"),
        callbacks=[timed],
    )
    trainer.timed = timed
    return trainer


def grpo(job, directory, timed):
    """A GRPO trainer with a reward function of the completions' texts."""

    def reward(completions, completion_ids, **kwargs):
        timed.tokens = sum(map(len, completion_ids))
        return [words.count("3") / job["new"] for words in completions]

    prompts = [text(ids) for ids in questions(job, job["rollouts"] // job["group"])]
    config = GRPOConfig(
        **common_arguments(job, directory, job["rollouts"]),
        max_steps=1 << 20,
        num_generations=job["group"],
        max_completion_length=job["new"],
    )
    return GRPOTrainer(
        model=build(job),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(job, "<never>"),
        callbacks=[timed],
    )


def ppo(job, directory, timed):
    """A PPO trainer with a policy, its reference, a reward model and a value model of the same shape."""
    rows = questions(job, job["rollouts"])
    policy, reference, reward, value = build(job), build(job), build(job), build(job)
    scorers = []
    for trunk in (reward, value):
        trunk.config.num_labels = 1
        scorer = LlamaForSequenceClassification(trunk.config)
        scorer.model = trunk.model
        scorers.append(scorer)
    config = PPOConfig(
        **common_arguments(job, directory, len(rows)),
        total_episodes=1 << 30,
        response_length=job["new"],
        temperature=1.0,
        num_ppo_epochs=job["epochs"],
        local_rollout_forward_batch_size=len(rows),
        num_sample_generations=0,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer(job, "<never>"),
        model=policy,
        ref_model=reference,
        reward_model=scorers[0],
        value_model=scorers[1],
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        callbacks=[timed],
    )

    def count_tokens(module, args, kwargs):
        timed.tokens = (kwargs["input_ids"].shape[1] - job["prompt"]) * len(rows)

    scorers[0].model.register_forward_pre_hook(count_tokens, with_kwargs=True)
    return trainer


def main():
    """Run the job."""
    job = read_job()
    timed, updates = Timed(Clock(job)), record_updates()
    with tempfile.TemporaryDirectory() as directory:
        trainer = {"dpo": dpo, "grpo": grpo, "ppo": ppo}[job["method"]](job, directory, timed)
        with contextlib.suppress(Finished):
            trainer.train()
    result = timed.clock.result()
    print_result(
        {
            **result,
            "losses": result["losses"] if job["method"] == "dpo" else [],
            "parameters": sum(p.numel() for p in build(job).parameters()),
            "updates": len(updates) / timed.clock.steps,
            "learned": timed.tokens,
            "peak_bytes": peak_bytes(),
            "precision": "bf16" if trainer.args.bf16 else "fp32",
            "versions": versions("trl", "transformers", "accelerate"),
        }
    )


if __name__ == "__main__":
    main()
