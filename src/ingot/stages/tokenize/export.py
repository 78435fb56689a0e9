"""Export of a token store to the token files of other tools."""

from collections.abc import Callable
from pathlib import Path

from ingot.core.artifact import atomic_directory
from ingot.core.errors import UserError
from ingot.stages.job import TOKENIZER, inputs_of
from ingot.store.encode import SPLITS
from ingot.store.reader import Store
from ingot.store.token_files import write_store
from ingot.store.token_formats import TokenFormat
from ingot.tokenizer.byte_bpe import load_tokenizer
from ingot.tokenizer.hf_files import export_tokenizer


def export_tokens(stage: Path, to: Path, format: TokenFormat, notify: Callable[[str], None]) -> list[Path]:
    """Write both splits of a token store, and its tokenizer for the tokenizers library.

    Args:
        stage: directory of a stage that makes tokens, such as runs/NAME/CORPUS@TOKENIZER.
        to: the new directory, written atomically.
        format: the format of the token files.
        notify: receives messages.

    Returns:
        The files of the directory. A split without documents has none.

    Raises:
        UserError: no such stage, a damaged store, `to` exists, or the format cannot hold the store.
    """
    if to.exists():
        raise UserError(f"{to}: exists already; name another directory or remove it")
    inputs = inputs_of(stage)
    if not (stage / SPLITS[0]).is_dir() or "tokenizer" not in inputs:
        raise UserError(
            f"{stage}: found no token store, expected the directory of one, such as runs/NAME/CORPUS@TOKENIZER"
        )
    tokenizer = load_tokenizer(inputs["tokenizer"].path / TOKENIZER)
    with atomic_directory(to) as directory:
        for split in SPLITS:
            store = Store.open(stage / split, tokenizer=tokenizer.fingerprint)
            if store.tokens:
                messages = write_store(store, directory / split, format, tokenizer.eot, tokenizer.vocabulary_digest)
                for message in messages:
                    notify(message)
        export_tokenizer(tokenizer, directory)
    return sorted(to.iterdir())
