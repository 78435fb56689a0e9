"""ingot: from raw text to a trained, aligned language model, from one recipe file."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.api import load, run

__version__ = "0.1.0"
__all__ = ["load", "run"]


def __getattr__(name: str) -> Any:
    """Import `ingot.run` and `ingot.load` on first access, so that `import ingot` is fast."""
    if name in __all__:
        from ingot import api

        return getattr(api, name)
    raise AttributeError(f"module 'ingot' has no attribute '{name}'")
