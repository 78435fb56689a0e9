"""The page's templates: jinja2 with escaping on, so that no document's text can become part of the page's code."""

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ingot.report import figures


@cache
def _environment() -> Environment:
    loader = PackageLoader("ingot.report")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    names = ("count", "short", "size", "duration", "nats", "perplexity", "value")
    made.filters |= {name: getattr(figures, name) for name in names}
    made.globals["share"] = figures.share
    return made


def render(template: str, **context: Any) -> Markup:
    """A template of `templates/` filled in."""
    return Markup(_environment().get_template(template).render(**context))
