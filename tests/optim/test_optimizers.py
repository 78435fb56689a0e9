"""Every optimizer a recipe may name, by the sources' numbers and by the papers' formulas (D2, D3)."""

import sys
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.core.settings import settings_tree
from ingot.optim.adam import Adam
from ingot.optim.groups import clip_, global_norm, groups
from ingot.optim.optimizers import Optimizer, build, is_hidden_matrix
from ingot.optim.settings import Kind, OptimSettings

KINDS = get_args(Kind)


def _weight(value: float, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, value, dtype=torch.float64))


def _steps(weight: torch.nn.Parameter, gradient: float, lr: float, count: int, **table: Any) -> list[float]:
    """The weight after each of so many steps with the same gradient."""
    optimizer = build({"w": weight}, OptimSettings(lr=lr, **table), lr)
    found = []
    for _ in range(count):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step(lr)
        found.append(weight.item())
    return found


def test_D2_sgd() -> None:
    assert _steps(_weight(0.5, 1), 0.2, 0.01, 1, kind="sgd", momentum=0) == pytest.approx([0.498], rel=1e-12)


def test_D2_momentum() -> None:
    """Velocities .2, .38, .542: torch's v = m v + g."""
    weight = _weight(0.5, 1)
    settings = OptimSettings(kind="sgd", lr=0.01)
    optimizer = build({"w": weight}, settings, 0.01)
    weights, velocities = [], []
    for _ in range(3):
        weight.grad = torch.full_like(weight, 0.2)
        optimizer.step(0.01)
        weights.append(weight.item())
        velocities.append(optimizer.tensors()["w.momentum_buffer"].item())
    assert velocities == pytest.approx([0.2, 0.38, 0.542], rel=1e-12)
    assert weights == pytest.approx([0.498, 0.4942, 0.48878], rel=1e-12)


def test_D2_source_error_momentum_is_no_moving_average() -> None:
    """002 calls it one, (1 - m) g, whose velocity under a constant gradient is 1 - m of torch's."""
    average, velocity = 0.0, 0.0
    for _ in range(200):
        average, velocity = 0.9 * average + 0.1 * 0.2, 0.9 * velocity + 0.2
    assert velocity / average == pytest.approx(1 / (1 - 0.9))
    weights = _steps(_weight(0.5, 1), 0.2, 0.01, 200, kind="sgd")
    assert (weights[-2] - weights[-1]) / 0.01 == pytest.approx(velocity, rel=1e-9)


def test_D2_nesterov() -> None:
    """Sutskever et al. 2013 in torch's form: the step is along g + m v."""
    v, w, expected = 0.0, 0.5, []
    for _ in range(3):
        v = 0.9 * v + 0.2
        w -= 0.01 * (0.2 + 0.9 * v)
        expected.append(w)
    assert _steps(_weight(0.5, 1), 0.2, 0.01, 3, kind="sgd", nesterov=True) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_D2_adam(kind: str) -> None:
    """000's example: m .01, v 1e-5, both corrected, .5 -> .499; then two more steps by the formula."""
    weight = _weight(0.5, 1)  # one dimension: nothing decays
    betas = (0.9, 0.999)
    assert _steps(weight, 0.1, 1e-3, 1, kind=kind, betas=betas)[0] == pytest.approx(0.499, abs=1e-9)
    m = v = 0.0
    w, expected = 0.5, []
    for t, g in enumerate((0.1, -0.3, 0.02), 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w -= 1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)) ** 0.5 + 1e-8)
        expected.append(w)
    weight = _weight(0.5, 1)
    optimizer = build({"w": weight}, OptimSettings(kind=kind, betas=betas), 1e-3)
    for g, after in zip((0.1, -0.3, 0.02), expected, strict=True):
        weight.grad = torch.full_like(weight, g)
        optimizer.step(1e-3)
        assert weight.item() == pytest.approx(after, rel=1e-12)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_adam_is_torchs_to_the_bit(kind: str, fused: bool) -> None:
    """Weights and moments after steps of which some have no gradient, or another rate."""
    theirs, ours = ({f"w{n}": _drawn(n) for n in range(3)} for _ in range(2))
    if not fused:  # a frozen parameter of another type beside them
        ours["frozen"] = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)
    settings = OptimSettings(kind=kind, weight_decay=0.1)
    assert settings.betas
    of = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    oracle = of(groups(theirs, settings), lr=0.0, betas=settings.betas, eps=settings.eps, fused=fused)
    optimizer = build(ours, settings, 0.0)
    assert isinstance(optimizer.optimizers[0], Adam)
    assert optimizer.optimizers[0].fused == fused
    for step in range(6):
        for n, name in enumerate(theirs):
            gradient = None if (step + n) % 3 == 0 else _drawn(10 * step + n).detach()
            theirs[name].grad, ours[name].grad = gradient, gradient
        for group in oracle.param_groups:
            group["lr"] = 0.01 * (step + 1)
        oracle.step()
        optimizer.step(0.01 * (step + 1))
    found = optimizer.tensors()
    for name, parameter in theirs.items():
        assert torch.equal(parameter, ours[name])
        for moment, value in oracle.state[parameter].items():
            assert torch.equal(found[f"{name}.{moment}"], value)
            assert found[f"{name}.{moment}"].dtype == value.dtype


