"""`ingot scaling`: the law of a sweep whose losses follow a known one, its predictions, its answers, its page."""

import json
import math
import random
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ingot.cli.app import app
from ingot.core.artifact import atomic_json
from ingot.core.errors import UserError
from ingot.model.config import ModelSettings
from ingot.pipeline.graph import Graph, load_graphs
from ingot.plan.scaling import Law
from ingot.plan.scaling_fit import TrainedModel, fit, undetermined
from ingot.report.scaling import Scaling, _unit, answer, answer_lines, scaling_of, sentences
from ingot.report.sweep import write_any_report
from ingot.stages.training.settings import TrainSettings
from ingot.train.duration import Duration

TRUTH = Law(E=1.1, A=60.0, B=300.0, alpha=0.38, beta=0.42)
RECIPE = """
[run]
name = "law"

[stage.clean]
kind = "corpus"
sources = ["notes.txt"]

[stage.bpe]
kind = "tokenizer"
from = "clean"
vocab = 300

[stage.base]
kind = "train"
data = { clean = 1.0 }
tokenizer = "bpe"
model = { depth = 1, context = 16 }
duration = "1K tokens"

[stage.large]
kind = "train"
data = { clean = 1.0 }
tokenizer = "bpe"
model = { depth = 5, context = 16 }
duration = "9M tokens"

[sweep]
"stage.base.model" = [{ depth = 1, context = 16 }, { depth = 2, context = 16 }, { depth = 3, context = 16 }]
"stage.base.duration" = ["300K tokens", "1M tokens", "3M tokens"]
"""


def _finish(graphs: list[Graph], law: Law = TRUTH, noise: float = 0.0, **epochs: float) -> None:
    """Every stage is done; train stages have the loss of the law and a speed of 1e11 FLOP/s."""
    draw = random.Random(1)
    for graph in graphs:
        for node in graph.nodes.values():
            out, result = graph.stage(node), {}
            if isinstance(settings := node.settings, TrainSettings):
                shaped = settings if settings.model else graph.nodes[str(settings.init)].settings
                assert isinstance(shaped, TrainSettings)
                assert shaped.model
                parameters = shaped.model.resolve(300).parameters
                tokens = Duration.parse(str(settings.duration)).amount
                result = {"parameters": parameters, "tokens": tokens, "tok_s": 1e11 / (6 * parameters)}
                result["val_loss_nats"] = law.loss(parameters, tokens) + draw.gauss(0, noise)
                result |= {f"epochs/{name}": value for name, value in epochs.items()}
            atomic_json(out / "result.json", result)
            atomic_json(out / "DONE", {"seconds": 1.0, "key": node.key, "outputs": {}})


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "law.toml").write_text(RECIPE)
    (tmp_path / "notes.txt").write_text("A note. " * 100)
    return load_graphs(Path("law.toml"), [], Path("runs"))


def test_runs_whose_speed_is_not_known_are_fitted_and_say_nothing_of_time(graphs: list[Graph]) -> None:
    """A run that was killed in its final evaluation makes no step in its last attempt."""
    _finish(graphs)
    results = [*Path("runs").glob("stages/train-*/result.json")]
    for number, file in enumerate(results):
        known = json.loads(file.read_text())
        del known["tok_s"]
        atomic_json(file, known)
        if number == 0:
            assert scaling_of(graphs).token_seconds
    found = scaling_of(graphs)
    assert len(found.runs) == 9
    assert answer(found, 1e15, None, None).best.parameters > 0
    with pytest.raises(UserError, match="--budget: found a time, but no run of the sweep whose speed is known"):
        answer(found, None, 1e4, None)


def test_the_law_is_found_and_a_larger_model_predicted(graphs: list[Graph]) -> None:
    _finish(graphs)
    found = scaling_of(graphs)
    assert (found.stage, len(found.runs), list(found.held_out)) == ("base", 9, ["large"])
    assert found.fit.law.alpha == pytest.approx(TRUTH.alpha, rel=0.05)
    assert found.fit.law.beta == pytest.approx(TRUTH.beta, rel=0.05)
    large = found.held_out["large"]
    assert large.parameters > 2 * max(run.parameters for run in found.runs)
    assert found.fit.law.loss(large.parameters, large.tokens) == pytest.approx(large.loss, rel=0.002)
    text = "\n".join(sentences(found))
    assert "9 runs of base" in text
    assert "held out: large" in text

    flops = answer(found, 1e15, None, served=1e12)
    truth = TRUTH.optimum(1e15)
    assert flops.best.parameters == pytest.approx(truth.parameters, rel=0.1)
    assert flops.served
    assert flops.served[1].parameters < flops.best.parameters
    time = answer(found, None, 1e15 / 1e11, None)
    assert time.best.parameters == pytest.approx(flops.best.parameters, rel=0.01), "at the speed of the series"
    lines = "\n".join(answer_lines(found, answer(found, 1e20, None, None)))
    (line,) = (line for line in lines.splitlines() if "model = {" in line)
    table = tomllib.loads(line.strip().replace("}, duration", "}\nduration"))
    assert ModelSettings.model_validate(table["model"]).resolve(300).context == 16, "as all models of the series"
    assert Duration.parse(table["duration"]).amount > 0
    assert "far from what was measured" in lines
    page = write_any_report(graphs).read_text()
    assert "Loss by compute" in page
    assert "held out, predicted" in page


