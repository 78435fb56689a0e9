"""Phases and ramps before anything runs: steps, rows, tokens and learning rates as functions of the step."""

import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.data.packing import BestFit, Concatenated
from ingot.model.config import ModelSettings
from ingot.stages.training.phases import build_timeline, trained_config
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import AssumedSize, Timeline, assumed_size, overshoot

PHASES_OF_001 = [
    {"name": "foundation", "fraction": 0.4, "lr": 3e-4},
    {"name": "knowledge", "fraction": 0.3, "lr": 2e-4},
    {"name": "reasoning", "fraction": 0.2, "lr": 1.5e-4},
    {"name": "synthesis", "fraction": 0.1, "lr": 1e-4},
]
CONSTANT = {"schedule": "constant", "warmup": 0}


def _stage(**table) -> TrainSettings:
    base = {"data": {"a": 1.0}, "tokenizer": "t", "model": {"depth": 2}, "duration": "100 steps"}
    table = {name: value for name, value in {**base, **table}.items() if value is not None}
    return TrainSettings.model_validate(table)


def _line(sizes=assumed_size, context: int = 256, **table) -> Timeline:
    settings = _stage(**table)
    return build_timeline(settings, ModelSettings(depth=2, context=context).resolve(300), sizes, seed=1)


def _sizes(**rows: int):
    """SourceSizes of sources of so many full rows, at any context."""
    return lambda name, context: AssumedSize(float(context), rows[name] * context, rows[name])


# -- B9: phases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duration", ["1_000_000 steps", "2_097_152M tokens"])
def test_B9_the_four_phases(duration):
    """Shares of the data are shares of the steps, at 512 rows of 4,096 each: 400k, 300k, 200k, 100k."""
    line = _line(context=4096, duration=duration, batch=512, optim=CONSTANT, phases=PHASES_OF_001)
    assert [p.name for p in line.phases] == ["foundation", "knowledge", "reasoning", "synthesis"]
    assert [p.steps for p in line.phases] == [400_000, 300_000, 200_000, 100_000]
    assert line.steps == 1_000_000
    assert [p.tokens / line.tokens(line.steps) for p in line.phases] == pytest.approx([0.4, 0.3, 0.2, 0.1], rel=1e-12)
    assert line.tokens(line.steps) == 10**6 * 2_097_152
    for first, last, lr in ((1, 400_000, 3e-4), (400_001, 700_000, 2e-4), (700_001, 900_000, 1.5e-4)):
        assert line.lr(first) == line.lr(last) == lr
    assert line.lr(900_001) == line.lr(1_000_000) == 1e-4
    assert (line.rows(1), line.rows(1_000_000), line.peak) == (512, 512, 3e-4)


def test_B9_source_error_no_wrap_around_after_the_last_phase():
    """001 takes the step modulo the total, so its step 1,000,000 (from 0) is back at 3e-4 and in its first phase."""
    line = _line(duration="1_000_000 steps", batch=512, optim=CONSTANT, phases=PHASES_OF_001)
    for step in (1_000_001, 1_000_002, 5_000_000):
        assert line.lr(step) == 1e-4
        assert line.phase(step).name == "synthesis"


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"phases": [{"name": "x", "fraction": 0.4}, {"name": "y", "fraction": 0.5}]}, "add up to 0.9, expected 1"),
        ({"phases": [{"name": "x", "fraction": 0.5}, {"name": "x", "fraction": 0.5}]}, "more than one phase named 'x'"),
        ({"phases": [{"name": "x", "fraction": 0.5}, {"name": "y", "duration": "5 steps"}]}, "expected one of them"),
        ({"phases": [{"name": "x"}]}, "found neither of fraction and duration in phase 'x'"),
        ({"phases": [{"name": "x", "fraction": 1, "duration": "5 steps"}]}, "found both of fraction and duration"),
        ({"phases": [{"name": "x", "duration": "5 steps"}]}, "found duration beside phases that all have their own"),
        ({"phases": [{"name": "x", "fraction": 1}], "duration": None}, "found no duration"),
        ({"duration": None}, "found no duration"),
        ({"data": None}, "found no data; name the corpora"),
        ({"data": None, "phases": [{"name": "x", "fraction": 1}]}, "and phase 'x' has none"),
        (
            {"phases": [{"name": "x", "fraction": 1, "data": {"b": 1}}]},
            "found data beside phases that all have their own",
        ),
        ({"phases": [{"name": "x", "fraction": 1, "data": {"b": -1}}]}, "found b = -1.0, expected a fraction above 0"),
        ({"phases": [{"name": "x", "fraction": 1, "duration": "soon"}]}, "found 'soon', expected a number and a unit"),
        ({"phases": [{"name": "x", "fraction": 1, "schedule": "constant", "min_ratio": 0.1}]}, "found min_ratio with"),
        ({"batch": {"from": 8, "to": 8, "over": "9 steps"}}, "write batch = 8 for one that does not"),
        ({"batch": {"from": 8, "to": 16, "over": "a while"}}, "found 'a while', expected a number and a unit"),
        ({"batch": {"from": 8, "to": 16}}, "Field required"),
        ({"batch": 0}, "greater than 0"),
    ],
)
def test_B9_what_does_not_fit_together_is_one_sentence(table, sentence):
    with pytest.raises(ValidationError, match=sentence):
        _stage(**table)


