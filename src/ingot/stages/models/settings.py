"""Settings of the kind `import`."""

from typing import Annotated

from pydantic import Field

from ingot.core.settings import EXECUTION, Settings, Stage


class ImportSettings(Settings):
    """`kind = "import"`: a model made elsewhere, as a stage to start from. `init = "hf:DIR"` makes one by itself."""

    path: Annotated[str, EXECUTION] = Field(min_length=1)
    """`hf:DIR`, a directory in the Hugging Face layout, or a finished train stage of another run; its content is part
    of the key, its name is not."""
    adapter: Annotated[str | None, EXECUTION] = None
    """Directory of an adapter in PEFT's format that is merged into it; its content is part of the key too."""
    tokenizer: Annotated[str | None, Stage("tokenizer")] = None
    """Tokenizer stage; default: the one in the directory. With more ids than the model has, the embeddings grow."""
