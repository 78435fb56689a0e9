"""Settings of packing: how documents become rows of a training batch."""

from typing import Annotated, Literal

from pydantic import Field

from ingot.core.settings import EXECUTION, Settings


class PackingSettings(Settings):
    """How the documents of a store are packed into rows of `context` targets."""

    kind: Literal["concat", "best-fit"] | None = None
    """`concat` slides a window over the token stream; `best-fit` fills rows with complete documents and pads the rest.
    Default: concat for text, best-fit for chat. Pairs and prompts always have one document per row."""
    stride: int | None = Field(default=None, ge=1)
    """Distance between the starts of two concat rows. Default: the context, so that each token is a target once per
    epoch. With 1, a row starts at every token; since an epoch counts tokens, a pass over all rows is then `context`
    epochs."""
    isolate: bool | None = None
    """Whether attention stops at document borders; default: only for best-fit."""
    pad: Annotated[int | None, EXECUTION] = Field(default=None, ge=0)
    """Id of padding; default: the tokenizer's <|pad|>, or 0. Padding is masked by position, so the id does not affect
    results."""
    ignore: Annotated[int, EXECUTION] = Field(default=-100, lt=0)
    """Label of positions without a target, such as -100 or -1; it does not affect results."""

    def resolved_kind(self, content: str) -> str:
        """The kind of row plan for a format: `concat`, `best-fit` or `one-per-row`."""
        if content in ("pairs", "prompts"):
            return "one-per-row"
        return self.kind or ("concat" if content == "text" else "best-fit")

    def isolates(self, content: str) -> bool:
        """Whether a row can contain several documents of the format that do not attend to each other."""
        kind = self.resolved_kind(content)
        return kind == "best-fit" if self.isolate is None else self.isolate and kind != "one-per-row"