def test_B9_phases_with_durations_of_their_own():
    phases = [
        {"name": "x", "duration": "100 steps"},
        {"name": "y", "duration": "70K tokens", "batch": 4},
        {"name": "z", "duration": "30K tokens", "batch": 4, "context": 100},
    ]
    line = _line(duration=None, batch=8, phases=phases)
    assert [p.steps for p in line.phases] == [100, math.ceil(70_000 / 1024), math.ceil((100_000 - 69 * 1024) / 400)]
    assert [p.context for p in line.phases] == [256, 256, 100]
    assert [p.first for p in line.phases] == [1, 101, 170]


def test_B9_the_rounding_of_phases_does_not_add_up():
    """Ten phases of 2.5 steps' worth of tokens each are 25 steps, not 30; each begins where the one before ended."""
    phases = [{"name": f"p{i}", "fraction": 0.1} for i in range(10)]
    for duration in ("25 steps", f"{25 * 8 * 256} tokens"):
        line = _line(duration=duration, batch=8, phases=phases)
        assert line.steps == 25
        assert {p.steps for p in line.phases} == {2, 3}
        assert [p.first for p in line.phases[1:]] == [p.last + 1 for p in line.phases[:-1]]


def test_B9_a_source_goes_on_where_the_phase_before_stopped():
    """200 rows of `a` in two phases of other shares: no row twice before every row was there once."""
    phases = [
        {"name": "x", "fraction": 0.5, "data": {"a": 0.6, "b": 0.4}},
        {"name": "y", "fraction": 0.5, "data": {"a": 0.3, "b": 0.3, "c": 0.4}},
    ]
    line = _line(_sizes(a=200, b=300, c=50), data=None, batch=16, duration="40 steps", phases=phases)
    drawn = {name: [] for name in line.sources}
    for step in range(1, 41):
        _, source, row = line.at(step)
        for s, r in zip(source.tolist(), row.tolist(), strict=True):
            drawn[line.sources[s]].append(r)
    for name, n in (("a", 200), ("b", 300), ("c", 50)):
        rows = drawn[name]
        assert len(set(rows[:n])) == min(n, len(rows))
    assert len(drawn["a"]) == 192 + 96  # 320 rows a phase: .6 and .3, exactly
    assert (len(drawn["b"]), len(drawn["c"])) == (128 + 96, 128)
    assert line.epochs(_sizes(a=200, b=300, c=50)) == pytest.approx({"a": 1.44, "b": 224 / 300, "c": 2.56})
    assert line.fractions == pytest.approx([0.45, 0.35, 0.2])


def test_B9_shares_are_exact_within_each_phase():
    phases = [
        {"name": "x", "fraction": 0.3, "data": {"a": 0.9, "b": 0.1}},
        {"name": "y", "fraction": 0.7, "data": {"a": 0.25, "b": 0.75}},
    ]
    line = _line(_sizes(a=9000, b=9000), data=None, batch=10, duration="100 steps", phases=phases)
    for first, last, share in ((1, 30, 0.1), (31, 100, 0.75)):
        of_b = np.concatenate([line.at(step)[1] for step in range(first, last + 1)])
        running = np.cumsum(of_b) - share * np.arange(1, len(of_b) + 1)
        assert (abs(running) <= 1).all()


