"""A fisher stage and the penalties that read it, as a recipe has them."""

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
from ingot.core.events import Display
from ingot.core.recipe import load_recipe
from ingot.evaluate.likelihood import comparison
from ingot.pipeline.graph import Graph, load_graph
from ingot.pipeline.run import job_of, link
from ingot.stages import child
from ingot.stages.kinds import RECIPE_KINDS
from ingot.stages.models.importance import read_fisher
from ingot.stages.models.load import load_model
from ingot.store.reader import Store
from ingot.train.engine import Engine

RECIPE = """
[run]
name = "keep"

[stage.old]
kind = "corpus"
sources = ["old.txt"]
quality = "none"
holdout = { fraction = 0.2, by = "tail" }

[stage.new]
kind = "corpus"
sources = ["new.jsonl"]
format = "chat"
pii = false
holdout = { fraction = 0.2, by = "document" }

[stage.bpe]
kind = "tokenizer"
from = "old"
vocab = 280

[stage.base]
kind = "train"
data = { old = 1.0 }
tokenizer = "bpe"
model = { depth = 1, width = 16, heads = 2, context = 32 }
batch = 4
duration = "6 steps"
precision = "fp32"
evaluate = { sample = false, tokens = 64 }
loop = { threads = 1 }

[stage.worth]
kind = "fisher"
model = "base"
data = { old = 1.0 }
samples = 12

[stage.tuned]
kind = "train"
init = "base"
data = { new = 0.5, old = 0.5 }
batch = 4
duration = "6 steps"
precision = "fp32"
optim = { lr = 1e-2 }
penalties = [{ kind = "ewc", fisher = "worth", weight = 5.0 }, { kind = "l2sp", weight = 0.1 }, { kind = "kl", weight = 0.5 }]
evaluate = { sample = false, tokens = 64 }
loop = { threads = 1, save_every = 2, log_every = 1 }

[stage.both]
kind = "fisher"
model = "tuned"
data = { new = 0.5, old = 0.5 }
samples = 8
pool = 2
previous = "worth"
gamma = 0.5

[stage.card]
kind = "evaluate"
models = ["base", "tuned"]
"""  # noqa: E501


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp("keep")
    draw = random.Random(1)
    (work / "old.txt").write_text("".join(draw.choice("abc def.\n") for _ in range(4000)))
    rows = [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"{i % 7}"}] for i in range(30)]
    (work / "new.jsonl").write_text("".join(json.dumps({"messages": r}) + "\n" for r in rows))
    (work / "keep.toml").write_text(RECIPE)
    before = Path.cwd()
    os.chdir(work)
    try:
        graph = load_graph(Path("keep.toml"), [], Path("runs"))
        for name in ("old", "bpe", "old@bpe", "base", "new", "new@bpe", "worth"):
            _run(graph, name)
        yield graph
    finally:
        os.chdir(before)


def _run(graph: Graph, name: str, to: str | None = None) -> Path:
    node = graph.nodes[name]
    job = job_of(graph, node, quiet=True)
    if to:
        job["dir"] = str((graph.stage(node).path.parent / to).absolute())
    child.run(job)
    link(graph, node)
    return Path(job["dir"])


def _at(graph: Graph, name: str) -> Path:
    return graph.stage(graph.nodes[name]).path


def _same(one: Path, two: Path) -> bool:
    """Whether two directories hold the same tensors, to the bit."""
    a, b = ({k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()} for path in (one, two))
    return bool(a) and a.keys() == b.keys() and all(torch.equal(v, b[name]) for name, v in a.items())


