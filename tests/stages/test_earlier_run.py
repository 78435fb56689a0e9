"""A longer run goes on from the checkpoint of a shorter one, where all steps up to it are the same."""

import json
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ingot.core.artifact import checkpoint_problem
from ingot.core.events import read_events, stable
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.stages import child
from tests.stages.conftest import RUNS

SEEDS = count(7000)
Run = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("world")
CONSTANT = (
    "stage.tuned.optim={ lr = 1e-2, warmup = 2, schedule = 'constant' }",
    "stage.tuned.evaluate={ every = 2, tokens = 1, sample = false }",
)


@pytest.fixture
def run() -> Callable[..., Path]:
    """Run the stage `tuned` with changes, and a seed that no other test has."""
    seed = f"stage.tuned.seed={next(SEEDS)}"

    def call(*changes: str, quiet: bool = True) -> Path:
        whole = [change for change in changes if change.startswith("stage.tuned={")]  # which has no seed
        graph = load_graph(Path("grid.toml"), [*whole, seed, *(c for c in changes if c not in whole)], RUNS)
        for node in graph.needed(["tuned"]):
            child.run(job_of(graph, node, quiet))
        return graph.stage(graph.nodes["tuned"]).path

    return call


def _outcome(stage: Path, step: int) -> tuple[bytes, bytes, list[dict[str, Any]], dict[str, Any]]:
    """Weights and moments, best weights, the log, the result."""
    kinds = ("step", "evaluation", "final")
    events = [stable(e) for e in read_events(stage / "metrics.jsonl") if e["event"] in kinds]
    result = stable(json.loads((stage / "result.json").read_text()))
    ends = [sorted(events, key=lambda e: (e["step"], e["event"]))]
    return _weights(stage, f"{step:08d}"), _weights(stage, "best"), *ends, result


def _weights(stage: Path, checkpoint: str) -> bytes:
    (file,) = (stage / "checkpoints" / checkpoint).glob("*.safetensors")
    return file.read_bytes()


def _began(stage: Path) -> tuple[str | None, int]:
    """The stage that a run went on from, and its step."""
    (plan,) = read_events(stage / "metrics.jsonl", "plan")
    return plan.get("earlier_run"), plan.get("earlier_step", 0)


def test_a_longer_run_goes_on_from_a_shorter_one_to_the_same_bits(run: Run) -> None:
    longer = (*CONSTANT, "stage.tuned.duration='8 steps'")
    from_start = run(*longer)
    assert _began(from_start) == (None, 0)
    expected = _outcome(from_start, 8)
    shutil.rmtree(from_start)
    shorter = run(*CONSTANT)
    stage = run(*longer)
    assert _began(stage) == (shorter.name, 4)
    assert _outcome(stage, 8) == expected