def test_B9_another_context_has_other_rows_and_its_own_count():
    phases = [
        {"name": "short", "fraction": 0.4},
        {"name": "long", "fraction": 0.2, "context": 512, "batch": 4},
        {"name": "again", "fraction": 0.4},
    ]
    settings = _stage(batch=8, duration="50 steps", phases=phases)
    config = ModelSettings(depth=2).resolve(300)
    line = build_timeline(settings, config, _sizes(a=400), seed=1)
    assert trained_config(settings, config).context == 512
    assert [p.context for p in line.phases] == [256, 512, 256]
    short = [r for s in [*range(1, 21), *range(31, 51)] for r in line.at(s)[2].tolist()]
    long = [r for s in range(21, 31) for r in line.at(s)[2].tolist()]
    assert len(set(short)) == len(short) == 320  # the third phase goes on where the first stopped
    assert len(set(long)) == len(long) == 40
    assert line.tokens(50) == 320 * 256 + 40 * 512


def test_B9_a_model_is_as_long_as_its_longest_phase():
    config = ModelSettings(depth=2, context=64).resolve(300)
    short = _stage(
        phases=[{"name": "x", "fraction": 0.5, "context": 16}, {"name": "y", "fraction": 0.5, "context": 32}]
    )
    assert trained_config(short, config).context == 32
    tuned = {"init": "base", "tokenizer": None, "model": None}
    assert trained_config(_stage(**tuned, phases=[{"name": "x", "fraction": 1.0, "context": 32}]), config).context == 64
    longer = _stage(**tuned, phases=[{"name": "x", "fraction": 1.0, "context": 128}])
    scaling = {"factor": 2, "low_freq_factor": 1, "high_freq_factor": 4, "original_context": 64}
    scaled = ModelSettings.model_validate({"depth": 2, "context": 64, "rope_scaling": scaling}).resolve(300)
    assert trained_config(longer, scaled).context == 128
    for model in (config, ModelSettings(depth=2, context=64, family="gpt2").resolve(300)):
        with pytest.raises(UserError, match="context: found 128, expected at most 64, which 'base' was made for"):
            trained_config(longer, model)


@pytest.mark.parametrize(
    ("duration", "rows", "batch"),
    [
        ("3 epochs", 61, 1),  # a thousand short conversations: 183 updates, not 6 of 32 rows
        ("3 epochs", 300, 8),  # 900 rows: 8 make 112 updates, 16 would make 56
        ("1 epoch", 10**6, 32),  # long enough for 512 x depth^2 tokens
        ("0.4M tokens", 61, 2),
        ("6 steps", 61, 32),  # as the recipe says
        ("1 epoch", 20, 1),
    ],
)
def test_a_default_batch_leaves_a_short_duration_its_updates(duration: str, rows: int, batch: int) -> None:
    config = ModelSettings(depth=8, context=1024).resolve(300)
    settings = _stage(init="base", tokenizer=None, model=None, duration=duration, batch=None)
    line = build_timeline(settings, config, _sizes(a=rows), seed=1)
    assert line.rows(1) == batch
    unpaired = _stage(init="base", tokenizer=None, model=None, duration=duration, batch=None, objective="kto")
    assert build_timeline(unpaired, config, _sizes(a=rows), seed=1).rows(1) == max(2, batch)
    assert settings.evaluate.interval(line.steps) <= max(1, line.steps / 10)


def test_B9_C8_the_example_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "stages" / "train.md").read_text()
    block = page.split("## Phases and ramps")[1].split("```toml")[1].split("```")[0]
    table = tomllib.loads(block)["stage"]["base"]
    assert table.pop("kind") == "train"
    settings = TrainSettings.model_validate(table)
    config = ModelSettings.model_validate(table["model"]).resolve(50_257)
    line = build_timeline(settings, config, assumed_size)
    assert [(p.name, p.context, p.tokens / 3e11) for p in line.phases] == [
        ("foundation", 2048, pytest.approx(0.7, rel=1e-4)),
        ("knowledge", 2048, pytest.approx(0.2, rel=1e-4)),
        ("long", 8192, pytest.approx(0.1, rel=1e-4)),
    ]
    assert trained_config(settings, config).context == 8192
    (_, second, third), steps = (p.first for p in line.phases), line.steps
    assert [line.rows(s) for s in (1, second, third)] == [16, 1600, 400]
    assert [line.lr(s) for s in (2000, second + 500, third - 1)] == [3e-4, 2e-4, 2e-4]
    assert 0 < line.lr(1) < 1e-6
    assert line.lr(steps) == 0


