"""The Python door: `ingot.run("recipe.toml")`, `ingot.load("runs/x/base").generate("...")`."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ingot.core.errors import UserError
from ingot.pipeline.graph import load_graphs
from ingot.pipeline.run import require_files
from ingot.pipeline.sweep import run_all
from ingot.plan.memory import cache_bytes

if TYPE_CHECKING:
    from ingot.infer.decoder import Decoder
    from ingot.infer.streaming import Answer, TextGeneration
    from ingot.stages.models.load import Loaded
    from ingot.tokenizer.chat import Message

PRECISIONS = ("fp32", "bf16")
ROWS, CACHE_BYTES = 64, 1 << 30
"""Most rows that are continued together, and most bytes of keys and values; the other rows wait their turn. The texts
do not depend on either."""


def run(
    recipe: str | Path, *, set: str | Iterable[str] = (), only: str | Iterable[str] = (), out: str | Path = "runs"
) -> dict[str, Path]:
    """Bring a recipe's stages up to date, as `ingot run` does, without display.

    Args:
        recipe: the TOML file.
        set: overrides such as "stage.base.seed=2", one or several.
        only: the stage, or the stages, to bring up to date with what they need; all by default.
        out: output root.

    Returns: stage name -> its directory; of a recipe with a `[sweep]`, POINT/STAGE such as "lr=0.001,seed=1/base".
    """
    overrides, wanted = _listed(set), _listed(only)
    graphs = load_graphs(Path(recipe), overrides, Path(out))
    require_files(graphs, wanted)
    return run_all(graphs, wanted, lambda *_: None, quiet=True)


def _listed(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def load(stage: str | Path, *, device: str = "auto", best: bool = False, precision: str = "fp32") -> "LanguageModel":
    """Load a train stage's model and tokenizer.

    Args:
        stage: its directory, such as "runs/stdlib/base".
        device: where the weights go; "auto" takes a GPU if there is one.
        best: the weights with the lowest held-out loss instead of the last ones.
        precision: of the matrix products when it generates, "fp32" or "bf16".

    Raises:
        UserError: another precision, or no model there.
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision: found '{precision}', expected fp32 or bf16")
    from ingot.stages.models.load import load_model

    loaded = load_model(Path(stage), lambda text: print(text, file=sys.stderr), device=device, best=best)
    return LanguageModel(loaded, precision)


class Stream:
    """One continuation as it is made: iterate over pieces of text; `answer` has all of it."""

    def __init__(self, run: "TextGeneration"):
        self._run = run

    def __iter__(self) -> Iterator[str]:
        return (piece for _, piece in self._run.pieces)

    @property
    def answer(self) -> "Answer":
        """The whole text and what ended it; makes what has not been read yet."""
        return self._run.answers()[0]


