"""Samples answers from a model of ours.

The random numbers of an answer are keyed by (seed, split, prompt, sample), so answers depend neither on batching nor on
interruptions. Finished batches are saved in small files, with which a killed stage resumes.
"""

import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from ingot.core.artifact import atomic_json, read_json
from ingot.infer.generate import generate
from ingot.infer.streaming import completion_text, sampling_for
from ingot.stages.job import Job
from ingot.stages.models.load import load_model
from ingot.stages.synthesis.settings import GenerateSettings
from ingot.tokenizer.chat import render
from ingot.tokenizer.template_sandbox import ConversationRefused

_BATCHES = "parts"
"""Directory of the finished batches of an unfinished stage."""


class LocalModel:
    """The model of a train or import stage (`generate.py: Writer`)."""

    def __init__(self, job: Job, settings: GenerateSettings):
        self.name, self._job, self._settings = job.inputs["model"].name, job, settings
        self._loaded = load_model(job.inputs["model"].path, job.display.notify, settings.device, exact=True)

    def __call__(
        self, split: int, number: int, requests: Sequence[tuple[int, Any]]
    ) -> list[list[dict[str, Any]] | str]:
        """The answers to each request of a batch, sampled now or read from an earlier attempt.

        A prompt that fills the context has no answers.
        """
        path = self._job.out / _BATCHES / f"{('train', 'val')[split]}-{number:06d}.json"
        if path.exists():
            return read_json(path)
        prompts: list[np.ndarray] = []
        answers: list[list[dict[str, Any]] | str] = [[] for _ in requests]
        fits: list[int] = []
        for i, (_, messages) in enumerate(requests):
            try:
                ids, _ = render(messages, self._loaded.tokenizer, generation_prompt=True)
            except ConversationRefused as error:
                answers[i] = str(error)
                continue
            if len(ids) < self._loaded.config.context:
                prompts.append(ids)
                fits.append(i)
        samples = self._settings.samples
        sampled = self._sample(prompts, split, [(requests[i][0], 0) for i in fits])
        for n, i in enumerate(fits):
            answers[i] = sampled[n * samples : (n + 1) * samples]
        atomic_json(path, answers)
        return answers

    def _sample(
        self, prompts: Sequence[np.ndarray], split: int, keys: Sequence[tuple[int, int]]
    ) -> list[dict[str, Any]]:
        settings, tokenizer = self._settings, self._loaded.tokenizer
        sampling = sampling_for(
            tokenizer, max_new=settings.max_new, temperature=settings.temperature, top_p=settings.top_p
        )
        completions = generate(
            self._loaded.model, prompts, sampling, samples=settings.samples, seed=self._job.seed, step=split, keys=keys
        )
        return [
            {"text": completion_text(tokenizer, c), "tokens": len(c.ids), "ended": c.stop_reason == "stop"}
            for c in completions
        ]

    def finish(self) -> dict[str, int]:
        """Remove the saved batches. No further numbers of the result."""
        shutil.rmtree(self._job.out / _BATCHES, ignore_errors=True)
        return {}
