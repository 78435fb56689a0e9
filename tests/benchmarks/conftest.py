"""Peers that are scripts of a few lines: they print what a real one would."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.contenders import Contender

ROOT = Path(__file__).parents[2]
RESULT = {
    "step_s": 0.01,
    "p10_s": 0.009,
    "p90_s": 0.012,
    "steps": 9,
    "losses": [4.11, 4.05],
    "parameters": 34880,
    "flops_per_token": 220608,
    "peak_bytes": 10**8,
    "versions": {"torch": "2.13.0+cpu"},
    "precision": "fp32",
    "execution": "cpu, fp32",
}

FAKE = """
import json, sys, os
job = json.loads(sys.stdin.readline())
with open({log!r}, "a") as file:
    file.write({name!r} + "\\n")
print("some noise")
print(json.dumps({{**{result!r}, **job.get("say", {{}})}}))
"""


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Contender]:
    """fake(name, **changes of the result): a contender that notes in `calls` that it ran, and prints the result."""

    def make(name: str, **changes: object) -> Contender:
        script = tmp_path / f"{name}.py"
        script.write_text(FAKE.format(log=str(tmp_path / "calls"), name=name, result={**RESULT, **changes}))
        return Contender(name, (sys.executable, str(script)), {**os.environ, "PYTHONPATH": str(ROOT)})

    return make


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], list[str]]:
    """Names of the fakes that ran so far, in order."""
    return lambda: (tmp_path / "calls").read_text().split() if (tmp_path / "calls").exists() else []
