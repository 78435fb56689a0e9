"""`ingot init --text DIR --time T`: the recipe that is written takes the time, on a machine of known speed."""

from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from ingot.cli.app import app
from ingot.cli.options import seconds_of
from ingot.core.errors import UserError
from ingot.model.config import ModelSettings
from ingot.pipeline import timed
from ingot.pipeline.graph import load_graph
from ingot.pipeline.tune import Trial
from ingot.plan.flops import training_flops_per_token
from ingot.plan.machine import Device
from ingot.report.plan import plan_rows
from ingot.stages.training.settings import TrainSettings

SPEED, PREPARE_S, START_S, TOKEN_BYTES = 5e10, 9.0, 4.0, 2.5


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 3 MB of text, on a CPU of 50 GFLOP/s that is not measured."""

    def train(probe: timed.Probe, depth: int, batch: int, notify: timed.Notify) -> Trial:
        config = ModelSettings(depth=depth, context=probe.context).resolve(probe.vocab)
        step = batch * probe.context * training_flops_per_token(config) / SPEED
        return Trial({}, step, START_S, 0.0, {})

    monkeypatch.setattr(timed.Probe, "train", train)
    monkeypatch.setattr(timed, "_prepare", lambda probe, total: (PREPARE_S, TOKEN_BYTES))
    monkeypatch.setattr("ingot.plan.machine.this_machine", lambda: Device("CPU", 10**9, half=None))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for i in range(60):
        words = " ".join(f"word{i}x{j} of note {j * i % 97}" for j in range(2500))
        (tmp_path / "notes" / f"{i}.md").write_text(words)
    return tmp_path


@pytest.mark.parametrize("asked", ["2m", "20m", "8h"])
def test_the_recipe_loads_and_its_forecast_takes_the_time(text: Path, asked: str) -> None:
    result = CliRunner().invoke(app, ["init", "--text", "notes", "--time", asked, "mine.toml"])
    assert result.exit_code == 0, result.output
    graph = load_graph(Path("mine.toml"), [], Path("runs"))
    assert set(graph.nodes) == {"text", "bpe", "text@bpe", "base", "card"}
    settings = graph.nodes["base"].settings
    assert isinstance(settings, TrainSettings)
    row = next(row for row in plan_rows(graph, Device("CPU", 10**9)) if row["name"] == "base")
    length = row["forecast"]["length"]
    held_out = min(0.1 * 1e6, timed.HELD_OUT_BYTES) / TOKEN_BYTES
    beside = timed.evaluated_tokens(held_out) * length["flops"] / length["tokens"] / 3 / SPEED
    total = PREPARE_S + timed.STARTS * START_S + timed.REPORT_S + beside + length["flops"] / SPEED
    used_up = "ends before the time" in (text / "mine.toml").read_text()
    assert used_up == (asked == "8h"), "so little text is used up before eight hours"
    assert total == pytest.approx(seconds_of(asked, ""), rel=0.05) or used_up
    assert length["steps"] >= timed.MIN_UPDATES
    written = (text / "mine.toml").read_text()
    for comment in ("# Time:", "# Depth:", "# Duration:", "# Batch:"):
        assert comment in written
    assert max(map(len, written.splitlines())) <= 160


def test_models_and_batches_that_take_too_long_to_measure_are_left_out(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that measures no more than depth 4 and no batch but the smallest; a slower one refuses."""
    train, deepest = timed.Probe.train, 4

    def slow(probe: timed.Probe, depth: int, batch: int, notify: timed.Notify) -> Trial | None:
        return train(probe, depth, batch, notify) if depth <= deepest and batch == timed.MIN_BATCH else None

    monkeypatch.setattr(timed.Probe, "train", slow)
    result = CliRunner().invoke(app, ["init", "--text", "notes", "--time", "1h", "mine.toml"])
    assert result.exit_code == 0, result.output
    settings = load_graph(Path("mine.toml"), [], Path("runs")).nodes["base"].settings
    assert isinstance(settings, TrainSettings)
    assert settings.model
    assert 1 < (settings.model.depth or 0) <= deepest
    deepest = 0
    result = CliRunner().invoke(app, ["init", "--text", "notes", "--time", "1h", "other.toml"])
    assert isinstance(result.exception, UserError)
    assert "expected a machine that can train them" in str(result.exception)