def _drawn(seed: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(3 + seed % 10 % 3, 4, generator=torch.Generator().manual_seed(seed)))


def test_D2_defaults() -> None:
    settings = OptimSettings()
    assert (settings.kind, settings.betas, settings.eps, settings.weight_decay) == ("adamw", (0.9, 0.95), 1e-8, 0.1)
    assert (settings.min_ratio, settings.clip) == (0.1, 1.0)
    for kind in ("adamw", "adam"):
        (part,) = build({"w": _weight(1.0, 2, 2)}, OptimSettings(kind=kind, lr=1.0), 1.0).optimizers
        assert isinstance(part, Adam)
        assert part.fused, kind
    (part,) = build({"w": _weight(1.0, 2, 2)}, OptimSettings(kind="sgd", lr=1.0), 1.0).optimizers
    assert part.param_groups[0]["fused"]


@pytest.mark.parametrize("kind", ["adamw", "lion", "muon"])
def test_D3_decay_is_one_minus_lr_lambda(kind: str) -> None:
    """theta 2, lambda .01, lr 1e-3: 2e-5 off, not .02."""
    weight = _weight(2.0, 1, 1)
    (after,) = _steps(weight, 0.0, 1e-3, 1, kind=kind, weight_decay=0.01)
    assert 2.0 - after == pytest.approx(2e-5, rel=1e-9)


def test_D3_source_error_decay_of_lambda_theta() -> None:
    """000 subtracts lambda theta, 002 multiplies by 1 - lambda: both .02 here, a thousand times too much."""
    wrong = [0.01 * 2.0, 2.0 - 2.0 * (1 - 0.01)]
    assert wrong == pytest.approx([0.02, 0.02])
    (after,) = _steps(_weight(2.0, 1, 1), 0.0, 1e-3, 1, weight_decay=0.01)
    assert 0.02 / (2.0 - after) == pytest.approx(1000, rel=1e-6)


def test_D3_adams_and_sgds_decay_is_part_of_the_gradient() -> None:
    (after,) = _steps(_weight(2.0, 1, 1), 0.3, 0.1, 1, kind="sgd", momentum=0, weight_decay=0.01)
    assert after == pytest.approx(2.0 - 0.1 * (0.3 + 0.01 * 2.0), rel=1e-12)
    (after,) = _steps(_weight(2.0, 1, 1), 0.0, 0.1, 1, kind="adam", weight_decay=0.01)
    assert after == pytest.approx(2.0 - 0.1, rel=1e-5)  # normalised away: why AdamW exists


@pytest.mark.parametrize("kind", KINDS)
def test_D3_vectors_embeddings_and_adapters_decay_under_no_kind(kind: str) -> None:
    named = {
        n: _weight(2.0, *s) for n, s in {"layers.0.norm": (4,), "embedding.weight": (4, 4), "lora_a": (4, 4)}.items()
    }
    named |= {"layers.0.q.weight": _weight(2.0, 4, 4), "head.weight": _weight(2.0, 4, 4)}
    optimizer = build(named, OptimSettings(kind=kind, lr=0.1, weight_decay=0.5, decay_embeddings=False), 0.1)
    for p in named.values():
        p.grad = torch.zeros_like(p)
    optimizer.step(0.1)
    moved = {n for n, p in named.items() if not torch.equal(p, torch.full_like(p, 2.0))}
    assert moved == {"layers.0.q.weight", "head.weight"}


