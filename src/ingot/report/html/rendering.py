"""Renders the page's templates, with jinja2's autoescape, so that text of documents cannot inject HTML."""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ingot.report import figures


@cache
def _environment() -> Environment:
    loader = PackageLoader("ingot.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters = ("count", "short", "size", "duration", "nats", "perplexity", "value")
    environment.filters |= {name: getattr(figures, name) for name in filters}
    environment.globals["percentage"] = figures.percentage
    return environment


def render(template: str, **context: Any) -> Markup:
    """Render a file of `templates/`."""
    return Markup(_environment().get_template(template).render(**context))


@cache
def assets() -> dict[str, Markup]:
    """The style sheet and the scripts, which a page contains."""
    style, *scripts = (
        files("ingot.report").joinpath(f"templates/{name}").read_text()
        for name in ("style.css", "charts.js", "page.js")
    )
    return {"style": Markup(style), "script": Markup("".join(scripts))}
