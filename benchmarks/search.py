"""`python -m benchmarks.search DIR`: builds the search index of a store and searches planted sentences.

Makes text of `--tokens` tokens in DIR with 20 planted sentences of 8 to 40 words (words by Zipf's law; one document in
fifty ends in the same page of text), encodes it, and records a train stage that is not trained. Prints a JSON object:
time, CPU time and memory of the build, and for each sentence the milliseconds of its search, with document, offset and
steps, twice: `first_ms` right after the index is opened, `again_ms` after all were searched once. `parts_ms` is the
search of the same sentences with a word in the middle changed. Resumes what a killed run has made in DIR.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.artifact import RECORD, atomic_json, atomic_open
from ingot.core.events import Display
from ingot.core.process import peak_memory_bytes
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of, run
from ingot.stages.job import TOKENIZER
from ingot.stages.training.search import TrainingSearch
from ingot.stages.training.trace import open_training_data
from ingot.store.search import open_index

SENTENCES = 20
TOKENS_PER_WORD = 1.55
"""Of these texts with this vocabulary, to choose the number of words."""
WORDS_PER_DOCUMENT = 400
RECIPE = """
[run]
name = "search"

[stage.text]
kind = "corpus"
sources = ["{text}"]
quality = "none"
holdout = {{ fraction = 0.005 }}

[stage.bpe]
kind = "tokenizer"
from = "text"
vocab = 8192
sample_bytes = 20_000_000

[stage.base]
kind = "train"
data = {{ text = 1.0 }}
tokenizer = "bpe"
model = {{ depth = 1, width = 64, heads = 1, context = 1024 }}
batch = 32
duration = "1 epoch"
"""


def sentences() -> list[str]:
    """The planted sentences: common words in an order that stands nowhere else."""
    draw, words = np.random.default_rng(7), _vocabulary()
    return [" ".join(draw.choice(words[:5000], 8 + number * 32 // (SENTENCES - 1))) for number in range(SENTENCES)]


def _vocabulary() -> np.ndarray:
    """50,000 words of two to nine letters, the common ones first."""
    draw, letters = np.random.default_rng(1), list("etaoinshrdlucmfwypvbgkjqxz")
    rates = 1 / np.arange(1, 27)
    lengths = draw.integers(2, 10, 50_000)
    return np.array(["".join(draw.choice(letters, n, p=rates / rates.sum())) for n in lengths])


def _documents(words: int) -> Iterator[str]:
    draw, vocabulary = np.random.default_rng(2), _vocabulary()
    rates = 1 / np.arange(1, len(vocabulary) + 1)
    cumulative = np.cumsum(rates / rates.sum())
    page = " ".join(vocabulary[np.searchsorted(cumulative, draw.random(600))])
    documents = max(2 * SENTENCES, words // WORDS_PER_DOCUMENT)
    # the last tokens may fill no row, so nothing is planted there
    planted = dict(zip(np.linspace(0, 0.97 * documents, SENTENCES).astype(int).tolist(), sentences(), strict=True))
    for number in range(documents):
        chosen = vocabulary[np.minimum(np.searchsorted(cumulative, draw.random(WORDS_PER_DOCUMENT)), 49_999)].tolist()
        if number in planted:
            chosen.insert(WORDS_PER_DOCUMENT // 2, planted[number])
        yield " ".join(chosen) + (f"\n{page}" if number % 50 == 0 else "")


def prepare(directory: Path, tokens: int) -> Path:
    """Make the text, the stores and the record of the train stage; what is there already is kept. Returns its path."""
    text, recipe = directory / f"text-{tokens}.jsonl", directory / "search.toml"
    if not text.exists():
        with atomic_open(text) as file:
            file.writelines(
                json.dumps({"text": one}).encode() + b"\n" for one in _documents(int(tokens / TOKENS_PER_WORD))
            )
    recipe.write_text(RECIPE.format(text=text.absolute()))
    graph = load_graph(recipe, [], directory)
    run(graph, ["text@bpe"], lambda *_: None)
    job = job_of(graph, graph.nodes["base"], quiet=True)
    stage = Path(job["dir"])
    atomic_json(stage / RECORD, job)
    shutil.copy(graph.stage(graph.nodes["bpe"]).path / TOKENIZER, stage / TOKENIZER)
    return stage


def build(stage: Path) -> dict[str, Any]:
    """Build the index of the training text anew, and measure it."""
    data, _, tokenizer = open_training_data(stage)
    (source,) = data.train_sources
    for old in source.store.path.glob("search-*"):
        shutil.rmtree(old)
    start, cpu = time.monotonic(), time.process_time()
    index = open_index(source.store, tokenizer, Display())
    return {
        "tokens": source.store.tokens,
        "text_bytes": int(index.ends[-1]),
        "index_bytes": sum(file.stat().st_size for file in index.path.iterdir()),
        "build_seconds": time.monotonic() - start,
        "build_cpu_seconds": time.process_time() - cpu,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def measure(stage: Path) -> dict[str, Any]:
    """Search every sentence. Raises AssertionError where one is not found with its document and steps."""
    start = time.monotonic()
    search = TrainingSearch(stage, Display())
    out: dict[str, Any] = {"open_seconds": time.monotonic() - start}
    changed = [
        " ".join("changed" if i == len(s.split()) // 2 else w for i, w in enumerate(s.split())) for s in sentences()
    ]
    for name, texts in (("first_ms", sentences()), ("again_ms", sentences()), ("parts_ms", changed)):
        out[name] = []
        for text in texts:
            start = time.monotonic()
            found = search.find(text, 3, None)
            out[name].append(round(1000 * (time.monotonic() - start), 2))
            if name == "parts_ms":
                assert len(found["parts"]) >= 2, text
                continue
            (place,) = found["places"]
            assert place["held_out"] or len(place["steps"]["base"]) >= 1, place
        out[f"{name}_median"], out[f"{name}_max"] = statistics.median(out[name]), max(out[name])
    return out


def main() -> None:
    """Prepare, build, search, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    stage = prepare(arguments.directory, arguments.tokens)
    print(json.dumps({"cores": os.cpu_count(), **build(stage), **measure(stage)}, indent=1))


if __name__ == "__main__":
    main()