# -- D5: the learning rate of phases -----------------------------------------------------------------------------------


def test_D5_the_stages_curve_runs_through_phases_without_their_own():
    plain = _line(optim={"lr": 1e-3})
    phased = _line(optim={"lr": 1e-3}, phases=[{"name": "x", "fraction": 0.3}, {"name": "y", "fraction": 0.7}])
    assert [plain.lr(s) for s in range(1, 120)] == [phased.lr(s) for s in range(1, 120)]


def test_D5_a_phase_after_rate_0_names_its_own_peak():
    """The default, the rate before it, would be 0; it was the stage's peak, without a word."""
    phases = [
        {"name": "x", "fraction": 0.5, "schedule": "linear", "min_ratio": 0},
        {"name": "y", "fraction": 0.5, "schedule": "constant"},
    ]
    with pytest.raises(UserError, match="found 'y' without lr after a phase that ends at rate 0"):
        _line(phases=phases)
    line = _line(phases=[phases[0], {**phases[1], "lr": 1e-4}])
    assert (line.lr(50), line.lr(51)) == (0, 1e-4)


def test_D5_a_phase_warms_up_again_from_where_the_last_one_ended():
    phases = [
        {"name": "x", "fraction": 0.5, "lr": 1e-3, "warmup": 10},
        {"name": "y", "fraction": 0.3, "lr": 5e-4, "warmup": 5},
        {"name": "z", "fraction": 0.2, "schedule": "linear", "min_ratio": 0},
    ]
    line = _line(phases=phases)
    assert line.lr(1) == pytest.approx(1e-4)  # 1e-3 x 1 / 10: the first update moves
    assert line.lr(10) == 1e-3
    assert line.lr(50) == pytest.approx(1e-4)  # the floor, a tenth
    assert [line.lr(50 + n) for n in range(1, 6)] == pytest.approx([1e-4 + 4e-4 * n / 5 for n in range(1, 6)])
    assert line.lr(80) == pytest.approx(5e-5)
    assert [line.lr(80 + n) for n in (1, 10, 20)] == pytest.approx([5e-5 * 19 / 20, 2.5e-5, 0])  # from there to nothing
    assert line.lr(99_999) == 0
    assert line.peak == 1e-3


def test_D5_a_warmup_that_the_run_is_too_short_for_is_known():
    assert _line(optim={"warmup": 100}).unfinished_warmups() == []  # the last step has the peak
    assert _line(optim={"warmup": 101}).unfinished_warmups() == [101]
    two = [{"name": "x", "fraction": 0.3}, {"name": "y", "fraction": 0.7}]
    assert _line(optim={"warmup": 60}, phases=two).unfinished_warmups() == [], "it ends in the second phase"
    own = [two[0] | {"lr": 1e-3, "warmup": 31}, two[1] | {"lr": 1e-3, "warmup": 70}]
    assert _line(phases=own).unfinished_warmups() == [31]


def test_D5_a_phase_takes_what_it_leaves_out_from_the_stage():
    optim = {"kind": "sgd", "lr": 0.2, "schedule": "wsd", "cooldown": 0.5, "warmup": 4}
    line = _line(optim=optim, phases=[{"name": "x", "fraction": 0.5, "lr": 0.1}, {"name": "y", "fraction": 0.5}])
    own, whole = (curve.schedule for curve in line.curves)
    assert (own.kind, own.warmup, own.cooldown, own.end, own.peak) == ("wsd", 4, 25, 50, 0.1)
    assert (whole.cooldown, whole.end, whole.peak) == (50, 100, 0.2)


# -- C8: ramps ---------------------------------------------------------------------------------------------------------


