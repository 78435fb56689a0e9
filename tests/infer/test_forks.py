"""A model in a process that was forked after the model had computed with several threads."""

import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import multiprocessing, os, sys, warnings
import torch
import ingot
warnings.simplefilter("ignore", DeprecationWarning)
torch.set_num_threads(2)
model = ingot.load(sys.argv[1])
torch.randn(600, 600) @ torch.randn(600, 600)  # starts the threads, as a larger model would
torch.randn(10**6).exp()

def answer(prompt):
    assert torch.get_num_threads() == 1
    torch.randn(10**6).exp()
    return model.generate(prompt, max_new=5)

expected = model.generate("ab", max_new=5)
"""
POOL = """
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map(answer, ["ab"]) == [expected])
"""
FORK = """
read, write = os.pipe()
if not (child := os.fork()):
    os.write(write, str(answer("ab") == expected).encode())
    os._exit(0)
os.waitpid(child, 0)
print(os.read(read, 10).decode())
"""
AGAIN = """
def fresh(prompt):
    return ingot.load(sys.argv[1]).generate(prompt, max_new=5)

with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map(fresh, ["ab"]) == [expected])
"""


@pytest.mark.slow
@pytest.mark.parametrize("child", [POOL, FORK, AGAIN])
def test_a_forked_process_answers_with_one_thread(stage: Path, child: str) -> None:
    command = [sys.executable, "-c", PARENT + child, str(stage)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "True\n", result.stderr
    assert ("forked after the model was loaded, so it computes with one thread" in result.stderr) == (child != AGAIN)
