"""A reward that can be checked, for stdlib.toml and grpo-arithmetic.toml: is the answer the one that the row has?"""

from typing import Any


def right(prompts: list[dict[str, Any]], completions: list[str]) -> list[float]:
    """1 for a completion that is the row's `answer`, a text or a number, else 0."""
    return [float(said.strip() == str(prompt["answer"])) for prompt, said in zip(prompts, completions, strict=True)]
