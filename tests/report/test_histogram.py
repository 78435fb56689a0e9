"""Histograms of measures, at the ends of their scales."""

import re

from ingot.report.html.histogram import histogram
from ingot.report.html.panels_corpus import histograms

EDGES = [0.0, 0.02, 0.04, 1.0]


def test_documents_of_one_value_have_a_bar():
    drawn = histogram("a.share", EDGES, [5, 0, 0, 0, 0], {"share": 0.0})
    assert re.findall(r'class="bin".*?<title>(.*?)</title>', drawn) == ["5 documents"]
    assert "no document was measured" in histogram("a.share", EDGES, [0] * 5, {})


def test_a_measure_that_has_to_be_zero_is_not_drawn():
    measures = {name: {"edges": EDGES, "documents": [5, 1, 0, 0, 0]} for name in ("a.share", "a.found")}
    rules = {
        "share": {"measure": "a.share", "most": 0.5, "alone": 0},
        "found": {"measure": "a.found", "most": 5e-324, "alone": 1},
    }
    (chart,) = histograms({"measures": measures, "rules": rules})
    assert "a.share" in chart
