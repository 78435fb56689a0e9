"""The Python API: `ingot.run("recipe.toml")["base"].numbers`, `ingot.load("runs/x/base").generate("...")`."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ingot.core.errors import StageFailed, UserError, notify, print_message
from ingot.core.recipe import Recipe
from ingot.pipeline.graph import load_graphs
from ingot.pipeline.run import require_files
from ingot.pipeline.status import status
from ingot.pipeline.sweep import run_all
from ingot.plan.memory import cache_bytes
from ingot.report.sweep import write_any_report
from ingot.results import ProgressLines, Results, StageResult

if TYPE_CHECKING:
    import numpy as np

    from ingot.infer.decoder import Decoder
    from ingot.infer.streaming import Answer, TextGeneration
    from ingot.stages.models.load import LoadedModel
    from ingot.tokenizer.chat import Message

PRECISIONS = ("fp32", "bf16")
MAX_ROWS, MAX_CACHE_BYTES = 64, 1 << 30
"""Most rows of a batch, and most bytes of its KV cache. The generated texts do not depend on them."""


def run(
    recipe: "str | os.PathLike[str] | Mapping[str, Any] | Recipe",
    *,
    set: str | Iterable[str] = (),
    only: str | Iterable[str] = (),
    out: str | os.PathLike[str] = "runs",
    quiet: bool = False,
) -> Results:
    """Run a recipe's stages as `ingot run` does. Finished stages are not repeated. Progress goes to standard error; in
    a notebook the line of a running stage is updated in place.

    Args:
        recipe: a TOML file, its content as a dict, or a `Recipe`. Paths in it are relative to the working directory.
        set: overrides such as "stage.base.seed=2", one or several.
        only: one stage or several, which are run with the stages that they need; all by default.
        out: output root.
        quiet: print no progress.

    Returns:
        The stages by name, and the run's page; with a `[sweep]` the names are POINT/STAGE, such as
        "lr=0.001,seed=1/base".

    Raises:
        UserError: the recipe is invalid, or files that it needs are missing.
        StageFailed: a stage failed; the message names it and says why.
    """
    overrides, stages = _as_list(set), _as_list(only)
    source = recipe.table if isinstance(recipe, Recipe) else recipe
    graphs = load_graphs(source if isinstance(source, Mapping) else Path(source), overrides, Path(out))
    require_files(graphs, stages)
    try:
        with ProgressLines(graphs, quiet) as progress:
            done = run_all(graphs, stages, progress.stage, progress.point, quiet=True)
    except StageFailed as error:
        failed = {n.name: s.why for g in graphs for n in g.needed(stages) if (s := status(g, n)).state == "FAILED"}
        raise StageFailed(error.code, "; ".join(f"{name}: {why}" for name, why in failed.items())) from None
    finally:  # an unfinished run gets a page too
        page = write_any_report(graphs)
    return Results(page, {name: StageResult(directory) for name, directory in done.items()})


def _as_list(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def load(
    stage: str | os.PathLike[str],
    *,
    device: str = "auto",
    best: bool = False,
    precision: str = "fp32",
    step: int | None = None,
) -> "LanguageModel":
    """Load a train stage's model and tokenizer.

    Args:
        stage: its directory, such as "runs/stdlib/base", or the stage in what `run` returned.
        device: where the weights go; "auto" takes a GPU if there is one.
        best: load the best checkpoint (lowest held-out loss) instead of the last one.
        precision: of matrix multiplications in generation, "fp32" or "bf16".
        step: load the checkpoint of this step, where it still exists, instead of the last one.

    Raises:
        UserError: the precision is unknown, the directory has no model, or its checkpoint is damaged.
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision: found '{precision}', expected fp32 or bf16")
    from ingot.infer.forks import allow_forks
    from ingot.stages.models.load import load_model

    allow_forks()
    loaded = load_model(Path(stage), print_message, device=device, best=best, step=step)
    return LanguageModel(loaded, precision)


