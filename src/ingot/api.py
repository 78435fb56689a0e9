"""The Python door: `ingot.run("recipe.toml")`, `ingot.load("runs/x/base").generate("...")`."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import run as run_graph

if TYPE_CHECKING:
    from ingot.stages.load import Loaded


def run(
    recipe: str | Path, *, set: Iterable[str] = (), only: Iterable[str] = (), out: str | Path = "runs"
) -> dict[str, Path]:
    """Bring a recipe's stages up to date, as `ingot run` does, without display.

    Args:
        recipe: the TOML file.
        set: overrides such as "stage.base.seed=2".
        only: stages to bring up to date with what they need; all by default.
        out: output root.

    Returns: stage name -> its directory.
    """
    graph = load_graph(Path(recipe), list(set), Path(out))
    return run_graph(graph, Path(out), list(only), lambda *_: None, quiet=True)


def load(stage: str | Path, *, device: str = "auto", best: bool = False) -> "LanguageModel":
    """Load a train stage's model and tokenizer.

    Args:
        stage: its directory, such as "runs/stdlib/base".
        device: where the weights go; "auto" takes a GPU if there is one.
        best: the weights with the lowest held-out loss instead of the last ones.
    """
    from ingot.stages.load import load_model

    return LanguageModel(load_model(Path(stage), lambda text: print(text, file=sys.stderr), device=device, best=best))


@dataclass(frozen=True)
class LanguageModel:
    """A trained model that goes on from text and answers messages."""

    loaded: "Loaded"

    def generate(self, prompt: str = "", **sampling: Any) -> str:
        """Text that follows `prompt`. `sampling`: max_new, temperature, top_p, seed, on_text."""
        tokenizer = self.loaded.tokenizer
        start = [] if tokenizer.eot is None else [tokenizer.eot]
        return self._continue([*start, *tokenizer.encode(prompt).tolist()] or [0], **sampling)

    def chat(self, messages: list[dict[str, Any]], **sampling: Any) -> str:
        """The assistant's next message, given messages such as {"role": "user", "content": "..."}."""
        from ingot.text.chat import render

        prompt, _ = render(messages, self.loaded.tokenizer, generation_prompt=True)
        return self._continue(prompt.tolist(), **sampling)

    def _continue(
        self,
        ids: list[int],
        max_new: int = 200,
        temperature: float = 0.8,
        top_p: float = 1.0,
        seed: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        from ingot.infer.generate import generate
        from ingot.text.chat import stop_ids

        tokenizer = self.loaded.tokenizer
        stop = frozenset(stop_ids(tokenizer))
        streamed: list[int] = []

        def token(_row: int, token: int) -> None:
            streamed.append(token)
            if on_text and token not in stop and not (piece := tokenizer.decode(streamed)).endswith("\ufffd"):
                on_text(piece)
                streamed.clear()

        (completion,) = generate(
            self.loaded.model,
            [ids],
            max_new=max_new,
            temperature=temperature,
            top_p=top_p,
            stop=stop,
            seed=seed,
            on_token=token,
        )
        return tokenizer.decode([i for i in completion.ids if i not in stop])