@dataclass(frozen=True)
class LanguageModel:
    """A trained model that goes on from text and answers messages.

    All methods take the settings of `ingot.infer.sampling.Sampling` (max_new, temperature, top_k, top_p, min_p,
    repetition_penalty; the temperature is 0.8 by default), `stop` (a string, or several, that end a text and are cut
    off) and `seed` (the same seed gives the same text).
    """

    loaded: "Loaded"
    precision: str = "fp32"
    """Of the matrix products: "fp32", whose texts are the same on every machine up to rounding, or "bf16"."""

    _copies: "list[tuple[list[tuple[int, int]], Decoder]]" = field(
        init=False, default_factory=list, repr=False, compare=False
    )
    """The copy of the weights that generation reads, once there is one, behind where each of them lay and how often it
    had been changed."""

    def decoder(self) -> "Decoder":
        """The weights as generation needs them, copied at the first use and when they have changed."""
        import torch

        from ingot.infer.decoder import Decoder

        parameters = self.loaded.model.parameters()
        weights = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]  # which are not counted
        for copied, decoder in self._copies:
            if copied == weights:
                return decoder
        self._copies.clear()  # before the next copy is made, so that there are never two
        dtype = torch.bfloat16 if self.precision == "bf16" else None
        self._copies.append((weights, Decoder(self.loaded.model, dtype)))
        return self._copies[0][1]

    @overload
    def generate(self, prompt: str = "", **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], **options: Any) -> list[str]: ...
    def generate(self, prompt: str | Sequence[str] = "", **options: Any) -> str | list[str]:
        """The text that follows a prompt, or the texts that follow several."""
        if isinstance(prompt, str):
            return "".join(self.stream(prompt, **options))
        return [answer.text for answer in self.complete(prompt, **options)]

    def chat(self, messages: Sequence["Message"], **options: Any) -> str:
        """The assistant's next message, given messages such as {"role": "user", "content": "..."}."""
        if isinstance(messages, str):
            raise UserError('messages: found a text, expected a list such as [{"role": "user", "content": "..."}]')
        return "".join(self.stream(messages, **options))

    def stream(self, prompt: "str | Sequence[Message]", **options: Any) -> Stream:
        """The text that follows a prompt, or the answer to messages, piece by piece."""
        from ingot.infer.streaming import prompt_ids
        from ingot.tokenizer.chat import render

        if isinstance(prompt, str):
            return Stream(self._run([prompt_ids(self.loaded.tokenizer, prompt)], options))
        ids, _ = render(prompt, self.loaded.tokenizer, generation_prompt=True)
        return Stream(self._run([ids], options))

    def complete(self, prompts: Sequence[str], *, samples: int = 1, **options: Any) -> "Iterator[Answer]":
        """Several texts for each of several prompts, with their ids, log-probabilities and what ended them.

        Returns: prompts x samples answers as batches are done; number i * samples + j is sample j of prompt i.
        """
        from ingot.infer.generate import check_prompts
        from ingot.infer.sampling import Sampling
        from ingot.infer.streaming import prompt_ids

        if isinstance(prompts, str):
            raise UserError("prompts: found a text, expected a list of texts; `generate` goes on from one")
        encoded = [prompt_ids(self.loaded.tokenizer, prompt) for prompt in prompts]
        check_prompts(self.loaded.model, encoded, samples)
        rows = self._rows(encoded, options.get("max_new", Sampling.max_new))
        together = max(1, rows // samples)
        for row in range(0, len(encoded), together):
            batch = encoded[row : row + together]
            for sample in range(0, samples, rows):  # once, or over the samples of a single prompt
                keys = [(row + place, sample) for place in range(len(batch))]
                yield from self._run(batch, options, min(rows, samples - sample), keys).answers()

    def lm_eval(self) -> Any:
        """The model as EleutherAI's lm-eval takes it: `lm_eval.simple_evaluate(model=..., tasks=["arc_easy"])`."""
        from ingot.evaluate.harness import adapter

        return adapter(self.loaded.model, self.loaded.tokenizer)

    def _rows(self, prompts: Sequence[list[int]], max_new: int) -> int:
        """How many rows are continued together."""
        config = self.loaded.config
        positions = min(config.context, max(map(len, prompts), default=0) + max_new)
        row = cache_bytes(config.depth, config.kv_heads * config.head_size, positions, element_bytes=4)
        return max(1, min(ROWS, CACHE_BYTES // row))

    def _run(
        self,
        prompts: Sequence[Any],
        options: dict[str, Any],
        samples: int = 1,
        keys: Sequence[tuple[int, int]] | None = None,
    ) -> "TextGeneration":
        from ingot.infer.streaming import TextGeneration, sampling_for

        settings = {"temperature": 0.8, **options}
        run = {name: settings.pop(name) for name in ("stop", "seed", "step") if name in settings}
        sampling = sampling_for(self.loaded.tokenizer, **settings)
        decoder = self.decoder()
        return TextGeneration(decoder, self.loaded.tokenizer, prompts, sampling, samples=samples, keys=keys, **run)
