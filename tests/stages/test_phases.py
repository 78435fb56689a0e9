"""A train stage with phases and a ramp, run in this process: what is trained on, what is logged, and being killed."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.core.errors import UserError
from ingot.core.events import read_events, stable
from ingot.distributed import checkpoint
from ingot.pipeline.graph import Graph, load_graph
from ingot.pipeline.run import job_of, link
from ingot.report import terminal
from ingot.report.html import panels_model
from ingot.stages import child
from ingot.stages.training.timeline import Timeline
from ingot.stages.training.trace import trace, trace_document
from ingot.train.engine import Engine

RECIPE = """
[run]
name = "phases"
seed = 5

[stage.prose]
kind = "corpus"
sources = ["prose.txt"]
quality = "none"
holdout = { fraction = 0.2, by = "tail" }

[stage.code]
kind = "corpus"
sources = ["code.txt"]
quality = "none"
holdout = { fraction = 0.2, by = "tail" }

[stage.letters]
kind = "tokenizer"
from = ["prose", "code"]
type = "char"

[stage.base]
kind = "train"
tokenizer = "letters"
model = { depth = 1, width = 16, heads = 2, context = 16 }
batch = { from = 3, to = 8, over = "1100 tokens" }
duration = "22 steps"
precision = "fp32"
optim = { lr = 1e-2 }
evaluate = { every = 7, tokens = 64, sample = false }
loop = { micro_batch = 2, save_every = 3, log_every = 1, threads = 1 }

[[stage.base.phases]]
name = "foundation"
fraction = 0.5
data = { prose = 1.0 }

[[stage.base.phases]]
name = "mix"
fraction = 0.3
data = { prose = 0.5, code = 0.5 }
lr = 2e-2
warmup = 2

[[stage.base.phases]]
name = "long"
fraction = 0.2
data = { prose = 0.3, code = 0.7 }
context = 32
batch = 5
schedule = "linear"
min_ratio = 0
"""
NAMES = ["foundation"] * 11 + ["mix"] * 7 + ["long"] * 4


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The recipe with everything before training done."""
    work = tmp_path_factory.mktemp("phases")
    draw = random.Random(1)
    for name, letters in (("prose", "abc def.\n"), ("code", "(x+y)*1;\n")):
        (work / f"{name}.txt").write_text("".join(draw.choice(letters) for _ in range(2500)))
    (work / "phases.toml").write_text(RECIPE)
    before = Path.cwd()
    os.chdir(work)
    try:
        graph = load_graph(Path("phases.toml"), [], Path("runs"))
        for name in ("prose", "code", "letters", "prose@letters", "code@letters"):
            _run(graph, name)
        yield graph
    finally:
        os.chdir(before)


def _run(graph: Graph, name: str, to: str | None = None, **settings: Any) -> Path:
    """Build one stage in this process, in its own directory or in another."""
    node = graph.nodes[name]
    job = job_of(graph, node, quiet=True)
    job["settings"] |= settings
    if to:
        job["dir"] = str((graph.stage(node).path.parent / to).absolute())
    child.run(job)
    link(graph, node)
    return Path(job["dir"])