def test_lion_is_the_sign_of_an_interpolation() -> None:
    """Chen et al. 2023, algorithm 2."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 5, generator=draw, dtype=torch.float64))
    optimizer = build({"w": weight}, OptimSettings(kind="lion", weight_decay=0.2), 0.01)
    w, m = weight.detach().clone(), torch.zeros_like(weight)
    for _ in range(4):
        g = torch.randn(3, 5, generator=draw, dtype=torch.float64)
        w = w - 0.01 * ((0.9 * m + 0.1 * g).sign() + 0.2 * w)
        m = 0.99 * m + 0.01 * g
        weight.grad = g
        optimizer.step(0.01)
        torch.testing.assert_close(weight.data, w, rtol=1e-12, atol=1e-14)


def test_lion_without_its_extra_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    with pytest.raises(UserError, match=r"optim\.kind = 'lion' needs the extra lion; pip install 'ingot\[lion\]'"):
        build({"w": _weight(1.0, 2, 2)}, OptimSettings(kind="lion"), 0.1)


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
def test_muons_update_is_orthogonal_with_the_root_mean_square_of_adams(shape: tuple[int, int]) -> None:
    """Against the exact U V^T of an SVD; the iteration leaves singular values within .5 and 1.5 of it."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    name = "layers.0.ffn.up.weight"
    optimizer = build({name: weight}, OptimSettings(kind="muon"), 1e-3)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=draw, dtype=torch.float64), full_matrices=False)
    weight.grad = u @ torch.linspace(0.1, 1, min(shape), dtype=torch.float64).diag() @ v
    optimizer.step(1e-3)
    update = -weight.detach() / 1e-3
    exact = 0.2 * max(shape) ** 0.5 * (u @ v)
    assert torch.nn.functional.cosine_similarity(update.flatten(), exact.flatten(), dim=0) > 0.95
    assert exact.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-9)
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)
    singular = torch.linalg.svdvals(update) / (0.2 * max(shape) ** 0.5)
    assert 0.4 < singular.min() < singular.max() < 1.6
    assert optimizer.tensors()[f"{name}.momentum_buffer"].shape == shape


def test_muon_takes_the_matrices_inside_blocks_and_adamw_the_rest() -> None:
    from ingot.model.config import ModelSettings
    from ingot.model.transformer import build as build_model

    model = build_model(ModelSettings(depth=2, width=32, heads=2, context=8).resolve(40), seed=1)
    named = dict(model.named_parameters()) | {"layers.0.attention.q.lora_a": _weight(1.0, 4, 2)}
    muon, adamw = build(named, OptimSettings(kind="muon", weight_decay=0.3), 1e-3).optimizers
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, Adam)
    names = {p: n for n, p in named.items()}
    of = [{names[p] for g in part.param_groups for p in g["params"]} for part in (muon, adamw)]
    assert of[0] == {n for n, p in named.items() if is_hidden_matrix(n, p)}
    assert len(of[0]) == 2 * 7  # q, k, v, o, gate, up, down
    assert of[0] | of[1] == set(named)
    assert not of[0] & of[1]
    assert {"embedding.weight", "head.weight", "norm.weight", "layers.0.attention.q.lora_a"} <= of[1]
    assert [g["weight_decay"] for g in muon.param_groups] == [g["weight_decay"] for g in adamw.param_groups] == [0.3, 0]


def _problem(kind: str) -> tuple[dict[str, torch.nn.Parameter], Optimizer, Any]:
    draw = torch.Generator().manual_seed(3)
    named = {
        "layers.0.w": torch.nn.Parameter(torch.randn(6, 4, generator=draw)),
        "b": torch.nn.Parameter(torch.zeros(6)),
    }
    x, y = torch.randn(64, 4, generator=draw), torch.randn(64, 6, generator=draw)

    def loss() -> torch.Tensor:
        return (x @ named["layers.0.w"].T + named["b"] - y).square().mean()

    return named, build(named, OptimSettings(kind=kind, lr=0.02), 0.02), loss


