"""The curve of a sweep over one number: what is marked as too low or too high, and what is not."""

from pathlib import Path

from ingot.report.compare.compare import compare
from ingot.report.compare.page import write_comparison
from ingot.report.compare.setting import setting_curve
from tests.report.test_compare import _sweep

SEEDS = {1: 0.0, 2: 2.0, 3: 4.0}
"""What a seed adds to the loss: by far more than the setting, as in the first line of a sweep over seeds."""
NOISE = {(0.1, 1): 0.01, (1.0, 2): 0.01, (2.0, 3): 0.02, (8.0, 1): 0.01}


def _losses(by_value: dict[float, float]) -> dict[tuple[float, int], float]:
    return {(v, s): y + x + NOISE.get((v, s), 0) for v, y in by_value.items() for s, x in SEEDS.items()}


def test_values_beside_the_best_are_marked_where_the_seeds_agree(tmp_path: Path) -> None:
    losses = _losses({0.1: 3.5, 1.0: 3.0, 2.0: 3.005, 8.0: 3.4})
    (found,) = compare([_sweep(tmp_path, losses)])
    curve = setting_curve(found)
    assert curve
    assert [(v.value, v.verdict) for v in curve.values] == [
        (0.1, "too low"),
        (1.0, "best"),
        (2.0, ""),  # .005 more, and as much by chance
        (8.0, "too high"),
    ]
    assert curve.sentences[1].startswith("2: no clear difference")
    page = write_comparison([found], tmp_path / "page.html", "lrs").read_text()
    assert "by base.optim.lr" in page
    assert "too high" in page
    assert "8: too high, +0.4000" in page


def test_one_seed_marks_nothing(tmp_path: Path) -> None:
    losses = {k: v for k, v in _losses({0.1: 3.5, 1.0: 3.0, 8.0: 3.4}).items() if k[1] == 1}
    (found,) = compare([_sweep(tmp_path, losses)])
    curve = setting_curve(found)
    assert curve
    assert [v.verdict for v in curve.values] == ["", "best", ""]
    assert curve.sentences == []


def test_a_best_value_at_the_end_is_said_to_be_there(tmp_path: Path) -> None:
    (found,) = compare([_sweep(tmp_path, _losses({0.1: 3.5, 1.0: 3.2, 8.0: 3.0}))])
    curve = setting_curve(found)
    assert curve
    assert curve.sentences[-1] == "8 is best and the largest value, so a better one may lie beyond it"


def test_two_values_and_other_metrics_have_no_curve(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path, _losses({0.1: 3.5, 1.0: 3.0}))
    assert setting_curve(compare([sweep])[0]) is None
    wide = _sweep(tmp_path / "wide", _losses({0.1: 3.5, 1.0: 3.0, 8.0: 3.4}))
    assert setting_curve(compare([wide], "tok_s")[0]) is None
