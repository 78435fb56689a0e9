"""Features and relations in the engine: what they add, where they are zero, and any split of a step."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ingot.core.errors import UserError
from ingot.data.batches import Batch
from ingot.model.config import ModelSettings
from ingot.model.transformer import Transformer, build
from ingot.objectives.distill import Distill
from ingot.objectives.settings import DistillSettings
from ingot.train.engine import Engine
from tests.objectives.helpers import T, V, engine, gradient, model, pairs

RELATIONS = ("attention", "queries", "keys", "values", "gram")
EVERYTHING: dict[str, Any] = {"features": {"weight": 0.3}, "relations": dict.fromkeys(RELATIONS, 0.7)}


def _teacher(**shape: Any) -> Transformer:
    """Deeper and wider than the student, with weights large enough that attention is not uniform."""
    table = {"depth": 5, "width": 48, "heads": 4, "context": T, **shape}
    teacher = build(ModelSettings.model_validate(table).resolve(V), 7, dtype=torch.float64)
    with torch.no_grad():
        for name, weight in teacher.named_parameters():
            if ".q." in name or ".k." in name:
                weight *= 8
    return teacher.eval().requires_grad_(False)


def _engine(path: Path, teacher: nn.Module, micro: int = 4, alpha: float = 1.0, **settings: Any) -> Engine:
    objective = Distill(DistillSettings(teacher="t", alpha=alpha, **settings))
    return engine(path, objective, micro=micro, companions={"teacher": teacher})


def _packed(count: int = 4) -> Batch:
    """Rows of two documents each, of which the second has labels on some tokens only."""
    draw = np.random.default_rng(3)
    ids = draw.integers(1, V, (count, T))
    labels = np.roll(ids, -1, 1)
    labels[:, [5, 6, 7, T - 1]] = -100
    documents = np.broadcast_to(np.arange(T) >= 6, ids.shape).astype(np.int64)
    positions = np.where(documents == 1, np.arange(T) - 6, np.arange(T)).astype(np.int64)
    rows = np.arange(count)
    return Batch(ids, labels, positions, documents, np.zeros_like(rows), rows)


def _penalties(engine: Engine, batch: Batch) -> dict[str, float]:
    others = engine.gradients(batch)[2]
    return {name: float(x) for name, x in others.items() if name.startswith(("features", "relations"))}


@pytest.mark.parametrize("packed", [False, True])
def test_any_split_of_a_step_has_the_same_gradient(tmp_path: Path, packed: bool) -> None:
    batch, teacher = _packed() if packed else pairs(), _teacher()
    one, four = (_engine(tmp_path, teacher, micro, 0.4, **EVERYTHING) for micro in (16, 1 if packed else 4))
    whole = gradient(one, batch)
    assert (gradient(four, batch) - whole).norm() <= 1e-12 * whole.norm()
    names = ["features", *(f"relations/{name}" for name in RELATIONS)]
    assert list(_penalties(one, batch)) == names
    assert min(_penalties(one, batch).values()) > 0


def test_the_gradient_is_the_sum_and_the_reported_loss_that_of_the_labels(tmp_path: Path) -> None:
    """And alpha = 1 with features is fine-tuning plus features."""
    batch, teacher = pairs(), _teacher()
    states, similarities = {"features": {"weight": 0.3}}, {"relations": {"gram": 0.7}}
    cases: list[dict[str, Any]] = [{}, states, similarities, {**states, **similarities}]
    plain, features, gram, both = (_engine(tmp_path, teacher, **settings) for settings in cases)
    labels = gradient(plain, batch)
    size = len(labels)
    expected = gradient(features, batch)[:size] + gradient(gram, batch) - labels
    assert (gradient(both, batch)[:size] - expected).norm() <= 1e-12 * expected.norm()
    assert (expected - labels).norm() > 1e-3 * labels.norm()
    assert float(both.gradients(batch)[0]) == pytest.approx(float(plain.gradients(batch)[0]), rel=1e-12)
    assert both.evaluate([batch]).loss == pytest.approx(plain.evaluate([batch]).loss, rel=1e-12)


def test_a_student_equal_to_its_teacher_has_no_distance_and_no_gradient(tmp_path: Path) -> None:
    teacher = model(1).eval().requires_grad_(False)
    engine = _engine(tmp_path, teacher, **EVERYTHING)
    batch, plain = pairs(), gradient(_engine(tmp_path, teacher), pairs())
    assert max(_penalties(engine, batch).values()) < 1e-13
    found = gradient(engine, batch)
    assert (found[: len(plain)] - plain).norm() <= 1e-9 * plain.norm()
    assert found[len(plain) :].norm() <= 1e-9 * plain.norm()


def _turned(model: Transformer, scale: float) -> Transformer:
    """The same function with a residual stream that is rotated and scaled (RMSNorm has gains of 1 here)."""
    width = model.config.width
    rotation = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(3)).double())[0]
    turned = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in turned.named_parameters():
            if name in ("embedding.weight",):
                weight.copy_(scale * weight @ rotation)
            elif ".o." in name or ".down." in name:
                weight.copy_(scale * rotation.T @ weight)
            elif weight.dim() == 2:
                weight.copy_(weight @ rotation)
    return turned


def test_relations_do_not_change_if_the_students_states_rotate_and_grow(tmp_path: Path) -> None:
    batch, teacher, values = _packed(), _teacher(), []
    for scale in (None, 1.0, 30.0):
        trained = _engine(tmp_path, teacher, **EVERYTHING)
        student = trained.model
        assert isinstance(student, Transformer)
        student.config = student.config.model_copy(update={"norm_eps": 1e-30})
        for module in student.modules():
            if hasattr(module, "eps"):
                setattr(module, "eps", 1e-30)  # noqa: B010
        if scale:
            for old, new in zip(student.parameters(), _turned(student, scale).parameters(), strict=True):
                old.data.copy_(new.data)
        values.append(_penalties(trained, batch))
    for turned in values[1:]:
        for name in RELATIONS:
            assert turned[f"relations/{name}"] == pytest.approx(values[0][f"relations/{name}"], rel=1e-9), name
        assert turned["features"] != pytest.approx(values[0]["features"], rel=1e-3), "the control: without projections"


def test_a_token_without_label_does_not_count(tmp_path: Path) -> None:
    """The value is the mean over labelled tokens, computed here one token after another."""
    batch, teacher = _packed(2), _teacher()
    trained = _engine(
        tmp_path, teacher, features={"layers": {"1": 2, "2": 5}}, relations={"gram": 1.0, "layers": {2: 3}}
    )
    ready = batch.to("cpu")
    taps = frozenset({"hidden.1", "hidden.2"})
    with torch.no_grad():
        student = trained.model(**ready.inputs, taps=taps).taps
    right = teacher(**ready.inputs, taps=frozenset({"hidden.2", "hidden.3", "hidden.5"})).taps

    def unit(x: Tensor) -> Tensor:
        return x / x.norm()

    features, gram, count = 0.0, 0.0, 0
    for b, t in zip(*np.nonzero(batch.labels_BT != batch.ignore), strict=True):
        count += 1
        for k, m in ((1, 2), (2, 5)):
            a, h = student[f"hidden.{k}"][b, t], right[f"hidden.{m}"][b, t]
            projected = trained.modules[f"projection_{k}"].get_parameter("weight").detach() @ (unit(a) * 32**0.5)
            features += float((projected - unit(h) * 48**0.5).square().mean()) / 2
        others = [
            s
            for s in range(T)
            if batch.labels_BT[b, s] != batch.ignore and batch.documents_BT[b, s] == batch.documents_BT[b, t]
        ]
        a, h = student["hidden.2"][b], right["hidden.3"][b]
        error = [float((unit(a[t]) @ unit(a[s]) - unit(h[t]) @ unit(h[s])).square()) for s in others]
        gram += sum(error) / len(error)
    found = _penalties(trained, batch)
    assert found["features"] == pytest.approx(features / count, rel=1e-10)
    assert found["relations/gram"] == pytest.approx(gram / count, rel=1e-10)
    moved = replace(batch, labels_BT=np.roll(batch.labels_BT, 1, 1))
    assert _penalties(trained, moved)["features"] != pytest.approx(features / count, rel=1e-3)


def test_projections_start_orthogonal_learn_and_resume_to_the_bit(tmp_path: Path) -> None:
    batch, teacher = pairs(), _teacher()
    trained = _engine(tmp_path, teacher, features={"weight": 1.0})
    assert set(trained.modules) == {"projection_0", "projection_1", "projection_2"}
    weight = trained.modules["projection_1"].get_parameter("weight")
    first = weight.detach().clone()
    torch.testing.assert_close(first.T @ first, torch.eye(32).double(), atol=1e-6, rtol=0)
    before = _penalties(trained, batch)["features"]
    for _ in range(5):
        trained.step(batch)
    assert (weight - first).norm() > 1e-2
    assert _penalties(trained, batch)["features"] < before
    trained.training_state.save()
    again = _engine(tmp_path, teacher, features={"weight": 1.0})
    assert again.training_state.resume(lambda message: None)
    for _ in range(3):
        trained.step(batch)
        again.step(batch)
    for name, weight in trained.trained.items():
        assert torch.equal(weight, again.trained[name]), name


def test_the_default_map_has_the_same_relative_depth(tmp_path: Path) -> None:
    settings = DistillSettings.model_validate({"teacher": "t", "features": {}, "relations": {"gram": 1.0}})
    assert settings.layer_maps(2, 6) == ({0: 0, 1: 3, 2: 6}, {1: 3, 2: 6})
    assert settings.layer_maps(2, 5) == ({0: 0, 1: 3, 2: 5}, {1: 3, 2: 5})
    assert settings.layer_maps(8, 2)[1] == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"features": {"layers": {3: 1}}}, r"objective.features.layers: found layer 3 of the student, expected 0 to 2"),
        ({"features": {"layers": {1: 6}}}, r"objective.features.layers: found layer 6 of the teacher, expected 0 to 5"),
        ({"features": {"layers": {}}}, r"objective.features.layers: found no layer"),
        (
            {"relations": {"keys": 1, "layers": {0: 1}}},
            r"relations.layers: found layer 0 of the student, expected 1 to",
        ),
        ({"relations": {"keys": 1, "heads": 5}}, r"relations.heads: found 5, expected a number that divides the 32"),
        ({"relations": {"values": 1, "heads": 32}}, r"divides the 48 features of the teacher's values"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        _engine(tmp_path, _teacher(), **settings)
    assert len(str(caught.value).splitlines()) == 1
