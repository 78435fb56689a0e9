"""Answers of a model behind an endpoint."""

from collections.abc import Sequence
from typing import Any

from ingot.core.errors import UserError
from ingot.data.sampler import key_of
from ingot.stages.job import Job
from ingot.stages.synthesis.endpoint import Endpoint
from ingot.stages.synthesis.settings import EndpointSettings, GenerateSettings

_SEED_BITS = 31


class RemoteModel:
    """A model that answers over the network (`generate.py: Writer`).

    Args:
        job: the job of the stage.
        settings: how to sample.
        endpoint: whom to ask.
        requests: requests of the complete stage.

    Raises:
        UserError: there is no key, or there are more requests than the limit.
    """

    def __init__(self, job: Job, settings: GenerateSettings, endpoint: EndpointSettings, requests: int):
        if requests > endpoint.max_requests:
            raise UserError(
                f"endpoint.max_requests: found {requests:,} answers to ask for, expected at most "
                f"{endpoint.max_requests:,}; raise it, or lower prompts or samples"
            )
        self.name, self._seed, self._settings = endpoint.model, job.seed, settings
        self._endpoint = Endpoint(endpoint)

    def __call__(
        self, split: int, number: int, requests: Sequence[tuple[int, Any]]
    ) -> list[list[dict[str, Any]] | str]:
        """The answers to each request. Each is asked for alone, with a seed of its own, so that it is kept alone."""
        samples = self._settings.samples
        replies = self._endpoint.ask(
            [self._fields(messages, split, i, s) for i, messages in requests for s in range(samples)]
        )
        answers = [
            {"text": r.text, "tokens": r.tokens, "ended": r.ended, "filtered": r.filtered}
            | ({"reasoning": r.reasoning} if r.reasoning else {})
            for r in replies
        ]
        return [answers[n : n + samples] for n in range(0, len(answers), samples)]

    def _fields(self, messages: Any, split: int, index: int, sample: int) -> dict[str, Any]:
        settings = self._settings
        return {
            "messages": [{"role": m["role"], "content": m["content"]} for m in messages],
            "max_tokens": settings.max_new,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": key_of(self._seed, split, index, sample) >> (64 - _SEED_BITS),
        }

    def finish(self) -> dict[str, int]:
        """The answers that were asked for, and their tokens with those of the prompts."""
        return {"requests": self._endpoint.requests, "total_tokens": self._endpoint.total_tokens}