def test_C8_tokens_of_a_ramp_by_hand():
    """GPT-3's ramp scaled down, 1 to 5 rows of 4 tokens over 32 tokens: rows 1 1 2 3 4 5 5."""
    line = _line(context=4, batch={"from": 1, "to": 5, "over": "32 tokens"}, duration="7 steps")
    assert [line.rows(s) for s in range(1, 8)] == [1, 1, 2, 3, 4, 5, 5]
    assert [line.tokens(s) for s in range(1, 8)] == [4, 8, 16, 28, 44, 64, 84]
    assert line.max_rows == 5


def test_C8_gpt3():
    line = _line(context=2048, batch={"from": 16, "to": 1600, "over": "12B tokens"}, duration="300B tokens")
    assert line.rows(1) * 2048 == 32_768
    assert line.rows(line.steps) * 2048 == 3_276_800
    assert line.tokens(line.steps - 1) < 300e9 <= line.tokens(line.steps)
    flat = math.ceil(300e9 / 3_276_800)
    assert line.steps == pytest.approx(flat + 17_200 - 12e9 / 3_276_800, rel=1e-3)  # 17,154 small steps for 3,662


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        ("5 steps", 5),
        ("64 tokens", 6),  # 44 after 5 steps, 64 after 6
        ("65 tokens", 7),
        ("0.5 epochs", 7),  # of 40 rows: 80 targets
    ],
)
def test_C8_durations_end_with_the_step_that_reaches_them(duration, steps):
    sizes = _sizes(a=40)
    line = _line(sizes, context=4, batch={"from": 1, "to": 5, "over": "32 tokens"}, duration=duration)
    assert line.steps == steps


def test_C8_a_stages_ramp_runs_through_its_phases_and_a_phases_own_begins_with_it():
    batch = {"from": 2, "to": 6, "over": "16 steps"}
    plain = _line(batch=batch)
    phases = [{"name": "x", "fraction": 0.06}, {"name": "y", "fraction": 0.94}]
    assert [plain.rows(s) for s in range(1, 30)] == [_line(batch=batch, phases=phases).rows(s) for s in range(1, 30)]
    own = _line(batch=3, phases=[phases[0], {**phases[1], "batch": batch}])
    assert [own.rows(s) for s in (1, 6, 7, 10, 11, 22, 23, 100)] == [3, 3, 2, 2, 3, 5, 6, 6]
    by_tokens = {"from": 2, "to": 6, "over": f"{16 * 256} tokens"}
    plain, cut = _line(batch=by_tokens), _line(batch=by_tokens, phases=phases)
    assert [plain.rows(s) for s in range(1, 101)] == [cut.rows(s) for s in range(1, 101)]
    assert plain.tokens(100) == cut.tokens(100)


def test_C8_rows_of_a_ramp_follow_one_another_without_a_gap():
    line = _line(_sizes(a=500), batch={"from": 3, "to": 9, "over": "60 steps"}, duration="60 steps")
    rows = [r for step in range(1, 61) for r in line.at(step)[2].tolist()]
    assert len(rows) == sum(line.rows(s) for s in range(1, 61))
    assert len(set(rows)) == len(rows)
    flat = _line(_sizes(a=500), batch=7, duration="60 steps")
    assert rows == [r for step in range(1, 61) for r in flat.at(step)[2].tolist()][: len(rows)]


# -- durations and epochs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("duration", "steps"),
    [("5000 steps", 5000), ("1 step", 1), ("3M tokens", 1465), ("1 token", 1), ("2 epochs", 250), ("0.5 epoch", 63)],
)
def test_a_stage_without_phases(duration, steps):
    line = _line(_sizes(a=1000), batch=8, duration=duration)
    assert (line.steps, line.rows(1), line.phases[0].name) == (steps, 8, "all")


def test_tokens_per_parameter_count_the_whole_model():
    parameters = ModelSettings(depth=2).resolve(300).parameters
    line = _line(batch=8, duration="20 tokens/param")
    assert line.steps == math.ceil(20 * parameters / 2048)


def test_an_epoch_of_texts_that_are_not_encoded_is_unknown():
    with pytest.raises(UserError, match="once the texts are encoded"):
        _line(duration="1 epoch")


