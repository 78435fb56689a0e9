"""`ingot init --time`: measures this machine on a sample of the text, and chooses a model that fits a time.

The sample goes through the stages of the new recipe: corpus, tokenizer, tokens, and some steps of train stages of two
depths, as `ingot tune` measures them. So the speed is that of the real engine with its backend and precision, and a
token has as many bytes as the tokenizer gives it.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.core.errors import UserError
from ingot.core.events import duration, size
from ingot.corpus.readers.read import read
from ingot.corpus.settings import CorpusSettings
from ingot.model.config import WIDTH_PER_LAYER, ModelSettings
from ingot.optim.settings import OptimSettings
from ingot.pipeline.graph import Graph, load_graphs
from ingot.pipeline.run import job_of, run
from ingot.pipeline.tune import Trial, run_candidate
from ingot.plan.flops import BACKWARD, training_flops_per_token
from ingot.plan.scaling import LAWS, seconds_at
from ingot.plan.sizing import MAX_EPOCHS, Candidate, Choice, choose, shortest
from ingot.stages.job import read_result

Notify = Callable[[str], None]
LAW = "besiroglu"
"""The law that sizes are chosen by."""
SAMPLE_BYTES, SAMPLE_BYTES_A_TOKEN = 4_000_000, 300
"""Text that is measured on, and more of it for a large vocabulary, which has to be learned from it. Of 1 MB, most time
goes into imports, which do not grow with the text."""
SAMPLE = "sample.jsonl"
MAX_DEPTH = 32
"""Depth of the largest candidate."""
STEPS, MAX_SECONDS = 12, 60.0
"""Timed steps of a depth, and seconds that they may take with the start of the process."""
UPDATES, MIN_UPDATES = 2000, 100
"""Updates aimed at, and the fewest that make a training."""
MIN_BATCH, MAX_BATCH = 8, 64
"""Rows of an update."""
EVALUATIONS, EVALUATED = 10, 16384
"""Evaluations during training, and tokens of each: held out, and as many of the training text."""
WEIGHT_DECAY, MOST_WEIGHT_DECAY, FRESH_PASSES = OptimSettings().weight_decay, 3.0, 4.0
"""The usual weight decay, the most that a repeated text gets, and the passes that are almost as good as new text."""
HELD_OUT_BYTES = 400_000
"""Held-out text, at most; all of it is evaluated after training, and again in the card."""
CARD_WINDOWS = 2
"""Times that the card reads the held-out text: windows overlap by half."""
STARTS = 2
"""Processes that load torch: training and the card."""
UPDATES_A_MINUTE = 600
"""Assumed where only the order of magnitude counts."""
REPORT_S = 3.0
"""Seconds of the command itself: the recipe, digests of files, the report."""

MIN_TIMED_VOCAB = 512
EMBEDDING_FRACTION = 0.25
"""Of the parameters, at most: they are looked up and teach little, and a larger vocabulary shortens texts little."""
PROBED, MAX_PROBES = (1, 3), 5
"""Depths that are measured first, and how many at most: the one that seems best is measured, until it is known."""


@dataclass(frozen=True)
class Timed:
    """What a time is spent on, for the new recipe."""

    choice: Choice
    vocab: int
    batch: int
    holdout: float
    """Held-out fraction of the text."""
    unique: float
    """Tokens of the text that are trained on."""

    @property
    def passes(self) -> float:
        """Over the text that is trained on."""
        return self.choice.tokens / self.unique

    @property
    def run_seconds(self) -> float:
        """Of the complete run; less than was asked for where the text is used up."""
        one = self.choice.candidate
        return one.other_seconds + self.choice.tokens * one.token_seconds


@dataclass(frozen=True)
class Probe:
    """The sample's stages in a directory of their own."""

    directory: Path
    sample_bytes: int
    vocab: int
    context: int
    minutes: float
    """Minutes of the run that is planned: whether a backend compiles depends on it."""

    def graph(self, depth: int, batch: int) -> Graph:
        model = {"depth": depth, "context": self.context}
        stages: dict[str, Any] = {
            "text": {"kind": "corpus", "sources": [str(self.directory / SAMPLE)], "quality": "none"},
            "bpe": {"kind": "tokenizer", "from": "text", "vocab": self.vocab},
            "base": {"kind": "train", "data": {"text": 1.0}, "tokenizer": "bpe", "model": model, "batch": batch},
        }
        stages["text"]["holdout"] = {"fraction": 0.05, "by": "characters"}
        stages["base"]["duration"] = f"{max(1, round(self.minutes * UPDATES_A_MINUTE)) + 2 * STEPS} steps"
        stages["base"]["evaluate"] = {"every": 10**9, "tokens": self.context, "sample": False}
        table = {"run": {"name": "measured"}, "stage": stages}
        (graph,) = load_graphs(table, [], self.directory / "runs")
        return graph

    def train(self, depth: int, batch: int, notify: Notify) -> Trial | None:
        """Some steps of a model; None if they fail or take too long."""
        graph = self.graph(depth, batch)
        trial = run_candidate(job_of(graph, graph.nodes["base"], quiet=True), {}, STEPS, MAX_SECONDS)
        took = (
            f"{trial.step_s * 1e3:,.0f} ms an update" if trial else f"failed, or {STEPS} took over {MAX_SECONDS:.0f} s"
        )
        notify(f"  depth {depth}, {batch} rows of {self.context} tokens: {took}")
        return trial


