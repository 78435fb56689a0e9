"""Students of the layers of a teacher as stages: resumed to the bit, nothing of the projections in the model."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ingot.core.errors import UserError
from ingot.core.events import read_events
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.stages import child
from ingot.stages.job import TOKENIZER, Input
from ingot.stages.models.load import load_frozen, load_model
from ingot.stages.training import build
from ingot.stages.training.data import initial_config
from ingot.stages.training.initial_layers import initial_layers
from ingot.stages.training.phases import build_timeline
from ingot.stages.training.timeline import assumed_size
from ingot.tokenizer.byte_bpe import load_tokenizer
from tests.stages.conftest import RUNS

pytestmark = pytest.mark.usefixtures("world")
LARGE = (
    "stage.large={ kind = 'train', tokenizer = 'bpe', data = { notes = 1.0 }, batch = 4, duration = '4 steps', "
    "model = { depth = 3, width = 32, heads = 2, context = 40 }, precision = 'fp32', "
    "evaluate = { tokens = 1, sample = false }, loop = { threads = 1 } }"
)
INSIDE = "features = { weight = 0.5 }, relations = { attention = 0.1, values = 1.0, gram = 1.0 }"


def _student(objective: str, more: str = "", shape: str = "depth = 2, width = 16, heads = 2, context = 40") -> str:
    """A change of the recipe: `tuned` as a new model that learns from the notes."""
    return (
        f"stage.tuned={{ kind = 'train', tokenizer = 'bpe', model = {{ {shape} }}, objective = {objective}, "
        "data = { notes = 1.0 }, batch = 4, duration = '6 steps', precision = 'fp32', optim = { lr = 1e-2 }, "
        f"evaluate = {{ tokens = 1, sample = false }}, loop = {{ log_every = 1, save_every = 2, threads = 1{more} }} }}"
    )


def _distill(settings: str = INSIDE, teacher: str = "large") -> str:
    return f"{{ kind = 'distill', teacher = '{teacher}', {settings} }}"


def _graph(*changes: str) -> Any:
    return load_graph(Path("grid.toml"), [LARGE, *changes], RUNS)


def _run(*changes: str) -> Path:
    graph = _graph(*changes)
    for node in graph.needed(["tuned"]):
        child.run(job_of(graph, node, quiet=True))
    return graph.stage(graph.nodes["tuned"]).path


def _tensors(stage: Path) -> dict[str, Any]:
    (file,) = (stage / "checkpoints" / "00000006").glob("*.safetensors")
    return load_file(file)


def test_a_killed_student_ends_with_the_same_bytes_and_exports_no_projection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = _student(_distill())
    complete = _run(change)
    tensors = _tensors(complete)
    assert {f"model.extra.projection_{k}.weight" for k in range(3)} <= tensors.keys()
    assert any(name.startswith("optim.extra.projection_0.weight.") for name in tensors)
    steps = [e for e in read_events(complete / "metrics.jsonl") if e["event"] == "step"]
    assert {"features", "relations/attention", "relations/values", "relations/gram", "divergence"} <= set(steps[-1])
    assert steps[-1]["features"] < steps[0]["features"]
    model = load_model(complete, print, device="cpu").model
    result, size = json.loads((complete / "result.json").read_text()), sum(p.numel() for p in model.parameters())
    assert (result["parameters"], result["trained_parameters"]) == (size, size + 3 * 16 * 32)
    assert not [name for name in model.state_dict() if "projection" in name]
    assert load_frozen(complete, print, "cpu", model.embedding.weight.dtype).config == model.config
    complete.rename(tmp_path / "kept")
    step = build.Engine.step

    def dying(self: Any, raw: Any) -> Any:
        if self.state["step"] == 4:
            raise KeyboardInterrupt
        return step(self, raw)

    monkeypatch.setattr(build.Engine, "step", dying)
    with pytest.raises(KeyboardInterrupt):
        _run(change)
    monkeypatch.setattr(build.Engine, "step", step)
    again = _tensors(_run(change))
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].equal(tensor), name


def test_the_backend_is_torch_and_the_reason_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    graph = _graph(_student(_distill("features = {}"), shape="depth = 1, width = 32, heads = 2, context = 40"))
    for node in graph.needed(["tuned"]):
        child.run(job_of(graph, node, quiet=False))
    assert "backend torch: only PyTorch hands out the states of layers" in " ".join(capsys.readouterr().err.split())


FROM_LARGE = (
    "stage.tuned={ kind = 'train', init = 'large', init_layers = LAYERS, data = { notes = 1.0 }, batch = 4, "
    "duration = '1 steps', precision = 'fp32', optim = { lr = 1e-9, weight_decay = 0 }, "
    "evaluate = { tokens = 1, sample = false }, loop = { threads = 1 } }"
)


@pytest.mark.parametrize(("setting", "layers"), [("[0, 2]", [0, 2]), ("2", [0, 2]), ("1", [0]), ("[1]", [1])])
def test_a_student_starts_with_layers_of_its_teacher(setting: str, layers: list[int]) -> None:
    student = load_model(_run(FROM_LARGE.replace("LAYERS", setting)), print, device="cpu").model
    graph = _graph()
    teacher = load_model(graph.stage(graph.nodes["large"]).path, print, device="cpu").model
    assert student.config.depth == len(student.layers) == len(layers)
    right = {n: w for n, w in teacher.state_dict().items() if not n.startswith("layers.")}
    for i, n in enumerate(layers):
        right |= {f"layers.{i}.{name}": w for name, w in teacher.layers[str(n)].state_dict().items()}
    weights = student.state_dict()
    assert weights.keys() == right.keys()
    for name, weight in right.items():
        assert (weights[name] - weight).abs().max() < 1e-7, name


def test_layers_are_evenly_spaced() -> None:
    assert initial_layers(3, 6) == (0, 3, 5)
    assert initial_layers(6, 12) == (0, 2, 4, 7, 9, 11), "those of DistilBERT"
    for depth in range(1, 9):
        assert initial_layers(depth, depth) == tuple(range(depth))
        for count in range(2, depth + 1):
            found = initial_layers(count, depth)
            assert (found[0], found[-1]) == (0, depth - 1)
            assert max(b - a for a, b in itertools.pairwise(found)) - (depth - 1) // (count - 1) in (0, 1)


def test_a_student_of_layers_learns_from_its_teacher_at_the_default_rate() -> None:
    """And the plan counts its parameters."""
    change = FROM_LARGE.replace("LAYERS", "2").replace("lr = 1e-9, ", "")
    settings = _graph(change, f"stage.tuned.objective={_distill('features = {}')}").nodes["tuned"].settings
    large = _graph().stage(_graph().nodes["large"]).path
    config = initial_config(settings, {"init": Input("large", "", large)}, load_tokenizer(large / TOKENIZER))
    assert config.depth == 2
    timeline = build_timeline(settings, config, assumed_size)
    assert timeline.peak == pytest.approx(6e-4 * (768 / 32) ** 0.5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (FROM_LARGE.replace("LAYERS", "[0, 3]"), "init_layers: found 3, expected 0 to 2"),
        (FROM_LARGE.replace("LAYERS", "4"), "init_layers: found 4, expected at most 3"),
        (FROM_LARGE.replace("LAYERS", "[1, 0]"), r"init_layers: found \[1, 0\], expected numbers of layers in order"),
        (FROM_LARGE.replace("LAYERS", "[]"), r"init_layers: found \[\]"),
        (FROM_LARGE.replace("LAYERS", "0"), "init_layers"),
        (FROM_LARGE.replace("LAYERS", "2, adapter = 'lora'"), "found init_layers with an adapter"),
        (FROM_LARGE.replace("LAYERS", "2, model = { depth = 2, width = 16 }"), "found both init = 'large' and a model"),
        (_student("'lm'").replace("model =", "init_layers = 2, model ="), "found init_layers without init"),
        (_student(_distill("features = { layers = { 3 = 1 } }")), "found layer 3 of the student, expected 0 to 2"),
        (_student(_distill("features = { layers = { 2 = 4 } }")), "found layer 4 of the teacher, expected 0 to 3"),
        (
            _student(_distill("relations = { gram = 1, layers = { 0 = 1 } }")),
            "found layer 0 of the student, expected 1 to",
        ),
        (_student(_distill("relations = { heads = 2 }")), "found no weight, expected one of attention"),
        (_student(_distill("features = {}", "soft")), "objective.features: 'soft' has stored predictions"),
        (_student(_distill("relations = { gram = 1 }", "soft")), "objective.relations: 'soft' has stored predictions"),
        (_student(_distill(), ", backend = 'cpu'"), 'found loop.backend = "cpu" with features or relations'),
    ],
)
def test_bad_input_is_one_sentence(change: str, sentence: str) -> None:
    soft = "stage.soft={ kind = 'annotate', data = ['notes'], teacher = 'large', k = 8 }"
    with pytest.raises(UserError, match=sentence) as caught:
        _graph(change, soft)
    assert len(str(caught.value).splitlines()) == 1, caught.value


def test_a_depth_that_follows_from_a_size_is_checked_before_the_first_step() -> None:
    with pytest.raises(UserError, match=r"objective.features.layers: found layer 9 of the student, expected 0 to"):
        _run(_student(_distill("features = { layers = { 9 = 1 } }"), shape="size = '100K', context = 40"))