def test_samples_that_repeat_rows_are_named(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(Display, "notify", lambda self, message: messages.append(message))
    more = load_graph(Path("keep.toml"), ["stage.worth.samples=200"], Path("runs"))
    _run(more, "worth", "repeated")
    assert any(m.startswith("old: 200 samples are drawn from ") and "so rows repeat" in m for m in messages), messages
    messages.clear()
    _run(graph, "worth", "once")
    assert not messages


def test_2_7_a_fisher_stage_keeps_f_and_theta(graph: Graph) -> None:
    stage = _at(graph, "worth")
    model = load_model(_at(graph, "base"), print, device="cpu").model
    fisher, theta = read_fisher(stage, model)
    result = json.loads((stage / "result.json").read_text())
    for name, parameter in model.named_parameters():
        assert torch.equal(theta[name], parameter), name
        assert fisher[name].dtype == torch.float32
        assert (fisher[name] >= 0).all()
    values = torch.cat([f.flatten() for f in fisher.values()])
    assert result["mean"] == pytest.approx(float(values.double().mean()), rel=1e-6)
    assert result["max"] == float(values.max())
    assert result["trace"] == pytest.approx(float(values.double().sum()), rel=1e-4)
    assert result["trace_low"] < result["trace"] < result["trace_high"]
    assert result["samples"] == 12
    assert result["parameters"] == len(values)
    assert 0 < result["zero_fraction"] < 1  # ids that the text does not hold are anchored to nothing
    assert list((stage / "fisher").glob("*.safetensors"))


def test_a_killed_fisher_stage_goes_on_to_the_bit(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.evaluate.fisher import Fisher
    from ingot.stages.evaluation import fisher as stage

    original, done = Fisher.add, []

    def add(self: Fisher, batch: Any, first_row: int) -> None:
        if first_row == 7 and not done:
            done.append(first_row)
            raise InterruptedError
        original(self, batch, first_row)

    monkeypatch.setattr(Fisher, "add", add)
    monkeypatch.setattr(stage, "_SAVE_SECONDS", 0.0)
    with pytest.raises(InterruptedError):
        _run(graph, "worth", to="worth-killed")
    again = _run(graph, "worth", to="worth-killed")
    assert _same(_at(graph, "worth") / "fisher", again / "fisher")
    assert not (again / "partial").exists()


def test_2_7_a_stage_with_every_penalty_resumes_to_the_bit(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The anchors are where the stage started, not where it goes on from; decay is off, and the log has each part."""
    straight = _run(graph, "tuned")
    original = Engine.step

    def step(self: Engine, raw: Any) -> Any:
        if self.state["step"] == 3:
            raise InterruptedError
        return original(self, raw)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", step)
        with pytest.raises(InterruptedError):
            _run(graph, "tuned", to="tuned-killed")
    again = _run(graph, "tuned", to="tuned-killed")
    results = [json.loads((path / "result.json").read_text()) for path in (straight, again)]
    volatile = ("seconds", "tok_s", "peak_bytes")
    assert {k: v for k, v in results[0].items() if k not in volatile} == {
        k: v for k, v in results[1].items() if k not in volatile
    }
    assert _same(straight / "checkpoints/00000006", again / "checkpoints/00000006")
    events = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    assert steps[0]["penalty/ewc"] == steps[0]["penalty/l2sp"] == 0  # at theta*
    assert steps[0]["penalty/kl"] < 1e-6
    assert min(steps[-1][f"penalty/{name}"] for name in ("ewc", "l2sp", "kl", "ewc_grad_norm")) > 0
    evaluated = [e for e in events if e["event"] == "evaluation"]
    assert {"train_loss_nats/old", "train_loss_nats/new"} <= set(evaluated[0])  # the loss of each source
    assert graph.nodes["tuned"].settings.optim.weight_decay == 0  # type: ignore[attr-defined]


def test_2_7_online_ewc_adds_what_is_left_of_the_tasks_before(graph: Graph) -> None:
    """F = gamma F_old + F_new, at the newest weights."""
    _run(graph, "tuned") if not (_at(graph, "tuned") / "DONE").exists() else None
    online = _run(graph, "both")
    job = job_of(graph, graph.nodes["both"], quiet=True)
    job["settings"] |= {"previous": None, "gamma": 1.0}
    job["inputs"].pop("previous")
    job["dir"] = str((online.parent / "alone").absolute())
    child.run(job)
    model = load_model(_at(graph, "tuned"), print, device="cpu").model
    (f, theta), (new, _), (old, _) = (
        read_fisher(path, model) for path in (online, online.parent / "alone", _at(graph, "worth"))
    )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(f[name], 0.5 * old[name] + new[name])
        assert torch.equal(theta[name], parameter)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ('stage.tuned.penalties=[{ kind = "ewc", fisher = "base", weight = 1.0 }]', "is a train, expected a fisher"),
        ('stage.tuned.penalties=[{ kind = "ewc", fisher = "wroth", weight = 1.0 }]', "no stage 'wroth'"),
        ("stage.tuned.optim.weight_decay=0.1", "beside the penalty ewc, expected 0"),
        ("stage.base.penalties=[{ kind = 'l2sp', weight = 1.0 }]", "no init"),
        ("stage.tuned.penalties=[{ kind = 'kl', weight = 1 }, { kind = 'kl', weight = 2 }]", "kl/init twice"),
        ("stage.tuned.penalties=[{ kind = 'ewc', weight = 1 }]", r"penalties\.0.*fisher: missing"),
        ("stage.tuned.penalties=[{ kind = 'l2sp', weight = -1 }]", r"found -1"),
        ("stage.tuned.penalties=[{ kind = 'magic', weight = -1 }]", r"penalties\.0"),
        ('stage.worth={ kind = "fisher", model = "base", data = { old = 1 }, labels = "exact", pool = 2 }', "pool = 2"),
        ('stage.worth={ kind = "fisher", model = "base", data = { old = 1 }, gamma = 0.5 }', "without previous"),
        ("stage.worth.data={ nothing = 1.0 }", "no stage 'nothing'"),
    ],
)
def test_bad_input_is_one_sentence(graph: Graph, change: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        load_graph(Path("keep.toml"), [change], Path("runs"))
    assert len(str(caught.value).splitlines()) == 1, caught.value


def test_a_fisher_of_another_shape_is_refused(graph: Graph) -> None:
    other = load_model(_at(graph, "base"), print, device="cpu").model
    other.norm.weight = torch.nn.Parameter(torch.ones(17))
    with pytest.raises(UserError, match="of another shape"):
        read_fisher(_at(graph, "worth"), other)


def test_decay_has_its_usual_default_without_an_anchor(graph: Graph) -> None:
    recipe = load_recipe(Path("keep.toml"), ["stage.tuned.penalties=[{ kind = 'kl', weight = 1 }]"], RECIPE_KINDS)
    assert recipe.stages["tuned"][1].optim.weight_decay == 0.1  # type: ignore[attr-defined]


def test_2_7_a_chain_of_stages_has_a_forgetting_matrix(graph: Graph) -> None:
    """Noticed from the init edges; numbers, report and terminal agree, and what moved predictions is measured."""
    from ingot.report.html.panels import panel
    from ingot.report.html.panels_forgetting import chains, lines

    if not (_at(graph, "tuned") / "DONE").exists():
        _run(graph, "tuned")
    card = _run(graph, "card")
    table = {(r["model"], r["task"], r["metric"]): r for r in map(json.loads, (card / "table.jsonl").open())}
    loss = {m: table[m, "old", "loss_nats"]["value"] for m in ("base", "tuned")}
    forgotten = table["tuned", "old", "forgetting_nats"]
    assert forgotten["value"] == pytest.approx(loss["tuned"] - loss["base"])
    assert forgotten["low"] <= forgotten["value"] <= forgotten["high"]
    assert table["tuned", "old tasks", "backward_transfer_nats"]["value"] == pytest.approx(-forgotten["value"])
    guess = math.log(json.loads((_at(graph, "base") / "model.json").read_text())["vocab"])
    forward = table["tuned", "later tasks", "forward_transfer_nats"]["value"]
    assert forward == pytest.approx(guess - table["base", "new", "response_loss_nats"]["value"])
    assert ("tuned", "new", "forgetting_nats") not in table  # it has just been learned
    moved = table["tuned", "old", "kl_from_before_nats"]
    models = [load_model(_at(graph, name), print, device="cpu").model for name in ("base", "tuned")]
    store = Store.open(_at(graph, "old@bpe") / "val")
    assert comparison(models[0], models[0], store, 0.5, 4).kl["value"] == pytest.approx(0, abs=1e-6)
    assert moved["value"] == pytest.approx(comparison(*models, store, 0.5, 7).kl["value"], rel=1e-5)
    assert moved["value"] > 0
    (chain,) = chains(card)
    assert [row["stage"] for row in chain["rows"]] == ["base", "tuned"]
    assert [[cell["own"] for cell in row["cells"]] for row in chain["rows"]] == [[False, True], [True, False]]
    html = panel("evaluate", card)
    assert "Forgetting, up to tuned" in html
    assert f"{forgotten['value']:+.4f}" in html
    (line,) = lines(card)
    assert line.startswith(f"after tuned: validation loss on old was {loss['base']:.4f} nats at best before and is ")
    assert line.endswith(f"is {loss['tuned']:.4f} now, {forgotten['value']:+.4f} (no interval, n = 1)")
