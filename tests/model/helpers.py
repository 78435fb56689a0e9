"""Shared by the tests of models."""

import pytest

from ingot.model.attention import AttentionImpl


def set_impl(monkeypatch: pytest.MonkeyPatch, impl: AttentionImpl | None) -> None:
    """Compute attention in this way in every forward pass; None: the fastest, as in the product."""
    if impl is not None:
        monkeypatch.setattr("ingot.model.attention.fastest_impl", lambda *_: impl)