@pytest.mark.parametrize("kind", KINDS)
def test_D2_every_kind_learns_and_its_moments_go_on_to_the_bit(kind: str) -> None:
    """Fill a fresh optimizer's tensors with another's in the middle, as a checkpoint does."""
    named, optimizer, loss = _problem(kind)
    other, fresh, other_loss = _problem(kind)

    def step(optimizer: Optimizer, loss: Any) -> float:
        optimizer.clear()
        value = loss()
        value.backward()
        optimizer.step(0.02)
        return value.item()

    first = step(optimizer, loss)
    for _ in range(4):
        step(optimizer, loss)
    with torch.no_grad():
        for name, moment in fresh.tensors().items():
            moment.copy_(optimizer.tensors()[name])
        for name, parameter in other.items():
            parameter.copy_(named[name])
    assert fresh.tensors().keys() == optimizer.tensors().keys()
    assert all(name.startswith(("layers.0.w.", "b.")) for name in fresh.tensors())
    for _ in range(20):
        last = step(optimizer, loss)
        assert step(fresh, other_loss) == last
    assert last < 0.8 * first
    for name, moment in fresh.tensors().items():
        assert torch.equal(moment, optimizer.tensors()[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_moments_made_before_the_first_step_change_nothing(kind: str) -> None:
    """A checkpoint of step 0 asks for moments that torch would have made at the first step."""
    results = []
    for early in (False, True):
        named, optimizer, loss = _problem(kind)
        if early:
            optimizer.tensors()
        for _ in range(3):
            optimizer.clear()
            loss().backward()
            optimizer.step(0.02)
        results.append(torch.cat([p.detach().flatten() for p in named.values()]))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"momentum": 0.9}, "found momentum with kind = 'adamw', which has no such setting.*'sgd', 'muon'"),
        ({"kind": "adam", "nesterov": True}, "found nesterov with kind = 'adam'"),
        (
            {"kind": "sgd", "lr": 1, "betas": [0.9, 0.9]},
            "found betas with kind = 'sgd'.*'adamw', 'adam', 'muon', 'lion'",
        ),
        ({"kind": "lion", "eps": 1e-8}, "found eps with kind = 'lion'"),
        ({"kind": "sgd"}, "found kind = 'sgd' without lr, which has no default"),
        ({"kind": "sgd", "lr": 1, "nesterov": True, "momentum": 0}, "found nesterov = true with momentum = 0"),
        ({"cooldown": 0.1}, "found cooldown with schedule = 'cosine'.*'wsd'"),
        ({"schedule": "constant", "min_ratio": 0.1}, "found min_ratio with schedule = 'constant'"),
        ({"schedule": "inverse-sqrt", "decay_steps": 10}, "found decay_steps with schedule = 'inverse-sqrt'"),
        ({"warmup": 100, "decay_steps": 50}, "found decay_steps = 50 and warmup = 100"),
        ({"kind": "adamax"}, "should be 'adamw', 'adam', 'sgd', 'muon' or 'lion'"),
        ({"kind": ["adamw"]}, "should be 'adamw'"),
    ],
)
def test_a_setting_of_another_kind_is_refused_by_name(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OptimSettings.model_validate(table)


@pytest.mark.parametrize("kind", KINDS)
def test_resolved_settings_read_back_the_same(kind: str) -> None:
    for name in ("cosine", "wsd", "constant"):
        settings = OptimSettings(kind=kind, lr=0.1, schedule=name)
        assert OptimSettings.model_validate(settings_tree(settings)) == settings


@pytest.mark.parametrize("clip", [0.5, 1e9])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_D6_an_optimizer_clips_as_one(kind: str, clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts, or a kernel that divides by itself, take the norm of all gradients."""

    def made() -> tuple[Optimizer, dict[str, torch.nn.Parameter], list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        shapes = {"layers.0.ffn.up.weight": (6, 4), "norm.weight": (5,), "embedding.weight": (7, 4)}
        named = {n: torch.nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        gradients = [p.grad for p in named.values() if p.grad is not None]
        return build(named, OptimSettings(kind=kind, lr=0.1), 0.1), named, gradients

    before, expected, gradients = made()
    clip_(gradients, clip, global_norm(gradients))
    before.step(0.1)
    for divides in (False, True):
        monkeypatch.setattr(Adam, "supports_grad_scale", divides)
        optimizer, named, gradients = made()
        optimizer.step(0.1, clip, global_norm(gradients))
        for name, parameter in named.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-6, atol=0)
