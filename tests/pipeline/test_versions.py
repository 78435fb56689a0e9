"""Old results are never passed off as those of changed code."""

import json

import pytest

from ingot.stages.kinds import KINDS
from tests import kind_sources


def test_a_kinds_code_does_not_change_without_a_version_or_a_word() -> None:
    recorded = json.loads(kind_sources.RECORD.read_text())["python"]
    if recorded != kind_sources.PYTHON:
        pytest.skip(f"recorded with Python {recorded}, whose syntax trees differ from {kind_sources.PYTHON}'s")
    assert kind_sources.problems() == []


def test_the_digest_sees_code_and_not_comments() -> None:
    same = kind_sources._syntax('def f(x):\n    """Words."""\n    return x + 1  # why\n')
    assert same == kind_sources._syntax("def f(x):\n    return x + 1\n")
    assert same != kind_sources._syntax("def f(x):\n    return x + 2\n")


@pytest.mark.parametrize("kind", ["train", "evaluate", "fisher", "judge", "generate", "label"])
def test_the_digest_sees_the_functions_in_cpp_of_what_runs_models(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_sources._without_comments("int a;  // why\nint b;\n") == "int a;\nint b;\n"
    before = kind_sources.digest(KINDS[kind].sources)
    monkeypatch.setitem(kind_sources._READ, ".cpp", lambda source: source + "int more;")
    assert kind_sources.digest(KINDS[kind].sources) != before