def timed(
    settings: CorpusSettings, total_bytes: int, vocab: int, context: int, seconds: float, notify: Notify
) -> Timed:
    """Measure this machine, and choose depth, tokens and batch.

    Args:
        settings: the corpus.
        total_bytes: UTF-8 bytes of its text.
        vocab, context: of the new model.
        seconds: of the complete run, from the corpus to the report.
        notify: receives progress lines.

    Raises:
        UserError: the time is too short for the smallest model.
    """
    with tempfile.TemporaryDirectory(prefix="ingot-init-") as name:
        probe = Probe(Path(name), _write_sample(Path(name), settings, vocab), vocab, context, seconds / 60)
        notify(f"measuring this machine on {size(probe.sample_bytes)} of the text")
        prepare_seconds, token_bytes = _prepare(probe, total_bytes)
        holdout = min(0.1, HELD_OUT_BYTES / total_bytes)
        unique, held_out = (total_bytes * part / token_bytes for part in (1 - holdout, holdout))
        configs = {d: ModelSettings(depth=d, context=context).resolve(vocab) for d in range(1, MAX_DEPTH + 1)}
        flops = {d: MIN_BATCH * context * training_flops_per_token(config) for d, config in configs.items()}

        def candidate(depth: int, trial_s: float, batch: int) -> Candidate:
            token_seconds = trial_s / (batch * context)
            beside = evaluated_tokens(held_out) * token_seconds / (1 + BACKWARD)
            other = prepare_seconds + STARTS * start_seconds + REPORT_S + beside
            return Candidate(depth, configs[depth].parameters, token_seconds, other, MIN_UPDATES * batch * context)

        trials = {depth: trial for depth in PROBED if (trial := probe.train(depth, MIN_BATCH, notify))}
        if not trials:
            raise UserError(
                f"--time: {STEPS} steps of the smallest models failed or took more than {MAX_SECONDS:.0f} s here, "
                "expected a machine that can train them; leave --time out"
            )
        most = min((depth - 1 for depth in PROBED if depth not in trials), default=MAX_DEPTH)
        while True:
            start_seconds = min(trial.start_s for trial in trials.values())  # the first may build kernels, once
            known = {float(flops[depth]): trial.step_s for depth, trial in trials.items()}
            depths = trials if len(trials) == MAX_PROBES else range(1, most + 1)
            candidates = [candidate(depth, seconds_at(known, flops[depth]), MIN_BATCH) for depth in depths]
            choice = _chosen(candidates, seconds, unique)
            depth = choice.candidate.depth
            if depth in trials:
                break
            if trial := probe.train(depth, MIN_BATCH, notify):
                trials[depth] = trial
            else:
                most = depth - 1  # a deeper model takes longer still
        batch = batch_rows(choice.tokens, context)
        if batch > MIN_BATCH:
            trial = probe.train(depth, batch, notify)
            step_s = trial.step_s if trial else trials[depth].step_s * batch / MIN_BATCH
            choice = _chosen([candidate(depth, step_s, batch)], seconds, unique)
        return Timed(choice, vocab, batch, holdout, unique)


