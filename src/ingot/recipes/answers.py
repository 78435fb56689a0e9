"""A reward that can be checked, for stdlib.toml and grpo-arithmetic.toml: is the answer the one that the row has?"""


def right(prompts: list[dict[str, str]], completions: list[str]) -> list[float]:
    """1 for a completion that is the row's `answer`, else 0."""
    return [float(said.strip() == prompt["answer"]) for prompt, said in zip(prompts, completions, strict=True)]