def test_a_longer_time_gets_a_larger_model_until_the_text_is_used_up(text: Path) -> None:
    depths = []
    for asked in ("1m", "10m", "1h"):
        CliRunner().invoke(app, ["init", "--text", "notes", "--time", asked, f"a{asked}.toml"])
        settings = load_graph(Path(f"a{asked}.toml"), [], Path("runs")).nodes["base"].settings
        assert isinstance(settings, TrainSettings)
        assert settings.model
        depths.append(settings.model.depth or 0)
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--text notes --time 20s mine.toml", "--time: found 20.0 s, expected at least"),
        ("--text notes --time soon mine.toml", "--time: found 'soon', expected a time such as 8h, 90m or 45s"),
        ("--chat notes --time 8h mine.toml", "--time: sizes a new model for a text"),
        ("--time 8h mine.toml", "--time: sizes a new model for a text"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(text: Path, words: str, sentence: str) -> None:
    result = CliRunner().invoke(app, ["init", *words.split()])
    assert isinstance(result.exception, UserError)
    assert sentence in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (text / "mine.toml").exists()


def test_the_vocabulary_grows_with_the_budget_up_to_what_the_text_is_enough_for() -> None:
    sizes = [timed.timed_vocab(flops, 16_384) for flops in (1e13, 1e15, 1e17, 1e19)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (512, 16_384)
    assert timed.timed_vocab(1e19, 300) == 300


def test_the_more_passes_the_more_weight_decay(text: Path) -> None:
    assert [timed.weight_decay(n) for n in (0.5, 4, 8, 40)] == pytest.approx([0.1, 0.1, 0.4, 3.0])
    found = {}
    for asked in ("1m", "8h"):
        CliRunner().invoke(app, ["init", "--text", "notes", "--time", asked, f"b{asked}.toml"])
        settings = load_graph(Path(f"b{asked}.toml"), [], Path("runs")).nodes["base"].settings
        assert isinstance(settings, TrainSettings)
        found[asked] = settings.optim.weight_decay, "# Weight decay:" in Path(f"b{asked}.toml").read_text()
    assert found == {"1m": (0.1, False), "8h": (3.0, True)}


def test_a_small_text_that_is_read_forty_times_gets_more_weight_decay_without_a_time_too(text: Path) -> None:
    (text / "poem.txt").write_text("a short poem of the red hill and the sea\n" * 50)
    CliRunner().invoke(app, ["init", "--text", "poem.txt", "poem.toml"])
    settings = load_graph(Path("poem.toml"), [], Path("runs")).nodes["base"].settings
    assert isinstance(settings, TrainSettings)
    assert (settings.duration, settings.optim.weight_decay) == ("40 epochs", 3.0)


def test_times_as_people_write_them() -> None:
    assert [seconds_of(t, "") for t in ("8h", "90m", "1h30m", "45s", "0.5h")] == [28800, 5400, 5400, 45, 1800]


@pytest.mark.long
def test_a_real_measurement_on_this_machine(tmp_path: Path, ingot) -> None:
    """The sample goes through corpus, tokenizer and training; the recipe that is written is legal."""
    (tmp_path / "notes").mkdir()
    for i in range(40):
        letters = Random(i)
        words = ("".join(letters.choices("abcdefgh", k=5)) for _ in range(400))
        (tmp_path / "notes" / f"{i}.txt").write_text(" ".join(words))
    done = ingot("init", "--text", "notes", "--time", "4h", "mine.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "depth 1, 8 rows" in done.stderr
    assert ingot("plan", "mine.toml", cwd=tmp_path).returncode == 0
