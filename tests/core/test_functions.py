"""The user's own functions: what is plainly not there is said before anything runs, and nothing of theirs is run."""

from pathlib import Path

import pytest

from ingot.core.errors import UserError
from ingot.core.functions import require_file

TEXT = """
from os.path import basename as last
raise SystemExit("this is not to be run")
def score(prompts, completions): ...
if True:
    async def later(): ...
    named = score
typed: object = score
"""


def test_a_function_is_found_without_running_its_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(TEXT)
    for name in ("score", "later", "named", "typed", "last"):
        assert require_file(f"{file}:{name}", "by") == file
    with pytest.raises(UserError, match=r"by: '.*own\.py:scor': .* has no function 'scor'; did you mean 'score'\?"):
        require_file(f"{file}:scor", "by")
    file.write_text("from somewhere import *\n")
    assert require_file(f"{file}:anything", "by") == file, "only running it would tell"
    file.write_text("def score(:\n")
    with pytest.raises(UserError, match=r"own\.py is not Python \(.*own\.py, line 1\)\); fix it"):
        require_file(f"{file}:score", "by")
