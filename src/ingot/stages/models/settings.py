"""Settings of the kind `import`."""

from typing import Annotated

from pydantic import Field

from ingot.core.settings import EXECUTION, Settings, Stage


class ImportSettings(Settings):
    """`kind = "import"`: an existing model as a stage. `init = "hf:DIR"` of a train stage creates one."""

    path: Annotated[str, EXECUTION] = Field(min_length=1)
    """`hf:DIR`, a directory in the Hugging Face layout, or the directory of a finished train stage. Its content is part
    of the key, its name is not."""
    adapter: Annotated[str | None, EXECUTION] = None
    """Directory of an adapter in PEFT's format to merge into the model. Its content is part of the key."""
    tokenizer: Annotated[str | None, Stage("tokenizer")] = None
    """Tokenizer stage; default: the tokenizer in the directory. If it has more ids than the model, embeddings grow."""
