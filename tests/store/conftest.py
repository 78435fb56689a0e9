from tests.tokenizer.conftest import bpe, corpus, display, log  # noqa: F401  (fixtures)
