"""F3: published scaling laws, the best model for a budget, cheap inference, repeated text."""

import math

import pytest

from ingot.core.errors import UserError
from ingot.plan.scaling import (
    LAWS,
    PETAFLOP_DAY,
    Law,
    ScalingLaw,
    best_in_time,
    effective_parameters,
    effective_tokens,
    limited_loss,
    seconds_at,
)

BILLION = 10**9
FITTED = [law for law in LAWS.values() if isinstance(law, Law)]


@pytest.mark.parametrize(
    ("law", "parameters", "tokens", "loss"),
    [
        ("hoffmann", 7, 140, 2.18),
        ("hoffmann", 70, 1400, 1.94),
        ("besiroglu", 7, 140, 2.173),
        ("besiroglu", 70, 1400, 1.974),
    ],
)
def test_f3_losses_of_the_published_fits(law: str, parameters: int, tokens: int, loss: float) -> None:
    digits = len(f"{loss}".partition(".")[2])
    assert round(LAWS[law].loss(parameters * BILLION, tokens * BILLION), digits) == loss


@pytest.mark.parametrize(("law", "ratios"), [("hoffmann", (41, 59, 93)), ("besiroglu", (23, 21, 18))])
def test_f3_tokens_per_parameter_at_three_budgets(law: str, ratios: tuple[int, ...]) -> None:
    budgets = (1.2e20, 5.9e21, 5.9e23)
    assert tuple(round(LAWS[law].optimum(flops).tokens_per_parameter) for flops in budgets) == ratios


def test_f3_source_error_a_loss_of_2_and_not_of_1942() -> None:
    """001's function counts in billions and trillions, with B = 998.1."""
    printed = 1.69 + 406.4 / 7**0.34 + 998.1 / (140 / 1000) ** 0.28
    assert printed > 1900
    assert 2 < LAWS["hoffmann"].loss(7 * BILLION, 140 * BILLION) < 2.5


@pytest.mark.parametrize("law", FITTED)
@pytest.mark.parametrize("flops", [1e13, 1e18, 5.88e23])
def test_the_optimum_is_the_lowest_loss_of_its_budget(law: Law, flops: float) -> None:
    best = law.optimum(flops)
    assert best.flops == pytest.approx(flops)
    others = [law.loss(best.parameters * f, best.tokens / f) for f in (0.5, 0.9, 0.99, 1.01, 1.1, 2)]
    assert best.loss < min(others)


def test_kaplan_gives_larger_models_and_fewer_tokens_as_budgets_grow() -> None:
    law: ScalingLaw = LAWS["kaplan"]
    assert law.optimum(PETAFLOP_DAY).parameters == pytest.approx(1.3e9)
    assert law.optimum(10 * PETAFLOP_DAY).parameters == pytest.approx(1.3e9 * 10**0.73)
    assert law.optimum(5.88e23).tokens_per_parameter < 1 < LAWS["besiroglu"].optimum(5.88e23).tokens_per_parameter
    assert law.optimum(PETAFLOP_DAY).loss == pytest.approx(3.1e8**0.05)
    assert limited_loss("parameters", 8.8e13) == limited_loss("tokens", 5.4e13) == 1
    assert limited_loss("parameters", 8.8e12) == pytest.approx(10**0.076)
    assert limited_loss("tokens", 5.4e12) == pytest.approx(10**0.095)
    assert law.loss(1e9, 1e30) == pytest.approx((6.4e13 / 1e9) ** 0.076), "with endless text, L(N)"
    assert law.loss(1e30, 1e9) == pytest.approx((1.8e13 / 1e9) ** 0.103), "with an endless model, L(D)"


@pytest.mark.parametrize("law", FITTED)
def test_without_serving_the_cheapest_model_for_a_loss_is_the_best_for_its_compute(law: Law) -> None:
    best = law.optimum(1e21)
    found = law.cheapest(best.loss, served=0)
    assert found.parameters == pytest.approx(best.parameters, rel=1e-3)
    assert found.tokens == pytest.approx(best.tokens, rel=1e-3)


@pytest.mark.parametrize("law", FITTED)
def test_the_more_is_served_the_smaller_the_model_and_the_less_compute_in_all(law: Law) -> None:
    best = law.optimum(1e21)
    sizes = []
    for served in (1e9, 1e12, 1e14):
        found = law.cheapest(best.loss, served)
        assert found.loss == pytest.approx(best.loss)
        assert found.flops + 2 * found.parameters * served < best.flops + 2 * best.parameters * served
        sizes.append(found.parameters)
        for factor in (0.97, 1.03):  # a minimum
            other = found.parameters * factor
            total = other * (6 * law.tokens_for(best.loss, other) + 2 * served)
            assert total > found.flops + 2 * found.parameters * served
    assert best.parameters > sizes[0] > sizes[1] > sizes[2]


def test_a_loss_below_the_entropy_of_the_text_is_refused() -> None:
    law = FITTED[0]
    assert law.tokens_for(1.7, 1e6) == math.inf
    with pytest.raises(UserError, match=r"found a loss of 1\.6, expected more than 1\.69"):
        law.cheapest(1.6, 1e9)


def test_repeated_text_is_worth_less_and_less() -> None:
    """Muennighoff et al.: up to four passes are almost as good as new text; 40 and more are worth nothing."""
    assert effective_tokens(5e5, 1e6) == 5e5
    assert effective_tokens(1e6, 1e6) == 1e6
    assert effective_tokens(4e6, 1e6) == pytest.approx(3.73e6, rel=0.01)
    assert effective_tokens(44e6, 1e6) / effective_tokens(400e6, 1e6) == pytest.approx(0.94, abs=0.02)
    assert effective_tokens(1e12, 1e6) == pytest.approx(16.39e6, rel=0.01)
    assert effective_parameters(5e4, 1e6) == 5e4, "20 tokens a parameter"
    assert effective_parameters(1e12, 1e6) == pytest.approx(6.31 * 5e4, rel=0.001)


@pytest.mark.parametrize("law", FITTED)
def test_in_a_time_the_best_model_is_the_budgets_where_time_grows_like_flops(law: Law) -> None:
    found, best = best_in_time(law, {1e5: 6e5 / 1e11, 1e6: 6e6 / 1e11}, 3600), law.optimum(3600 * 1e11)
    assert found.parameters == pytest.approx(best.parameters, rel=1e-3)
    assert found.loss == pytest.approx(best.loss)


def test_where_small_models_are_slow_for_their_size_larger_ones_are_best() -> None:
    law = FITTED[1]
    slow = {n: 1e-5 * (n / 1e6) ** 0.5 for n in (1e5, 1e6, 1e8)}
    linear = {1e6: 1e-5}
    assert best_in_time(law, slow, 3600).parameters > best_in_time(law, linear, 3600).parameters


def test_times_between_and_beyond_measurements() -> None:
    measured = {1e9: 0.02, 4e9: 0.04}
    assert seconds_at(measured, 1e9) == 0.02
    assert seconds_at(measured, 2e9) == pytest.approx(0.02 * 2**0.5)
    assert seconds_at(measured, 8e9) == pytest.approx(0.08), "beyond the largest like FLOPs"
    assert seconds_at(measured, 1e8) == 0.02
    busy = {1e9: 0.05, 4e9: 0.04}
    assert seconds_at(busy, 4e9) == 0.05
    assert seconds_at(busy, 8e9) == pytest.approx(0.1), "a busy machine makes no larger model free"
