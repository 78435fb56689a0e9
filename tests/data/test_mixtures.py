"""Published mixtures by name: they add up to the whole, and their table names a corpus for every source."""

import re
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.data.mixtures import MIXTURES, expanded
from ingot.data.sampler import Order
from ingot.stages.training.settings import TrainSettings

LLAMA = {
    "mixture": "llama",
    **{"commoncrawl": "crawl", "c4": "crawl", "github": "code", "wikipedia": "wiki", "books": "books"},
    **{"arxiv": "papers", "stackexchange": "answers"},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_B7_published_mixtures_add_up_to_a_hundred(name: str) -> None:
    assert sum(MIXTURES[name].values()) == pytest.approx(100)
    assert len(MIXTURES["pile"]) == 22


def test_B7_a_named_mixture_is_a_table_of_corpora_and_sources_that_share_one_add_up() -> None:
    settings = TrainSettings.model_validate(
        {"data": LLAMA, "tokenizer": "bpe", "model": {"depth": 2}, "duration": "5 steps"}
    )
    assert settings.data == {"crawl": 82, "code": 4.5, "wiki": 4.5, "books": 4.5, "papers": 2.5, "answers": 2}
    digits = {**LLAMA, "books": "1984"}  # a corpus of that name, and no number
    data = TrainSettings.model_validate(
        {"data": digits, "tokenizer": "bpe", "model": {"depth": 2}, "duration": "5 steps"}
    ).data
    assert data
    assert data["1984"] == 4.5
    assert expanded({"mixture": 0.5, "clean": 0.5}) == {"mixture": 0.5, "clean": 0.5}  # a corpus may have that name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixture": "lama"}, "found unknown mixture 'lama'; did you mean 'llama'"),
        ({"wikipedia": None}, "found no corpus for wikipedia (4.5 %) of mixture 'llama'"),
        ({"wikipedias": "wiki"}, "found source 'wikipedias', which mixture 'llama' has not; did you mean 'wikipedia'"),
        ({"books": 0.3}, "found books = 0.3, expected the name of a corpus"),
        ({"books": True}, "found books = True, expected the name of a corpus"),
    ],
)
def test_B7_what_a_named_mixture_lacks_is_said(change: dict[str, Any], message: str) -> None:
    table = {name: value for name, value in (LLAMA | change).items() if value is not None}
    with pytest.raises((UserError, ValidationError), match=re.escape(message)):
        TrainSettings.model_validate({"data": table, "tokenizer": "bpe", "model": {"depth": 2}, "duration": "5 steps"})


@pytest.mark.parametrize("name", MIXTURES)
def test_B7_every_window_of_ten_thousand_rows_has_the_shares(name: str) -> None:
    """Within 0.2 points, wherever it begins."""
    targets = list(MIXTURES[name].values())
    order = Order((100_000,) * len(targets), tuple(targets), seed=3)
    for first in (0, 1, 777, 12_345, 1_000_003):
        sources, _ = order.at(first, 10_000)
        counts = Counter(sources.tolist())
        for source, target in enumerate(targets):
            assert abs(counts[source] / 100 - target) < 0.2, (first, source)