def test_a_sweep_that_has_not_run_has_a_page_without_a_law(graphs: list[Graph]) -> None:
    with pytest.raises(UserError, match="found 0 finished runs of 0 sizes and 0 lengths"):
        scaling_of(graphs)
    assert "Scaling law" not in write_any_report(graphs).read_text()


def test_the_command_reuses_finished_runs_and_prints_plain_data(graphs: list[Graph]) -> None:
    _finish(graphs)
    result = CliRunner().invoke(app, ["scaling", "law.toml", "--budget", "2h", "--served", "1e9", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["law"]["E"] == pytest.approx(TRUTH.E, rel=0.05)
    assert found["answer"]["budget"] == "2 h 0 min"
    assert found["answer"]["cheapest"]["served"] == 1e9
    assert abs(found["held_out"]["large"]["predicted"] / found["held_out"]["large"]["loss"] - 1) < 0.002


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--budget", "soon"], "--budget: found 'soon', expected a time such as 8h"),
        (["--budget", "5"], "--budget: found 5, expected FLOPs such as 1e17"),
        (["--served", "1e9"], "--served: found no --budget"),
        (["--budget", "2h", "--served", "inf"], "--served: found inf, expected a number of tokens"),
        (["--stage", "large"], "--stage large: the sweep does not vary such a train stage"),
        (["--set", 'sweep={ "stage.clean.holdout.fraction" = [0.1] }'], "sweep: found no train stage"),
    ],
)
def test_bad_input_is_one_sentence(graphs: list[Graph], words: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["scaling", "law.toml", *words])
    assert isinstance(result.exception, UserError)
    assert sentence in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("law", [Law(2.0, 0.0, 100.0, 0.3, 0.3), Law(4.0, 0.0, 0.0, 0.3, 0.3)], ids=["size", "neither"])
def test_runs_that_determine_no_law_answer_nothing(graphs: list[Graph], law: Law) -> None:
    """Neither size has an effect beyond the noise, nor, in the second case, length. The law is printed all the same."""
    _finish(graphs, law, noise=0.005)
    result = CliRunner().invoke(app, ["scaling", "law.toml", "--budget", "1e15"])
    assert isinstance(result.exception, UserError)
    assert "these runs do not tell how the loss depends on size" in str(result.exception)
    assert "L(N, D) = " in result.stdout


def test_exponents_within_bounds_by_chance_answer_nothing() -> None:
    """Size has no effect; with this noise alpha is 0.312 by chance, and 1e15 FLOPs would buy 17 parameters."""
    noise = np.random.default_rng(33)
    sizes, lengths = (5e4, 1e5, 4e5, 1e6), (2e5, 5e5, 1e6, 2e6)
    runs = [TrainedModel(n, d, 2 + 100 / d**0.3 + 0.005 * noise.standard_normal()) for n in sizes for d in lengths]
    found = Scaling("base", runs, {}, fit(runs), {}, math.inf, {})
    assert not undetermined(found.fit.law)
    with pytest.raises(UserError, match="do not tell how the loss depends on size"):
        answer(found, 1e15, None, None)


def test_a_series_of_initial_models_has_a_page_with_its_law(graphs: list[Graph]) -> None:
    """The sweep varies `init` and the length, so that no point has a `model` table."""
    head, _, _ = RECIPE.partition("[stage.base]")
    train = '[stage.{}]\nkind = "train"\ndata = {{ clean = 1.0 }}\n{}\nduration = "1M tokens"\n'
    models = [train.format(f"m{i}", f'tokenizer = "bpe"\nmodel = {{ depth = {i}, context = 16 }}') for i in (1, 2, 3)]
    sweep = (
        '"stage.base.init" = ["m1", "m2", "m3"]\n"stage.base.duration" = ["300K tokens", "1M tokens", "3M tokens"]\n'
    )
    Path("law.toml").write_text(head + "".join(models) + train.format("base", 'init = "m1"') + "[sweep]\n" + sweep)
    graphs = load_graphs(Path("law.toml"), [], Path("runs"))
    _finish(graphs)
    assert "Loss by compute" in write_any_report(graphs).read_text()
    assert scaling_of(graphs).family == {}


def test_noise_of_ordinary_runs_leaves_an_answer(graphs: list[Graph]) -> None:
    _finish(graphs, noise=0.002)
    assert 1e4 < answer(scaling_of(graphs), 1e15, None, None).best.parameters < 1e9


def test_a_mixture_is_new_until_its_first_corpus_repeats(graphs: list[Graph]) -> None:
    _finish(graphs, one=0.5, other=0.25)
    assert scaling_of(graphs).unique == 3e6 / 0.5


@pytest.mark.parametrize("amount", [18, 1.4e6, 999_700, 999.7e6, 5.34e12])
def test_amounts_are_written_as_recipes_read_them(amount: float) -> None:
    assert Duration.parse(f"{_unit(amount)} tokens").amount == pytest.approx(amount, rel=0.005)
