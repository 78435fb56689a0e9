"""The optional packages that settings of a corpus need."""

import importlib.util

from ingot.core.errors import UserError
from ingot.corpus.settings import CorpusSettings


def check_packages(settings: CorpusSettings) -> None:
    """Raise UserError for a setting whose package is missing."""
    needed = {"repair_unicode": ("ftfy", settings.repair_unicode), "html": ("trafilatura", settings.html)}
    for setting, (package, value) in needed.items():
        if value in (True, package) and importlib.util.find_spec(package) is None:
            raise UserError(
                f"{setting}: found no package {package}, expected it; pip install 'ingot[corpus]' or remove the setting"
            )