def test_C1_epochs_are_counted_in_tokens_at_any_stride():
    ends = np.array([10_000], np.uint64)
    for stride, epochs in ((1, 8976 * 1024 / 9999), (256, 36 * 1024 / 9984), (1024, 1.0)):
        plan = Concatenated(ends, 1024, stride=stride)
        line = _line(lambda name, context, plan=plan: plan, context=1024, batch=plan.rows, duration="1 step")
        (seen,) = line.epochs(lambda name, context, plan=plan: plan).values()
        assert seen == pytest.approx(epochs)
        one = _line(lambda name, context, plan=plan: plan, context=1024, batch=1, duration="1 epoch")
        assert one.steps == math.ceil(plan.targets / 1024)  # a step is 1,024 targets, an epoch all different ones


def test_an_epoch_of_packed_documents_is_all_its_rows():
    plan = BestFit(np.cumsum([30, 7, 19, 12, 25, 5]).astype(np.uint64), 32)
    line = _line(lambda name, context: plan, batch=1, duration="3 epochs")
    assert line.steps == 3 * plan.rows
    assert line.epochs(lambda name, context: plan) == {"a": pytest.approx(3)}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"duration": "3 epochs", "batch": 64}, ["trains on 21.3 times the 768 tokens", "64 epochs of a", "64 rows"]),
        ({"duration": "300 tokens", "batch": 4}, ["trains on 3.41 times the 300 tokens", "4 epochs of a", "4 rows"]),
        ({"duration": "2 steps", "batch": 64}, []),
        ({"duration": "3 epochs", "batch": 2}, []),
        (
            {
                "duration": None,
                "phases": [
                    {"name": "long", "duration": "99 epochs", "batch": 1},
                    {"name": "short", "duration": "1 epoch", "batch": 8},
                ],
            },
            ["phase short trains on 8 times the 256 tokens", "107 epochs of a", "8 rows"],
        ),
    ],
)
def test_a_phase_that_trains_on_more_than_was_asked_for(table: dict, expected: list[str]):
    line, size = _line(_sizes(a=1), **table), _sizes(a=1)
    sentences = [s for phase in line.summary() if (s := overshoot(phase, line.epochs(size)))]
    assert len(sentences) == bool(expected)
    assert all(part in sentences[0] for part in expected)


def test_the_summary_is_flat_and_says_what_a_phase_is():
    first, last = _line(
        batch=4, phases=[{"name": "x", "fraction": 0.5}, {"name": "y", "fraction": 0.5, "batch": 2}]
    ).summary()
    assert (first["name"], first["first_step"], first["last_step"], first["rows"]) == ("x", 1, 50, 4)
    assert (last["first_step"], last["last_step"], last["rows"], last["tokens"]) == (51, 100, 2, 50 * 2 * 256)
    assert last["data"] == {"a": 1.0}


def test_work_is_rows_times_context() -> None:
    phases = [
        {"name": "a", "duration": "10 steps", "batch": 4, "context": 128},
        {"name": "b", "duration": "10 steps", "batch": 8, "context": 256},
    ]
    line = _line(duration=None, phases=phases, optim=CONSTANT)
    assert [line.work(step) for step in (0, 10, 15, 20)] == [0, 5_120, 15_360, 25_600]


def test_a_phase_in_the_stored_order_begins_with_the_first_row_and_a_shuffled_one_goes_on() -> None:
    """`order` of a phase is its own; each order has a place of its own in a corpus."""
    own = {}, {"order": "stored"}
    phases = [{"name": name, "fraction": 0.25, **own[i % 2]} for i, name in enumerate("abcd")]
    line = _line(_sizes(a=1000), phases=phases, batch=4)
    drawn = [np.concatenate([line.at(step)[2] for step in range(p.first, p.last + 1)]) for p in line.phases]
    assert drawn[1].tolist() == list(range(100))
    assert drawn[3].tolist() == list(range(100, 200))
    plain = _line(_sizes(a=1000), batch=4)
    shuffled = np.concatenate([plain.at(step)[2] for step in range(1, 51)])
    assert np.concatenate([drawn[0], drawn[2]]).tolist() == shuffled.tolist()
    whole = _line(_sizes(a=1000), batch=4, order="stored")
    assert whole.at(3)[2].tolist() == [8, 9, 10, 11]
    assert whole.steps_of(0, 256, 9) == [3]
