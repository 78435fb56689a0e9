"""On-policy distillation from a recipe: conversations and running text, a kill, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.core.errors import UserError
from ingot.core.events import read_events
from ingot.objectives import gkd
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.stages import child
from tests.stages.conftest import RUNS

OBJECTIVE = "{ kind = 'gkd', teacher = 'base', max_new = 8, prompt = 6, on_policy = 0.5 }"
SOFT = '\n[stage.soft]\nkind = "annotate"\ndata = ["notes", "talk"]\nteacher = "base"\nk = 8\n'
pytestmark = pytest.mark.usefixtures("world")


def _student(data: str, objective: str = OBJECTIVE) -> str:
    """A change of the recipe: `tuned` as a new student."""
    return (
        "stage.tuned={ kind = 'train', tokenizer = 'bpe', model = { depth = 1, width = 16, heads = 2, context = 40 }, "
        f"objective = {objective}, data = {data}, batch = 4, duration = '6 steps', precision = 'fp32', optim = {{ lr = "
        "1e-2 }, evaluate = { tokens = 1, sample = false }, loop = { log_every = 1, save_every = 2, threads = 1 } }"
    )


def _run(*changes: str) -> Path:
    graph = load_graph(Path("grid.toml"), list(changes), RUNS)
    for node in graph.needed(["tuned"]):
        child.run(job_of(graph, node, quiet=True))
    return graph.stage(graph.nodes["tuned"]).path


def _steps(stage: Path) -> list[dict[str, Any]]:
    last = {e["step"]: e for e in read_events(stage / "metrics.jsonl", "step")}
    return [last[step] for step in sorted(last)]


@pytest.mark.parametrize("data", ["{ talk = 1.0 }", "{ notes = 1.0 }", "{ talk = 0.5, notes = 0.5 }"])
def test_every_second_step_trains_on_samples(data: str) -> None:
    steps = _steps(_run(_student(data)))
    assert [step["on_policy"] for step in steps] == [0, 1, 0, 1, 0, 1]
    assert [("sampled_divergence" in step, "divergence" in step) for step in steps] == [
        (False, True),
        (True, False),
    ] * 3
    assert all(0 < step["completion_tokens"] <= 8 for step in steps[1::2])


def test_a_killed_run_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student = _student("{ talk = 0.5, notes = 0.5 }", OBJECTIVE.replace("0.5", "0.7"))
    stage = _run(student)
    kept = stage.rename(tmp_path / "kept")
    real = gkd.roll_out

    def dies(prompts: Any, ctx: Any, **settings: Any) -> Any:
        if ctx.step == 5:
            raise KeyboardInterrupt
        return real(prompts, ctx, **settings)

    monkeypatch.setattr(gkd, "roll_out", dies)
    with pytest.raises(KeyboardInterrupt):
        _run(student)
    monkeypatch.setattr(gkd, "roll_out", real)
    resumed = _run(student)
    weights = [load_file(next((path / "checkpoints/00000006").glob("model*.safetensors"))) for path in (kept, resumed)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        np.testing.assert_array_equal(value, weights[1][name])
    names = ("step", "loss_nats", "distill", "on_policy")
    assert [[step[n] for n in names] for step in _steps(kept)] == [[step[n] for n in names] for step in _steps(resumed)]


@pytest.mark.parametrize(
    ("objective", "sentence"),
    [
        (OBJECTIVE.replace("8", "40"), "objective.max_new: found 40, expected less than the context of 40"),
        (OBJECTIVE.replace("'base'", "'soft'"), "'soft' has stored predictions for text that exists, expected a model"),
        (OBJECTIVE.replace("'base'", "'rm'"), "'rm' is a reward model"),
    ],
)
def test_what_cannot_be_is_refused(world: Path, objective: str, sentence: str) -> None:
    (world / "soft-gkd.toml").write_text((world / "grid.toml").read_text() + SOFT)
    with pytest.raises(UserError, match=sentence):
        load_graph(Path("soft-gkd.toml"), [_student("{ talk = 1.0 }", objective)], RUNS)