def timed_vocab(flops: float, most: int) -> int:
    """Vocabulary for a budget, so that embeddings are at most `EMBEDDING_FRACTION` of the best model for it.

    Args:
        flops: of the training, roughly.
        most: what the text is enough for.
    """
    parameters = LAWS[LAW].optimum(flops).parameters
    depth = max(1.0, (parameters / (12 * WIDTH_PER_LAYER**2)) ** (1 / 3))  # a block has 12 width^2 parameters
    vocab = EMBEDDING_FRACTION * parameters / (WIDTH_PER_LAYER * depth)
    return min(most, max(MIN_TIMED_VOCAB, 2 ** math.floor(math.log2(vocab))))


def batch_rows(tokens: float, context: int) -> int:
    """Rows of an update: a power of two that makes about `UPDATES` updates."""
    return min(MAX_BATCH, max(MIN_BATCH, 2 ** round(math.log2(max(1.0, tokens / context / UPDATES)))))


def weight_decay(passes: float) -> float:
    """Weight decay for some passes over a text: the more passes, the more a model learns by heart.

    After 31 passes over 30 kB, 3.0 has a held-out loss 5 % below that of 0.1, after 23 passes over 1 MB 11 % below;
    0.4 after 8 passes is 0.2 to 1.2 % below (docs/scaling.md). 30 times the usual is also the best of Kim et al. 2025
    (arXiv:2509.14786) where text is repeated as often as helps.
    """
    return min(MOST_WEIGHT_DECAY, WEIGHT_DECAY * max(1.0, passes / FRESH_PASSES) ** 2)


def evaluated_tokens(held_out: float) -> float:
    """Tokens of all evaluations of a run with its card."""
    return 2 * EVALUATIONS * EVALUATED + (1 + CARD_WINDOWS) * held_out


def _chosen(candidates: list[Candidate], seconds: float, unique: float) -> Choice:
    choice = choose(LAWS[LAW], candidates, seconds, unique)
    if choice is None:
        raise UserError(
            f"--time: found {duration(seconds)}, expected at least {duration(min(map(shortest, candidates)))}: corpus, "
            f"tokenizer, evaluations and {MIN_UPDATES} updates of the smallest model take that long here"
        )
    return choice


def _prepare(probe: Probe, total_bytes: int) -> tuple[float, float]:
    """Seconds of the stages before training for all the text, and bytes of a token.

    The time of a process's start stays; the time inside it grows with the text.
    """
    graph, began = probe.graph(PROBED[0], MIN_BATCH), time.monotonic()
    done = run(graph, ["text@bpe"], lambda *_: None, quiet=True)
    wall, results = time.monotonic() - began, {name: read_result(path) for name, path in done.items()}
    inside = sum(result["seconds"] for result in results.values())
    tokens = results["text@bpe"]["train_tokens"] + results["text@bpe"]["val_tokens"]
    return wall + inside * (total_bytes / probe.sample_bytes - 1), probe.sample_bytes / tokens


def _write_sample(directory: Path, settings: CorpusSettings, vocab: int) -> int:
    """Write the first documents as rows; their bytes."""
    written, most = 0, max(SAMPLE_BYTES, SAMPLE_BYTES_A_TOKEN * vocab)
    with (directory / SAMPLE).open("w") as file:
        for batch in read(settings, lambda _: None):
            for text in batch.column("text").to_pylist():
                part = text.encode()[: most - written].decode(errors="ignore")
                print(json.dumps({"text": part}), file=file)
                written += len(part.encode())
                if written >= most - 3:  # a character may have been cut
                    return written
    return written


def timed_comments(found: Timed) -> Iterator[str]:
    """Comments on each choice, for the recipe."""
    choice, one = found.choice, found.choice.candidate
    training = choice.tokens * one.token_seconds
    yield (
        f"# Time: {duration(one.other_seconds)} for corpus, tokenizer and evaluations as measured, "
        f"{duration(training)} of training at {1 / one.token_seconds:,.0f} tokens/s."
    )
    yield (
        f"# Depth: by Besiroglu et al.'s law (plan/scaling.py) no other from 1 to {MAX_DEPTH} has a lower loss after "
        "this time."
    )
    if found.passes > 1:
        yield (
            f"# Duration: {found.passes:.1f} passes over the text, worth {choice.effective_tokens / found.unique:.1f} "
            f"of new text{'' if found.passes < MAX_EPOCHS else '; more are worth nothing, so it ends before the time'}."
        )
    yield f"# Batch: about {UPDATES:,} updates, from {MIN_BATCH} to {MAX_BATCH} rows each."