def _spy(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> dict[int, list[list[int]]]:
    """Record the inputs of every step where the loop takes them; die before the step `stop_at`."""
    seen: dict[int, list[list[int]]] = {}
    original = Engine.step

    def step(self: Engine, raw: Any) -> Any:
        if self.state["step"] + 1 == stop_at:
            raise InterruptedError
        seen[self.state["step"] + 1] = raw.ids_BT.tolist()
        return original(self, raw)

    monkeypatch.setattr(Engine, "step", step)
    return seen


@pytest.fixture(scope="module")
def base(graph: Graph) -> tuple[Path, dict[int, list[list[int]]]]:
    with pytest.MonkeyPatch.context() as patch:
        seen = _spy(patch)
        return _run(graph, "base"), seen


def test_B9_C8_trace_is_what_was_trained_on_across_phases_and_ramps(base) -> None:
    stage, seen = base
    sources: dict[str, set[str]] = {}
    for step in range(1, 23):
        traced = list(trace(stage, step))
        assert [t.ids.tolist()[:-1] for t in traced] == seen[step]
        sources.setdefault(NAMES[step - 1], set()).update(t.source for t in traced)
    assert sources == {"foundation": {"prose"}, "mix": {"prose", "code"}, "long": {"prose", "code"}}
    assert [len(rows) for rows in seen.values()] == [*_ramp(18), 5, 5, 5, 5]
    assert {len(rows[0]) for rows in list(seen.values())[18:]} == {32}
    with pytest.raises(UserError, match=r"--step: found 23, expected at most 22, the last step of"):
        next(trace(stage, 23))


def test_a_document_that_no_step_trains_on_is_refused(base, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = base
    (document,) = trace_document(stage, "code.txt")
    assert set(document["steps"]) == set(range(12, 23))
    monkeypatch.setattr(Timeline, "steps_of", lambda *_: [])
    with pytest.raises(UserError, match=r"code.txt: found in no batch up to the last step, 22, of"):
        next(trace_document(stage, "code.txt"))


def _ramp(steps: int) -> list[int]:
    """3 + floor(5 R / W) rows, R those done and W the 1,100 tokens in rows of 16."""
    sizes: list[int] = []
    for _ in range(steps):
        sizes.append(3 + 5 * min(sum(sizes), 69) // 69)
    return sizes


def test_D15_both_losses_at_every_interval_and_at_the_start(base) -> None:
    found = read_events(base[0] / "metrics.jsonl", "evaluation")
    assert [e["step"] for e in found] == [0, 7, 14, 21, 22]
    for event in found:
        assert min(event["val_loss_nats"], event["train_loss_nats"]) > 0
    letters = json.loads((base[0] / "model.json").read_text())["vocab"]
    assert found[0]["val_loss_nats"] == pytest.approx(math.log(letters), abs=0.05)


def test_B9_the_log_says_the_phase_the_tokens_and_the_rate(base, graph: Graph) -> None:
    stage, _ = base
    events = read_events(stage / "metrics.jsonl", "step")
    assert [e["phase"] for e in events] == NAMES
    rows = [*_ramp(18), 5, 5, 5, 5]
    tokens = [n * context for n, context in zip(rows, [16] * 18 + [32] * 4, strict=True)]
    assert [e["tokens"] for e in events] == tokens
    assert [e["tokens_seen"] for e in events] == [sum(tokens[:n]) for n in range(1, 23)]
    rates = [e["lr"] for e in events]
    assert rates[11] == pytest.approx((rates[10] + 2e-2) / 2)  # first of two steps from the last rate to the peak
    assert rates[12] == pytest.approx(2e-2)
    assert rates[21] == 0
    result = json.loads((stage / "result.json").read_text())
    assert (result["tokens"], result["planned_tokens"], result["context"]) == (sum(tokens), sum(tokens), 32)
    assert result["val_loss_nats"] == pytest.approx(
        sum(
            result[f"val_loss_nats/{name}"] * share
            for name, share in (
                ("prose", (sum(tokens[:11]) + 0.5 * sum(tokens[11:18]) + 0.3 * sum(tokens[18:])) / sum(tokens)),
                ("code", (0.5 * sum(tokens[11:18]) + 0.7 * sum(tokens[18:])) / sum(tokens)),
            )
        )
    )
    assert [e["name"] for e in read_events(stage / "metrics.jsonl", "phase")] == ["foundation", "mix", "long"]
    assert json.loads((stage / "model.json").read_text())["context"] == 32
    page = str(panels_model.train(stage))
    assert "steps 1 to 11: 3 to 5 rows of 16 tokens; prose; learning rate" in page
    assert "steps 19 to 22: 5 rows of 32 tokens; 0.7 code + 0.3 prose; learning rate" in page
    (row,) = (r for r in terminal.status_rows(graph) if r["name"] == "base")
    assert (row["phase"], row["step"]) == ("long", 22)


def test_D12_C8_killed_in_one_phase_and_resumed_into_the_next_to_the_bit(base, graph, monkeypatch) -> None:
    """Killed in the ramp, across two borders and in the last phase; micro-batches of 2 divide few of the batches."""
    straight, _ = base
    for stop in (5, 11, 14, 21):  # after checkpoints 3, 9, 12, 18: the second and the last go on in the next phase
        with monkeypatch.context() as patch:
            _spy(patch, stop)
            with pytest.raises(InterruptedError):
                _run(graph, "base", to="killed")
    killed = _run(graph, "base", to="killed")
    before, after = (_tensors(checkpoint.checkpoint_path(stage / "checkpoints", 22)) for stage in (straight, killed))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    for event in ("step", "evaluation"):
        logs = [[stable(e) for e in read_events(stage / "metrics.jsonl", event)] for stage in (straight, killed)]
        assert logs[0] == logs[1]


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def test_C7_shorter_rows_are_more_at_once(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """micro_batch = 2 is of rows of 32: of rows of 16 it is 4, so that a pass holds as many tokens in every phase."""
    passes: list[tuple[int, int]] = []
    original = Engine._terms

    def terms(self: Engine, out: Any, batch: Any, *rest: Any) -> Any:
        if torch.is_grad_enabled():
            passes.append((len(batch), batch.context))
        return original(self, out, batch, *rest)

    monkeypatch.setattr(Engine, "_terms", terms)
    _run(graph, "base", to="passes")
    expected = [(n, 16) for rows in _ramp(18) for n in [4] * (rows // 4) + [rows % 4] * (rows % 4 > 0)]
    assert passes == expected + [(2, 32), (2, 32), (1, 32)] * 4


def test_C7_the_micro_batch_does_not_change_a_ramp(base, graph: Graph) -> None:
    straight, _ = base
    loop = {"micro_batch": 64, "save_every": 500, "log_every": 1, "threads": 1}
    whole = _run(graph, "base", to="whole", loop=loop)
    a, b = (read_events(stage / "metrics.jsonl", "step") for stage in (straight, whole))
    assert [e["tokens"] for e in a] == [e["tokens"] for e in b]
    assert [e["loss_nats"] for e in a] == pytest.approx([e["loss_nats"] for e in b], rel=1e-4)


def test_B9_rows_longer_than_the_model_of_init_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """`base` has a context of 32, its longest phase's; RoPE scaling by two reaches twice its original context."""
    longer = '[stage.longer]\nkind = "train"\ninit = "base"\nduration = "2 steps"\ndata = { code = 1 }\ncontext = 48\n'
    recipe = tmp_path / "longer.toml"
    recipe.write_text(RECIPE + longer)
    with pytest.raises(UserError, match="found 48, expected at most 32, which 'base' was made"):
        load_graph(recipe, [], tmp_path)
    scaling = "{ factor = 2.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_context = 24 }"
    assert load_graph(recipe, [f"stage.base.model.rope_scaling={scaling}"], tmp_path).nodes["longer"]


def test_C5_a_pad_outside_the_vocabulary_is_refused(graph: Graph) -> None:
    with pytest.raises(UserError, match=r"packing.pad: found 999, expected an id below the vocabulary of"):
        _run(graph, "base", to="pad", packing={"pad": 999})
