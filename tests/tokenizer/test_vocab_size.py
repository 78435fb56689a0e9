"""SPEC row A7: what a vocabulary costs and what it saves."""

import pytest

from ingot.tokenizer.byte_bpe import Char
from ingot.tokenizer.vocab_size import PRESETS, cost, nested, table


def test_A7_the_numbers_that_are_told():
    assert cost(50_000).bytes == 50_000 * 4_096 * 4 == 819_200_000
    assert cost(100_000).bytes == 1_638_400_000
    assert cost(1_000_000).bytes == 16_384_000_000
    assert PRESETS == (32_000, 50_257, 100_000, 128_000)


def test_A7_share_of_a_model():
    small, large = cost(32_000), cost(128_000)
    assert small.parameters == 131_072_000
    assert small.fraction == 2 * small.parameters / (2 * small.parameters + 12 * 32 * 4096**2)
    assert cost(32_000, tied=True).fraction < small.fraction < large.fraction
    assert cost(50_257, width=768, layers=12, tied=True).fraction == pytest.approx(0.3124, abs=1e-4)  # GPT-2 124M


def test_A7_table_is_in_order_and_each_size_once():
    rows = table([50_257, 300, 50_257], 64, 4, 2)
    assert [row["vocab"] for row in rows] == [300, 50_257]
    assert rows[0]["bytes"] == 300 * 64 * 2


def test_A7_smaller_vocabularies_are_held_by_a_bpe(bpe):
    assert [one.vocab for one in nested(bpe)] == [512, 600]
    assert [one.vocab for one in nested(Char("abc"))] == [3]
    first, whole = nested(bpe)
    assert whole is bpe
    assert first.decode(first.encode("The cat é")) == "The cat é"
    assert len(first.encode("argument argument")) >= len(bpe.encode("argument argument"))
