"""Settings of the data room: how documents become rows of a training batch."""

from typing import Annotated, Literal

from pydantic import Field

from ingot.core.settings import EXECUTION, Settings


class PackingSettings(Settings):
    """How a store's documents are laid out in rows of `context` targets."""

    kind: Literal["concat", "best-fit"] | None = None
    """`concat` slides one window over the whole stream; `best-fit` fills rows with whole documents and pads the rest.
    Default: concat for text, best-fit for chat. Pairs and prompts have rows of their own whatever is set here."""
    stride: int | None = Field(default=None, ge=1)
    """Distance between the starts of two concat rows; default: the context (each token is a target once an epoch).
    With 1 every offset is a row. An epoch is as many tokens as there are, so a pass over all rows is then `context`
    epochs."""
    isolate: bool | None = None
    """Whether attention stops at document borders; default: only for best-fit."""
    pad: Annotated[int | None, EXECUTION] = Field(default=None, ge=0)
    """Id that fills padded places; default: the tokenizer's <|pad|>, or 0. Padding counts for nothing by its place, so
    the id changes no number."""
    ignore: Annotated[int, EXECUTION] = Field(default=-100, lt=0)
    """Label of a target that counts for nothing (-100 and -1 are in use elsewhere); it changes no number."""

    def kind_of(self, content: str) -> str:
        """How rows are made of documents of a format: as set, or as is usual for it."""
        if content in ("pairs", "prompts"):
            return "whole"
        return self.kind or ("concat" if content == "text" else "best-fit")

    def isolates(self, content: str) -> bool:
        """Whether a row may hold several documents of a format that do not see each other."""
        kind = self.kind_of(content)
        return kind == "best-fit" if self.isolate is None else self.isolate and kind != "whole"
