"""Evaluation of a train stage on held-out rows, during training and at the end."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from ingot.data.batches import Batch, Source, all_rows
from ingot.infer.generate import generate
from ingot.infer.streaming import sampling_for
from ingot.stages.job import Job
from ingot.stages.training.data import Data
from ingot.stages.training.settings import TrainSettings
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.engine import Engine
from ingot.train.settings import rows_per_pass
from ingot.train.verdict import PARTS, mean_error


class Evaluation:
    """Measures the objective's metrics on held-out rows of every source, and on training rows, and logs a sample.

    Means over sources are weighted by their fractions in the complete run, so that phases are comparable.

    Args:
        job: the job of the stage.
        settings: its settings.
        engine: the engine that trains.
        data: the sources.
        fractions: source -> its fraction of the tokens of the run.
        tokenizer: the tokenizer.
    """

    def __init__(
        self,
        job: Job,
        settings: TrainSettings,
        engine: Engine,
        data: Data,
        fractions: dict[str, float],
        tokenizer: Tokenizer,
    ):
        self.job, self.settings, self.engine, self.tokenizer = job, settings, engine, tokenizer
        self.data, self.fractions = data, fractions
        self.sampled = engine.objective.needs.samples

    def __call__(self, step: int, final: bool) -> dict[str, float]:
        """Evaluate after a step.

        Args:
            step: the step.
            final: whether training has ended. All held-out rows are used then, otherwise about `evaluate.tokens` of
                each source.
        """
        metrics, bits_per_byte, parts = self._measure(self.data.held_out, "val", final)
        if final:
            return metrics | bits_per_byte | self._final_metrics()
        if parts and (self.engine.state["evaluated"] is None or step == self.engine.plan.steps):
            self.job.log.write("parts", step=step, values=parts)
        if not self.sampled:  # on policy, every step logs the reward of new samples already
            metrics |= self._measure(self.data.train_sources, "train", final=False)[0]
        if self.settings.evaluate.sample is not False and self.engine.objective.needs.generates_text:
            self.job.log.write("sample", step=step, **self._sample(step))
        return metrics

    def _measure(
        self, sources: list[Source], prefix: str, final: bool
    ) -> tuple[dict[str, float], dict[str, float], dict[str, list[float]]]:
        """Metrics of each source and their weighted means; bits per byte where every token is a target; and the losses
        or rewards of the parts of each source's rows."""
        values: dict[str, dict[str, float]] = {}  # metric -> source -> value
        bits, nll = {}, self.engine.objective.needs.loss_is_nll
        parts: dict[str, list[float]] = {}
        for source in sources:
            limit = None if final else self._rows(source)
            loss, counts, others, of_parts, rows = self.engine.evaluate(self._batches(source, prefix, limit))
            without_loss = self.sampled or source.replay
            if not source.replay:
                parts[source.name] = of_parts
            if "reward_std" in others:
                others["reward_se"] = mean_error(others["reward_std"], rows)
            for name, value in (others if without_loss else {"loss_nats": loss, **others}).items():
                values.setdefault(f"{prefix}_{name}", {})[source.name] = value
            if nll and final and not without_loss and counts["token"] == source.store.tokens - 1:  # all but the first
                bits[f"bits_per_byte/{source.name}"] = loss * counts["token"] / math.log(2) / source.store.bytes
        if len(sources) == 1 and bits:
            bits = {"bits_per_byte": next(iter(bits.values()))}
        means = {
            name: float(np.average(list(by.values()), weights=[self.fractions[source] for source in by]))
            for name, by in values.items()
        }
        several = {name: by for name, by in values.items() if len(by) > 1}
        by_source = {f"{name}/{source}": value for name, by in several.items() for source, value in by.items()}
        return means | by_source, bits, parts

    def _batches(self, source: Source, prefix: str, limit: int | None) -> Iterator[Batch]:
        """All rows of a source, or `limit` of them. A sample of held-out rows comes in `PARTS` parts if it can, which
        the verdict of the run compares in pairs; sampling is faster in few batches."""
        rows = rows_per_pass(source.plan.context)
        if limit is not None and prefix == "val" and not self.sampled:
            rows = min(rows, math.ceil(min(limit, source.plan.rows) / PARTS) * source.plan.group)
        return all_rows(source, rows, limit)

    def _final_metrics(self) -> dict[str, float]:
        """Metrics of the objective that need all held-out rows."""
        own = [source for source in self.data.held_out if not source.replay]
        if not own:
            return {}
        passes = (all_rows(source, rows_per_pass(source.plan.context)) for source in own)
        return self.engine.final_metrics(itertools.chain.from_iterable(passes))

    def _rows(self, source: Source) -> int:
        """Rows of an evaluation during training. A row that is sampled may fill the context."""
        targets = source.plan.context if self.sampled else source.plan.row_targets
        return max(1, round(self.settings.evaluate.tokens / targets))

    def _sample(self, step: int) -> dict[str, str]:
        prompt, prompt_text = self._prompt()
        sampling = sampling_for(self.tokenizer, max_new=self.settings.evaluate.sample_tokens, temperature=0.8)
        model = self.engine.model
        with self.engine.eval_mode(), self.engine.runner.readable(model):
            (completion,) = generate(
                model,  # type: ignore[arg-type]
                [prompt],
                sampling,
                seed=self.job.seed,
                step=step,
            )
        return {"prompt": prompt_text, "text": self.tokenizer.decode(completion.ids)}

    def _prompt(self) -> tuple[np.ndarray, str]:
        """Ids and text of the prompt: the first held-out question, or without conversations the setting."""
        sources = self.data.held_out or self.data.train_sources
        source = next((s for s in sources if "mask" in s.store.columns), None)
        if source is not None:
            end = int(source.store.ends[0])
            mask = source.store.columns["mask"].read(0, end)
            first = int(np.argmax(mask)) if mask.any() else end
            ids = source.store.ids.read(0, first)[-self._context() // 2 :]
            return ids, self.tokenizer.decode(ids)
        text = self.settings.evaluate.sample or ""
        ids = [*self.tokenizer.start_ids, *self.tokenizer.encode(text)]
        ids = ids or sources[0].store.ids.read(0, 1).tolist()
        return np.array(ids[: self._context() // 2], np.int64), text

    def _context(self) -> int:
        return int(self.engine.model.config.context)  # type: ignore[union-attr]
