"""A whole small pipeline: text and conversations, both tokenizers' worth of stages, seconds on one core."""

import json
import random
from pathlib import Path

import pytest

RECIPE = """
[run]
name = "tiny"
seed = 3

[stage.clean]
kind = "corpus"
sources = ["notes"]
quality = "none"
holdout = { fraction = 0.2, by = "document" }

[stage.talk]
kind = "corpus"
sources = ["talk.jsonl"]
format = "chat"
holdout = { fraction = 0.2, by = "document" }

[stage.bpe]
kind = "tokenizer"
from = "clean"
vocab = 300

[stage.base]
kind = "train"
data = { clean = 1.0 }
tokenizer = "bpe"
model = { depth = 2, width = 32, heads = 2, context = 32 }
batch = 8
duration = "60 steps"
precision = "fp32"
evaluate = { every = 20, tokens = 256, sample_tokens = 5 }
loop = { save_every = 5, log_every = 1, threads = 1 }

[stage.chat]
kind = "train"
init = "base"
data = { talk = 0.9, clean = 0.1 }
batch = 8
duration = "20 steps"
precision = "fp32"
evaluate = { every = 10, tokens = 256, sample_tokens = 5 }
loop = { save_every = 5, log_every = 1, threads = 1 }

[stage.card]
kind = "evaluate"
models = ["base", "chat"]
prompts = ["the "]
sample_tokens = 5
tasks = ["icl-copy", "echo.jsonl"]
exact_match = ["talk"]
max_questions = 4
limitations = "They know 14 words."
"""
ECHO = """{"task": "echo", "kind": "generate", "form": "question", "max_new": 4}
{"prompt": "say cat mat 3", "targets": ["cat mat"]}
{"prompt": "say old hill 4", "targets": ["old hill"]}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory with `tiny.toml`, 60 notes and 80 conversations."""
    return make_work(tmp_path)


def make_work(path: Path) -> Path:
    draw = random.Random(0)
    words = sorted(
        {"the", "cat", "sat", "mat", "and", "dog", "ran", "over", "hill", "red", "sun", "rise", "old", "mill"}
    )
    (path / "notes").mkdir(parents=True)
    for i in range(60):
        text = " ".join(draw.choice(words) for _ in range(80))
        (path / "notes" / f"{i:02d}.txt").write_text(f"{text} {i}.\n")
    with (path / "talk.jsonl").open("w") as file:
        for i in range(80):
            a, b = draw.choice(words), draw.choice(words)
            messages = [
                {"role": "user", "content": f"say {a} {b} {i}"},
                {"role": "assistant", "content": f"{a} {b}"},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    (path / "echo.jsonl").write_text(ECHO)
    (path / "tiny.toml").write_text(RECIPE)
    return path
