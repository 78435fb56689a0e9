"""What a train stage measures on held-out rows, at intervals and at its end."""

import itertools
import math

import numpy as np

from ingot.data.batches import Source, all_rows
from ingot.infer.generate import generate
from ingot.infer.streaming import sampling_for
from ingot.stages.job import Job
from ingot.stages.training.data import Data
from ingot.stages.training.settings import TrainSettings
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.engine import Engine
from ingot.train.settings import rows_per_pass


class Evaluation:
    """What the objective measures on held-out rows of every source, the training loss beside it, and a sample.

    Means go by the shares of the whole run, so that numbers of different phases compare.
    """

    def __init__(
        self,
        job: Job,
        settings: TrainSettings,
        engine: Engine,
        data: Data,
        shares: dict[str, float],
        tokenizer: Tokenizer,
    ):
        self.job, self.settings, self.engine, self.tokenizer = job, settings, engine, tokenizer
        self.data, self.shares = data, shares
        self.sampled = engine.objective.needs.samples

    def __call__(self, step: int, whole: bool) -> dict[str, float]:
        numbers, bits = self._measured(self.data.held_out, "val", whole)
        if whole:
            return numbers | bits | self._concluded()
        if not self.sampled:  # the log of each step has the reward of fresh samples already
            numbers |= self._measured(self.data.longest, "train", whole=False)[0]
        if self.settings.evaluate.sample is not False and self.engine.objective.needs.generates_text:
            self.job.log.write("sample", step=step, **self._sample(step))
        return numbers

    def _measured(self, sources: list[Source], what: str, whole: bool) -> tuple[dict[str, float], dict[str, float]]:
        """Every number by source and their mean by share; bits per byte where every token is predicted."""
        found: dict[str, dict[str, float]] = {}
        bits = {}
        for source in sources:
            batches = all_rows(source, rows_per_pass(source.plan.context), limit=None if whole else self._rows(source))
            loss, counts, others = self.engine.evaluate(batches)
            silent = self.sampled or source.replay
            for name, number in (others if silent else {"loss_nats": loss, **others}).items():
                found.setdefault(f"{what}_{name}", {})[source.name] = number
            if whole and not silent and counts["token"] == source.store.tokens - 1:  # all but the first were predicted
                bits[f"bits_per_byte/{source.name}"] = loss * counts["token"] / math.log(2) / source.store.bytes
        if len(sources) == 1 and bits:
            bits = {"bits_per_byte": next(iter(bits.values()))}
        means = {
            name: float(np.average(list(by.values()), weights=[self.shares[source] for source in by]))
            for name, by in found.items()
        }
        several = {name: by for name, by in found.items() if len(by) > 1}
        by_source = {f"{name}/{source}": number for name, by in several.items() for source, number in by.items()}
        return means | by_source, bits

    def _concluded(self) -> dict[str, float]:
        """What the objective says of the trained model, on all held-out rows."""
        own = (source for source in self.data.held_out if not source.replay)
        passes = (all_rows(source, rows_per_pass(source.plan.context)) for source in own)
        return self.engine.conclude(itertools.chain.from_iterable(passes))

    def _rows(self, source: Source) -> int:
        """Held-out rows looked at while training runs; a row that is sampled may come to fill the context."""
        targets = source.plan.context if self.sampled else source.plan.row_targets
        return max(1, round(self.settings.evaluate.tokens / targets))

    def _sample(self, step: int) -> dict[str, str]:
        prompt, shown = self._prompt()
        sampling = sampling_for(self.tokenizer, max_new=self.settings.evaluate.sample_tokens, temperature=0.8)
        with self.engine.eval_mode():
            (completion,) = generate(
                self.engine.model,  # type: ignore[arg-type]
                [prompt],
                sampling,
                seed=self.job.seed,
                step=step,
            )
        return {"prompt": shown, "text": self.tokenizer.decode(completion.ids)}

    def _prompt(self) -> tuple[np.ndarray, str]:
        """The set prompt; where the stage trains on conversations, the first held-out question."""
        source = next((s for s in self.data.held_out if "mask" in s.store.columns), None)
        if source is not None:
            end = int(source.store.ends[0])
            mask = source.store.columns["mask"].read(0, end)
            first = int(np.argmax(mask)) if mask.any() else end
            ids = source.store.ids.read(0, first)[-self._context() // 2 :]
            return ids, self.tokenizer.decode(ids)
        text = self.settings.evaluate.sample or ""
        ids = [*self.tokenizer.start, *self.tokenizer.encode(text)]
        ids = ids or self.data.held_out[0].store.ids.read(0, 1).tolist()
        return np.array(ids[: self._context() // 2], np.int64), text

    def _context(self) -> int:
        return int(self.engine.model.config.context)  # type: ignore[union-attr]
