"""macOS without a C++ compiler, simulated: what Linux alone has is taken away from the processes of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIMULATED = '''
"""Imported by every Python process at its start."""
import builtins, io, multiprocessing, os, resource, sys
import asyncio, ctypes.util, sysconfig, urllib.request  # which import what only a real macOS has

multiprocessing.set_start_method("spawn")
del os.sched_getaffinity
_open, _stat, _getrusage = io.open, os.stat, resource.getrusage

def _refuse(path):
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "not on macOS", os.fspath(path))

def open(path, *arguments, **named):
    _refuse(path)
    return _open(path, *arguments, **named)

def stat(path, *arguments, **named):
    _refuse(path)
    return _stat(path, *arguments, **named)

class Usage:
    def __init__(self, usage):
        self.ru_maxrss = 1024 * usage.ru_maxrss  # bytes

io.open = builtins.open = open
os.stat = stat
resource.getrusage = lambda who: Usage(_getrusage(who))
sysconfig.get_config_vars()
sys.platform = "darwin"
'''
RECIPE = """
[run]
name = "tiny"

[stage.clean]
kind = "corpus"
sources = ["notes.txt"]
quality = "none"
holdout = { by = "tail", fraction = 0.2 }

[stage.bpe]
kind = "tokenizer"
from = "clean"
vocab = 280

[stage.base]
kind = "train"
data = { clean = 1.0 }
tokenizer = "bpe"
model = { depth = 1, width = 32, heads = 2, context = 32 }
batch = 4
duration = "3 steps"
evaluate = { tokens = 64, sample_tokens = 4 }
"""


@pytest.mark.slow
def test_a_recipe_runs_as_on_macos(tmp_path: Path) -> None:
    (tmp_path / "simulated").mkdir()
    (tmp_path / "simulated" / "sitecustomize.py").write_text(SIMULATED)
    (tmp_path / "notes.txt").write_text("".join(f"the {n} cats sat on mat {n}\n" for n in range(200)))
    (tmp_path / "tiny.toml").write_text(RECIPE)
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {
        "PATH": str(tmp_path / "no programs"),  # no compiler, no bwrap
        "INGOT_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "simulated"), *filter(None, sys.path)]),
    }

    def ingot(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ingot", *arguments]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result

    ran = ingot("run", "tiny.toml")
    assert "g++ could not build the C++ kernels (FileNotFoundError); using PyTorch, which is slower" in ran.stderr
    stage = tmp_path / "runs/tiny/base"
    assert 5e7 < json.loads((stage / "result.json").read_text())["peak_bytes"] < 5e10
    assert json.loads((stage / "execution.json").read_text())["backend"] in ("auto", "torch")
    assert ingot("generate", "runs/tiny/base", "the ", "--max-new", "4").stdout
