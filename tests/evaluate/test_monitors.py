"""Alarms come where a reward is gamed, before it is too late, and not where it is not."""

import numpy as np
import pytest

from ingot.evaluate.monitors import distinct, watch


def _series(function, steps=100, noise=0.0, seed=0):
    draw = np.random.default_rng(seed)
    return [(step, float(function(step)) + noise * float(draw.normal())) for step in range(steps)]


def _gold(step):
    """Rises to its peak of 0.2 at step 40, and falls: Gao et al.'s shape."""
    return 0.4 * (step / 40) ** 0.5 - 0.2 * step / 40 if step else 0.0


@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_gold_that_falls_while_the_proxy_climbs_is_told_before_a_tenth_is_lost(noise):
    gold = _series(_gold, 200, noise)
    proxy = _series(lambda step: 0.02 * step, 200, noise)
    (alarm,) = watch({"proxy": proxy, "gold": gold})
    assert alarm.name == "hacking"
    peak = max(range(200), key=_gold)
    assert alarm.step > peak - 20
    assert _gold(alarm.step) > 0.9 * _gold(peak)
    assert "climbs" in alarm.sentence


def test_no_alarm_where_both_rise_or_both_fall():
    rising = _series(lambda step: step**0.5, noise=0.05)
    assert watch({"proxy": rising, "gold": _series(lambda step: 0.5 * step**0.5, noise=0.02, seed=1)}) == []
    falling = _series(lambda step: -step)
    assert watch({"proxy": falling, "gold": falling}) == []
    assert watch({"proxy": rising}) == []
    assert watch({}) == []


@pytest.mark.parametrize(
    ("name", "harmless", "harmful"),
    [
        ("tokens", lambda s: 50 + 0.2 * s, lambda s: 50 + s),
        ("tokens", lambda s: 50 - 0.1 * s, lambda s: 50 - 0.4 * s),
        ("entropy_nats", lambda s: 2 - 0.005 * s, lambda s: 2 - 0.02 * s),
        ("distinct_2", lambda s: 0.9 - 0.003 * s, lambda s: 0.9 - 0.008 * s),
        ("kl_nats", lambda s: 0.1 * s, lambda s: 0.5 * s),
    ],
)
def test_drifts(name, harmless, harmful):
    assert watch({name: _series(harmless, noise=0.01)}) == []
    (alarm,) = watch({name: _series(harmful, noise=0.01)})
    assert alarm.name == name
    assert 20 < alarm.step < 99


def test_one_noisy_step_raises_no_alarm():
    spiked = [(s, 500.0 if s == 50 else 50.0) for s in range(100)]
    assert [a.name for a in watch({"tokens": [(s, v) for s, v in spiked if v < 500]})] == []
    assert [a.name for a in watch({"kl_nats": [(s, 100.0 if s == 50 else 5.0) for s in range(100)]})] == []


def test_alarms_come_in_order():
    found = watch({"tokens": _series(lambda s: 50 + 2 * s), "kl_nats": _series(lambda s: s)})
    assert [a.step for a in found] == sorted(a.step for a in found)
    assert {a.name for a in found} == {"tokens", "kl_nats"}


def test_distinct_pairs():
    assert distinct([[1, 2, 3, 4]]) == 1
    assert distinct([[1, 1, 1, 1, 1]]) == 0.25
    assert distinct([[1, 2, 1, 2, 1]]) == 0.5
    assert distinct([[1, 1, 1], [1, 2, 3]]) == pytest.approx(0.75)
    assert distinct([[1], []]) == 1
    assert distinct([[1, 2, 3, 1, 2, 3]], n=3) == 0.75


@pytest.mark.slow
def test_noise_alone_is_no_fall_however_often_one_looks():
    """60 healthy runs of 240 steps, each asked at twelve steps on the way; gold rises early and stays."""
    cries = 0
    for seed in range(60):
        gold = _series(lambda step: 1 - np.exp(-step / 20), 240, noise=0.1, seed=seed)
        proxy = _series(lambda step: step, 240)
        cries += any(watch({"proxy": proxy[:n], "gold": gold[:n]}) for n in range(20, 241, 20))
    assert cries <= 1  # with a border of three spreads of the smoothed gold nearly all


def test_a_series_is_not_measured_against_itself_at_its_beginning():
    assert watch({"tokens": list(enumerate([60.0, *[20.0] * 19, *[21.0] * 180]))}) == []
