"""Anchors: a pull back to old weights, held against closed forms."""

import torch

from ingot.optim.grad_terms import Anchor, mean_importance, prepare_importance

F64 = torch.float64


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def _minimise(gradient, hessian: torch.Tensor, size: int) -> torch.Tensor:
    """Newton's step from zero: the minimum of a quadratic."""
    zero = torch.zeros(size, dtype=F64)
    return zero - torch.linalg.solve(hessian, gradient(zero))


def _ewc_after_a(x_a, y_a, x_b, y_b, weight: float = 1.0) -> torch.Tensor:
    """Least squares on B with an EWC anchor at A's optimum, F the diagonal of A's unnormalised Hessian X'X."""
    theta_a = torch.linalg.lstsq(x_a, y_a).solution
    importance = (x_a.T @ x_a).diagonal()
    anchor = Anchor("ewc", weight, {"theta": theta_a}, {"theta": importance})

    def gradient(theta: torch.Tensor) -> torch.Tensor:
        leaf = theta.clone().requires_grad_()
        (0.5 * (x_b @ leaf - y_b).square().sum()).backward()
        anchor.add_gradients({"theta": leaf})
        assert leaf.grad is not None
        return leaf.grad

    return _minimise(gradient, x_b.T @ x_b + weight * torch.diag(importance), x_a.shape[1])


def test_2_7_on_an_orthogonal_quadratic_ewc_equals_joint_least_squares() -> None:
    """With orthogonal columns A's Hessian is its diagonal, so the anchor is all of A's loss; 1e-12."""
    scale = torch.tensor([0.3, 2.0, 1.0, 0.1, 5.0], dtype=F64)
    x_a, y_a = torch.linalg.qr(_random(20, 5)).Q * scale, _random(20, seed=1)
    x_b, y_b = _random(12, 5, seed=2), _random(12, seed=3)
    joint = torch.linalg.lstsq(torch.cat([x_a, x_b]), torch.cat([y_a, y_b])).solution
    torch.testing.assert_close(_ewc_after_a(x_a, y_a, x_b, y_b), joint, rtol=1e-12, atol=1e-12)
    # Controls: a design that is not orthogonal has more than a diagonal, and half the weight is another optimum.
    x_c = _random(20, 5, seed=4)
    other = torch.linalg.lstsq(torch.cat([x_c, x_b]), torch.cat([y_a, y_b])).solution
    assert (_ewc_after_a(x_c, y_a, x_b, y_b) - other).abs().max() > 1e-2
    assert (_ewc_after_a(x_a, y_a, x_b, y_b, weight=0.5) - joint).abs().max() > 1e-2


def test_2_7_the_penaltys_gradient_is_weight_f_distance() -> None:
    """Exactly lambda F (theta - theta*), added to what is there; the value is what autograd differentiates to it."""
    theta, center, importance = _random(4, 3), _random(4, 3, seed=1), _random(4, 3, seed=2).square()
    leaf, frozen = theta.clone().requires_grad_(), theta.clone()
    leaf.grad = torch.ones_like(leaf)
    buffer = leaf.grad
    anchor = Anchor("ewc", 3.0, {"w": center, "frozen": center}, {"w": importance, "frozen": importance})
    logged = anchor.add_gradients({"w": leaf, "frozen": frozen, "new": theta.clone().requires_grad_()})
    assert torch.equal(leaf.grad - 1, (1 + (theta - center) * importance * 3.0) - 1)
    assert leaf.grad is buffer, "a gradient that lies in a larger buffer stays there"
    assert frozen.grad is None
    again = theta.clone().requires_grad_()
    value = 3.0 / 2 * (importance * (again - center).square()).sum()
    value.backward()
    assert again.grad is not None
    torch.testing.assert_close(logged["ewc"], value.detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(leaf.grad - 1, again.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logged["ewc_grad_norm"], again.grad.norm(), rtol=1e-12, atol=0)
    assert Anchor("l2sp", 3.0, {"w": theta}).add_gradients({"w": leaf})["l2sp"] == 0  # at the anchor it costs nothing


def test_2_7_an_anchor_pulls_through_a_merged_adapter() -> None:
    """W + B A with W frozen: the pull on A and B is the chain rule's, as autograd has it."""
    w, center, importance = _random(4, 3), _random(4, 3, seed=1), _random(4, 3, seed=2).square()
    factors = [(_random(4, 2, seed=5) * 0.1).requires_grad_(), _random(2, 3, seed=6).requires_grad_()]
    Anchor("ewc", 2.0, {"w": center}, {"w": importance}).add_gradients({"w": w + factors[0] @ factors[1]})
    found = [f.grad for f in factors]
    expected = torch.autograd.grad((importance * (w + factors[0] @ factors[1] - center).square()).sum(), factors)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_2_7_importances_are_clipped_floored_and_normalised() -> None:
    raw = {"a": torch.arange(1000, dtype=F64), "b": torch.full((1,), 1e6, dtype=F64)}
    cut = prepare_importance(raw, clip=0.999)
    assert float(cut["b"]) == 999.0  # the value of rank 999 of 1,000
    assert torch.equal(cut["a"], raw["a"])
    assert abs(mean_importance(prepare_importance(raw, normalise=True)) - 1) < 1e-12
    floored = prepare_importance({"a": torch.tensor([0.0, 1.0, 2.0])}, floor=0.5)
    assert floored["a"].tolist() == [0.5, 1.0, 2.0]
    assert prepare_importance(raw) == raw
    assert float(prepare_importance({"a": torch.zeros(3)}, normalise=True)["a"].sum()) == 0  # nothing to divide by
