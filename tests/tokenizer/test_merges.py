"""The merges that a trained tokenizer applies to a text."""

import itertools
from typing import Any

import pytest

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.tokenizer.merges import applied_merges, symbol_text
from ingot.tokenizer.train import train
from tests.tokenizer.text_helpers import SOURCES, labelled, settings

TEXT = "def lower(text): # the lowest of the newer ones, é 漢"


@pytest.mark.parametrize("type", ["byte-bpe", "sentencepiece-bpe", "end-of-word-bpe"])
def test_the_merges_lead_from_symbols_to_the_tokens_of_the_encoder(type: str, display: Display, log: EventLog) -> None:
    tokenizer, _ = train(settings(type=type, vocab=600), labelled(*SOURCES), display, log)
    start, merges = applied_merges(tokenizer, TEXT)
    numbers = [merge.number for merge in merges]
    assert numbers == sorted(numbers)
    assert len(merges) > 5
    data: Any = getattr(tokenizer, "data", None)
    if data:
        assert [list(merge.pair) for merge in merges] == [list(data["model"]["merges"][n - 1]) for n in numbers]
    else:
        learned = [tokenizer.token_bytes(255 + number) for number in numbers]
        assert ["".join(merge.pair).encode("latin-1") for merge in merges] == learned
    ids = tokenizer.encode(TEXT).tolist()
    ends = ["".join(token) for token in merges[-1].tokens]
    assert [len(token) for token in merges[-1].tokens] == [1] * len(ids), "every token is one symbol at the end"
    if not data:
        assert [end.encode("latin-1") for end in ends] == [tokenizer.token_bytes(id) for id in ids]
        assert "\\xc3" in {symbol_text(tokenizer, symbol) for token in start for symbol in token}
    symbols = [sum(map(len, tokens)) for tokens in (start, *(merge.tokens for merge in merges))]
    assert [before - after for before, after in itertools.pairwise(symbols)] == [m.count for m in merges]


def test_a_tokenizer_without_merges_is_refused(display: Display, log: EventLog) -> None:
    tokenizer, _ = train(settings(type="wordpiece", vocab=600), labelled(*SOURCES), display, log)
    with pytest.raises(UserError, match="found a tokenizer of type wordpiece, which has no merges, expected a BPE"):
        applied_merges(tokenizer, TEXT)
