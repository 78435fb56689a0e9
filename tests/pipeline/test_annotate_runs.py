"""An annotation that is killed by `kill -9` at random moments of a whole run ends in the same bytes.

INGOT_KILLS sets the number of kills (two in CI; `make soak` takes ten).
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLS = min(10, int(os.environ.get("INGOT_KILLS", "2")))
RECIPE = """
[run]
name = "soft"

[stage.text]
kind = "corpus"
sources = ["TEXT"]
quality = "none"
pii = false
holdout = { fraction = 0.1, by = "tail" }

[stage.bpe]
kind = "tokenizer"
from = "text"
vocab = 280

[stage.base]
kind = "train"
data = { text = 1.0 }
tokenizer = "bpe"
model = { depth = 1, width = 16, heads = 2, context = 32 }
batch = 4
duration = "2 steps"
evaluate = { tokens = 1, sample = false }
loop = { threads = 1 }

[stage.soft]
kind = "annotate"
data = ["text"]
teacher = "base"
k = 48
"""
pytestmark = pytest.mark.slow


def _work(directory: Path, words: int) -> Path:
    """A directory with the recipe, a text, and all stages before the annotation."""
    directory.mkdir()
    draw = random.Random(0)
    text = "\n".join(" ".join(draw.choices(["cat", "dog", "hill", "sun", "red", "sea"], k=12)) for _ in range(words))
    (directory / "text.txt").write_text(text)
    (directory / "soft.toml").write_text(RECIPE.replace("TEXT", "text.txt"))
    assert _start(directory, "base").wait() == 0, (directory / "log.txt").read_text()[-2000:]
    return directory


def _start(work: Path, stage: str = "soft") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from ingot.cli.app import main; main()", "run", "soft.toml", "--only", stage]
    with (work / "log.txt").open("ab") as log:
        return subprocess.Popen(command, cwd=work, stdout=log, stderr=log, start_new_session=True)


def _columns(work: Path) -> dict[str, bytes]:
    files = (work / "runs" / "soft" / "soft").resolve().rglob("*.bin")
    return {str(f.relative_to(f.parents[1])): f.read_bytes() for f in files}


def test_a_killed_annotation_ends_in_the_same_bytes(tmp_path: Path) -> None:
    straight, killed = _work(tmp_path / "straight", 4000), tmp_path / "killed"
    shutil.copytree(straight, killed, symlinks=True)
    assert _start(straight).wait() == 0
    draw, landed = random.Random(3), 0
    for _ in range(KILLS):
        parent = _start(killed)
        link = killed / "runs" / "soft" / "soft"
        while parent.poll() is None and not any(link.rglob("*.bin")) and not any(link.rglob("*.tmp")):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.6))
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        landed += not (link / "DONE").exists()
    assert landed, "no kill hit the annotation"
    assert _start(killed).wait() == 0, (killed / "log.txt").read_text()[-2000:]
    assert _columns(killed)
    assert _columns(killed) == _columns(straight)