def test_other_learning_rates_begin_at_the_first_step(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The cosine falls to the end of the run. The control is the test above."""
    shorter = run()
    assert _began(run("stage.tuned.duration='8 steps'", quiet=False)) == (None, 0)
    printed = "".join(capsys.readouterr().err.split())  # a terminal breaks lines
    expected = f"{shorter.name} is the same but for its length or data, and its learning rate of step 1 is"
    assert expected.replace(" ", "") in printed


def test_a_stable_phase_may_be_extended_up_to_its_decay(run: Run) -> None:
    wsd = "stage.tuned.optim={ lr = 1e-2, warmup = 2, schedule = 'wsd', cooldown = 2 }"
    shorter = run(wsd, "stage.tuned.duration='6 steps'", "stage.tuned.loop.keep=3")
    stage = run(wsd, "stage.tuned.duration='8 steps'")
    assert _began(stage) == (shorter.name, 4)


def test_data_that_differ_later_are_the_same_run_up_to_there(run: Run, world: Path) -> None:
    """The second corpus has another text at its end, which rows in the stored order reach after step 4."""
    text = (world / "notes.txt").read_text()
    (world / "other.txt").write_text(text + "\n" + "the very last line of them all " * 20)
    stored = (
        *CONSTANT,
        "stage.bpe.from='fixed'",
        "stage.fixed={ kind = 'corpus', sources = ['notes.txt'], quality = 'none', holdout = { fraction = 0 } }",
        "stage.tuned.data={ notes = 1.0 }",
        "stage.tuned.order='stored'",
        "stage.tuned.batch=2",
        "stage.notes.holdout.fraction=0",
        "stage.tuned.init='new'",
        "stage.new={ kind = 'train', data = { fixed = 1.0 }, tokenizer = 'bpe', model = { depth = 1, width = 16, "
        "heads = 2, context = 40 }, batch = 4, duration = '1 steps', precision = 'fp32', "
        "evaluate = { tokens = 1, sample = false } }",
    )
    first = run(*stored)
    changed = (*stored, "stage.notes.sources=['other.txt']", "stage.tuned.duration='8 steps'")
    stage = run(*changed)
    assert _began(stage) == (first.name, 4)
    weights = _weights(stage, "00000008")
    for path in (first, stage):
        shutil.rmtree(path)
    assert _weights(run(*changed), "00000008") == weights


def test_a_run_with_another_vocabulary_is_another_model(run: Run, world: Path) -> None:
    """Of characters, of which the second corpus has one more, in a row that only later steps read."""
    (world / "rare.txt").write_text((world / "notes.txt").read_text() + "\n" + "the last line has a \u2603 " * 20)
    table = (
        "stage.tuned={ kind = 'train', data = { notes = 1.0 }, tokenizer = 'signs', batch = 2, order = 'stored', "
        "model = { depth = 1, width = 16, heads = 2, context = 40 }, duration = '4 steps', precision = 'fp32', "
        "optim = { lr = 1e-2, warmup = 2, schedule = 'constant' }, evaluate = { tokens = 1, sample = false }, "
        "loop = { save_every = 2, threads = 1 } }",
        "stage.signs={ kind = 'tokenizer', from = 'notes', type = 'char' }",
        "stage.notes.holdout.fraction=0",
    )
    run(*table)
    assert _began(run(*table, "stage.notes.sources=['rare.txt']", "stage.tuned.duration='8 steps'")) == (None, 0)


@pytest.mark.parametrize("change", ["stage.tuned.optim.lr=2e-2", "stage.tuned.batch=4", "stage.tuned.seed=6999"])
def test_another_run_is_not_taken(run: Run, change: str) -> None:
    run(*CONSTANT)
    assert _began(run(*CONSTANT, "stage.tuned.duration='8 steps'", change)) == (None, 0)


def test_another_sample_of_rows_is_measured_where_the_run_goes_on(run: Run) -> None:
    """The loss before training was measured on other rows; the control has the same ones."""
    longer = ("stage.tuned.duration='8 steps'", *CONSTANT)
    shorter = run(*CONSTANT)
    same = run(*longer)
    kept = [e["step"] for e in read_events(same / "metrics.jsonl", "parts")]
    shutil.rmtree(same)
    other = run(*longer, "stage.tuned.evaluate.tokens=50")
    assert _began(other) == (shorter.name, 4)
    assert kept == [0, 8]
    assert [e["step"] for e in read_events(other / "metrics.jsonl", "parts")] == [4, 8]
    assert [e["step"] for e in read_events(other / "metrics.jsonl", "evaluation")] == [4, 6, 8]
    assert "in 4 updates" in json.loads((other / "result.json").read_text())["verdict_sentence"]


def test_a_run_without_held_out_rows_goes_on(run: Run) -> None:
    nothing = (*CONSTANT, "stage.notes.holdout.fraction=0")
    shorter = run(*nothing)
    stage = run(*nothing, "stage.tuned.duration='8 steps'")
    assert _began(stage) == (shorter.name, 4)
    assert [e["step"] for e in read_events(stage / "metrics.jsonl", "step")] == list(range(1, 9))


def test_damaged_best_weights_are_not_taken_over(run: Run) -> None:
    shorter = run(*CONSTANT)
    (best,) = (shorter / "checkpoints/best").glob("*.safetensors")
    best.write_bytes(best.read_bytes()[:-1] + b"!")
    stage = run(*CONSTANT, "stage.tuned.duration='8 steps'")
    assert _began(stage) == (shorter.name, 4)
    assert checkpoint_problem(stage / "checkpoints/best") is None
    assert json.loads((stage / "checkpoints/best/state.json").read_text())["step"] > 4


def test_an_edited_function_of_the_user_is_another_run(run: Run, world: Path) -> None:
    """Its text is in no setting, only in the digest of its file; the control is the same text with another length."""
    (world / "score.py").write_text("def letters(prompts, completions, **fields):\n    return [1.0 for _ in prompts]\n")
    (world / "asks.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(8)))
    asked = (
        "stage.asks={ kind = 'corpus', sources = ['asks.jsonl'], format = 'prompts', holdout = { fraction = 0 } }",
        "stage.tuned.data={ asks = 1.0 }",
        "stage.tuned.objective={ kind = 'grpo', group = 2, max_new = 2, reward = 'score.py:letters' }",
        "stage.tuned.optim={ lr = 1e-2, warmup = 2, schedule = 'constant' }",
        "stage.tuned.batch=2",
    )
    first = run(*asked)
    assert _began(run(*asked, "stage.tuned.duration='6 steps'")) == (first.name, 4)
    (world / "score.py").write_text("def letters(prompts, completions, **fields):\n    return [2.0 for _ in prompts]\n")
    assert _began(run(*asked)) == (None, 0)
    assert _began(run(*asked, "stage.tuned.duration='6 steps'"))[0] != first.name


def _new(later: str = "", model: str = "", loop: str = "") -> tuple[str, ...]:
    """A stage from random weights of 4 steps of 2 rows of 40 tokens, or of 4 more in a later phase."""
    phases = "{ name = 'a', duration = '4 steps' }"
    if later:
        phases += f", {{ name = 'b', duration = '4 steps', {later} }}"
    return (
        "stage.tuned={ kind = 'train', data = { notes = 1.0 }, tokenizer = 'bpe', batch = 2, precision = 'fp32', "
        f"model = {{ depth = 1, width = 16, heads = 2, context = 40{model} }}, loop = {{ threads = 1{loop} }}, "
        f"phases = [{phases}] }}",
        *CONSTANT,
    )


LONGER = "context = 80, batch = 1"


def test_learned_positions_of_another_number_are_another_model(run: Run) -> None:
    """Rotated ones have no weights, which is the control."""
    for model, goes_on in ((", family = 'gpt2'", False), ("", True)):
        shorter = run(*_new(model=model))
        assert _began(run(*_new(LONGER, model))) == ((shorter.name, 4) if goes_on else (None, 0))


def test_a_run_whose_micro_batch_would_be_another_begins_anew(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sums are rounded otherwise. A step that is one pass in both goes on, with this run's micro-batch."""
    shorter = run(*_new(loop=", micro_batch = 1"))
    assert _began(run(*_new("batch = 8"), quiet=False)) == (None, 0)
    assert "itspasseshave1rows,here2" in "".join(capsys.readouterr().err.split())
    stage = run(*_new("batch = 7", loop=", micro_batch = 1"))
    assert _began(stage) == (shorter.name, 4)
    other = run(*_new("batch = 6"))
    assert _began(other)[0] is None or _began(other)[0] != shorter.name


def test_a_step_of_one_pass_is_the_same_whatever_later_ones_need(run: Run) -> None:
    longer = _new("batch = 8")
    from_start = run(*longer)
    expected = _weights(from_start, "00000008")
    shutil.rmtree(from_start)
    shorter = run(*_new())
    stage = run(*longer)
    assert _began(stage) == (shorter.name, 4)
    assert json.loads((stage / "execution.json").read_text())["micro_batch"] == 8
    assert _weights(stage, "00000008") == expected


def test_rows_of_another_length_are_measured_where_the_run_goes_on(run: Run) -> None:
    run(*_new())
    stage = run(*_new(LONGER))
    assert [e["step"] for e in read_events(stage / "metrics.jsonl", "evaluation")] == [4, 6, 8]


def test_evaluations_at_other_steps_and_the_best_weights_are_kept(run: Run) -> None:
    shorter = run(*CONSTANT, "stage.tuned.evaluate.every=1")
    best = json.loads((shorter / "checkpoints/best/state.json").read_text())
    longer = run(*CONSTANT, "stage.tuned.duration='8 steps'", "stage.tuned.evaluate.every=4")
    assert [e["step"] for e in read_events(longer / "metrics.jsonl", "evaluation")] == [0, 1, 2, 3, 4, 8]
    found = json.loads((longer / "checkpoints/best/state.json").read_text())
    assert found["best_step"] == 8 or (found["best_step"], found["best_val"]) == (best["best_step"], best["best_val"])