class Stream:
    """A text that is generated while it is read: an iterator over pieces of text; `answer` is the complete text."""

    def __init__(self, run: "TextGeneration"):
        self._run = run

    def __iter__(self) -> Iterator[str]:
        return (piece for _, piece in self._run.pieces)

    @property
    def answer(self) -> "Answer":
        """The complete text and the reason it ended. Generates what has not been read yet."""
        return self._run.answers()[0]


@dataclass(frozen=True)
class LanguageModel:
    """A trained model that continues text and answers messages.

    The generating methods take the settings of `ingot.infer.sampling.Sampling` (max_new, temperature, top_k, top_p,
    min_p, repetition_penalty; the default temperature is 0.8), `stop` (one string or several, which end a text and are
    removed from it) and `seed` (the same seed gives the same text).
    """

    loaded: "LoadedModel"
    precision: str = "fp32"
    """Of matrix multiplications: "fp32", which gives the same texts on every machine up to rounding, or "bf16"."""

    _process: int = field(init=False, default_factory=os.getpid, repr=False, compare=False)
    """Id of the process that loaded the model."""
    _decoders: "list[tuple[list[tuple[int, int]], Decoder]]" = field(
        init=False, default_factory=list, repr=False, compare=False
    )
    """At most one decoder, with the address and the version of each parameter that it copied."""

    def decoder(self) -> "Decoder":
        """A decoder with a copy of the weights, built at the first use and again after the weights have changed.

        Raises:
            UserError: the process was forked after the model was loaded to a GPU.
        """
        self._check_process()
        import torch

        from ingot.infer.decoder import Decoder

        parameters = self.loaded.model.parameters()
        versions = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]
        for copied, decoder in self._decoders:
            if copied == versions:
                return decoder
        self._decoders.clear()  # before the next copy, so that memory never holds two
        dtype = torch.bfloat16 if self.precision == "bf16" else None
        self._decoders.append((versions, Decoder(self.loaded.model, dtype)))
        return self._decoders[0][1]

    @overload
    def generate(self, prompt: str = "", **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], **options: Any) -> list[str]: ...
    def generate(self, prompt: str | Sequence[str] = "", **options: Any) -> str | list[str]:
        """Continue a prompt, or several."""
        if isinstance(prompt, str):
            return "".join(self.stream(prompt, **options))
        return [answer.text for answer in self.complete(prompt, **options)]

    def chat(self, messages: Sequence["Message"], **options: Any) -> str:
        """The assistant's next message, given messages such as {"role": "user", "content": "..."}."""
        if isinstance(messages, str):
            raise UserError('messages: found a text, expected a list such as [{"role": "user", "content": "..."}]')
        return "".join(self.stream(messages, **options))

    def stream(self, prompt: "str | Sequence[Message]", **options: Any) -> Stream:
        """Continue a prompt, or answer messages, piece by piece."""
        from ingot.infer.streaming import prompt_ids
        from ingot.tokenizer.chat import render

        if isinstance(prompt, str):
            return Stream(self._run([prompt_ids(self.loaded.tokenizer, prompt)], options))
        ids, _ = render(prompt, self.loaded.tokenizer, generation_prompt=True)
        return Stream(self._run([ids], options))

    def complete(self, prompts: Sequence[str], *, samples: int = 1, **options: Any) -> "Iterator[Answer]":
        """Generate several texts for each of several prompts, with token ids, log-probabilities and stop reasons.

        Yields:
            prompts x samples answers, as batches finish; number i * samples + j is sample j of prompt i.
        """
        from ingot.infer.generate import check_prompts
        from ingot.infer.sampling import Sampling
        from ingot.infer.streaming import prompt_ids

        if isinstance(prompts, str):
            raise UserError("prompts: found a text, expected a list of texts; use `generate` for a single one")
        encoded = [prompt_ids(self.loaded.tokenizer, prompt) for prompt in prompts]
        check_prompts(self.loaded.model, encoded, samples)
        rows = self._rows(encoded, options.get("max_new", Sampling.max_new))
        prompts_per_batch = max(1, rows // samples)
        for first in range(0, len(encoded), prompts_per_batch):
            batch = encoded[first : first + prompts_per_batch]
            for sample in range(0, samples, rows):  # more than once where a single prompt has more samples than rows
                keys = [(first + i, sample) for i in range(len(batch))]
                yield from self._run(batch, options, min(rows, samples - sample), keys).answers()

    def log_probs(self, text: str) -> "np.ndarray":
        """ln p of each token of a text given the ones before it, [N] float64 in nats; the tokens are
        `loaded.tokenizer.encode(text)`. NaN for the first one if the tokenizer has no token that begins a text.

        Raises:
            UserError: the text is longer than the model's context.
        """
        import numpy as np
        import torch

        from ingot.model.losses import token_logps

        self._check_process()
        start, tokens = self.loaded.tokenizer.start_ids, self.loaded.tokenizer.encode(text).tolist()
        most = self.loaded.config.context + 1 - len(start)
        if len(tokens) > most:
            raise UserError(f"text: found {len(tokens):,} tokens, expected at most {most:,}; shorten it")
        model, logps = self.loaded.model.eval(), np.full(len(tokens), np.nan)
        ids_T = torch.tensor([*start, *tokens], device=model.embedding.weight.device)
        if len(ids_T) > 1:
            with torch.inference_mode():
                out = model(ids_T[None, :-1])
                predicted = token_logps(out.hidden, out.head, ids_T[None, 1:])[0].double().cpu().numpy()
            known = min(len(tokens), len(predicted))
            logps[len(tokens) - known :] = predicted[len(predicted) - known :]
        return logps

    @overload
    def score(self, conversation: "Sequence[Message]") -> float: ...
    @overload
    def score(self, conversation: "Sequence[Sequence[Message]]") -> list[float]: ...
    def score(self, conversation: "Sequence[Message] | Sequence[Sequence[Message]]") -> float | list[float]:
        """The reward of a conversation that ends with the assistant's answer, or of several. It is in units of the
        standard deviation of held-out answers, 0 for the mean of the preferred ones; NaN for a conversation that is
        longer than the model's context.

        Raises:
            UserError: the stage is no reward model, or the chat format cannot render a conversation.
        """
        import numpy as np

        from ingot.objectives.settings import scores_rows
        from ingot.stages.job import read_record
        from ingot.stages.models.load import companion
        from ingot.stages.models.reward_scores import score_rows
        from ingot.tokenizer.chat import length_to_last_target, render

        self._check_process()
        stage = self.loaded.checkpoint.parents[1]
        if not scores_rows(read_record(stage)["settings"]):
            raise UserError(f'{stage}: found no reward model, expected a train stage with objective = "reward"')
        one = bool(conversation) and isinstance(conversation[0], Mapping)
        conversations: Any = [conversation] if one else conversation
        rendered = [render(messages, self.loaded.tokenizer) for messages in conversations]
        rows = [ids[: length_to_last_target(mask)].astype(np.int64) for ids, mask in rendered]
        scores = score_rows(companion(stage, self.loaded).eval(), rows).tolist()
        return scores[0] if one else scores

    def lm_eval(self) -> Any:
        """An adapter for EleutherAI's lm-eval: `lm_eval.simple_evaluate(model=..., tasks=["arc_easy"])`."""
        from ingot.evaluate.harness import adapter

        self._check_process()
        return adapter(self.loaded.model, self.loaded.tokenizer)

    def _check_process(self) -> None:
        """Notice a fork after the model was loaded."""
        if os.getpid() == self._process:
            return
        advice = 'load it in each process, which multiprocessing starts with its method "spawn"'
        if self.loaded.model.embedding.weight.is_cuda:
            raise UserError(
                f"found a process that was forked after the model was loaded to a GPU, which cannot use it; {advice}"
            )
        notify(f"this process was forked after the model was loaded, so it computes with one thread; {advice}")

    def _rows(self, prompts: Sequence[list[int]], max_new: int) -> int:
        """Rows of a batch."""
        config = self.loaded.config
        positions = min(config.context, max(map(len, prompts), default=0) + max_new)
        row_bytes = cache_bytes(config.depth, config.kv_heads * config.head_size, positions, element_bytes=4)
        return max(1, min(MAX_ROWS, MAX_CACHE_BYTES // row_bytes))

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
