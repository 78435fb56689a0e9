"""`python -m benchmarks.store CORPUS`: raw `*.jsonl.gz` to a token store, beside only parsing the same rows.

The floor is `gzip -dc | python json.loads` on one core. Memory is the sum over all processes, with shared pages counted
once; `--copies 4` shows how it grows with the corpus (Linux).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = """
[run]
name = "bench"

[stage.text]
kind    = "corpus"
sources = ["{corpus}/*.jsonl.gz"]

[stage.bpe]
kind = "tokenizer"
from = "text"
vocab = 32768

[stage.tokens]
kind      = "tokens"
corpus    = "text"
tokenizer = "bpe"
"""
PARSE = "import json, sys\nfor line in sys.stdin.buffer: json.loads(line)"


def floor(corpus: Path) -> float:
    """Seconds to unpack and parse all rows."""
    start = time.monotonic()
    files = sorted(map(str, corpus.glob("*.jsonl.gz")))
    with subprocess.Popen(["gzip", "-dc", *files], stdout=subprocess.PIPE) as unpack:
        subprocess.run([sys.executable, "-c", PARSE], stdin=unpack.stdout, check=True)
    return time.monotonic() - start


def ours(corpus: Path) -> tuple[dict[str, float], int, int]:
    """Seconds of each stage, bytes of the raw text, and the most memory of all processes in bytes."""
    with tempfile.TemporaryDirectory() as directory:
        recipe = Path(directory) / "bench.toml"
        recipe.write_text(RECIPE.format(corpus=corpus.absolute()))
        command = [sys.executable, "-m", "ingot", "run", str(recipe), "--out", directory]
        run, peak = subprocess.Popen(command, stderr=subprocess.DEVNULL), 0
        while run.poll() is None:
            peak = max(peak, sum(map(_memory, _tree(run.pid))))
            time.sleep(0.2)
        assert run.returncode == 0, "the run failed"
        results = {
            name: json.loads((Path(directory) / "bench" / name / "result.json").read_text())
            for name in ("text", "bpe", "tokens")
        }
        return {name: result["seconds"] for name, result in results.items()}, results["text"]["input_bytes"], peak


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
        except OSError:
            continue
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def _memory(pid: int) -> int:
    """Proportional set size in bytes; 0 for a process that ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def main() -> None:
    """Measure in turns and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--copies", type=int, default=1, help="read the corpus so often; copies of documents are dropped"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for copy in range(options.copies):
            for file in options.corpus.glob("*.jsonl.gz"):
                shutil.copy(file, Path(directory) / f"{copy}-{file.name}")
        for _ in range(options.repetitions):
            parse, (seconds, size, peak) = floor(Path(directory)), ours(Path(directory))
            stages = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
            total = sum(seconds.values())
            print(
                f"{size / 1e6:.0f} MB: parsing {parse:.1f} s ({size / 1e6 / parse:.1f} MB/s), to tokens {total:.1f} s "
                f"({size / 1e6 / total:.1f} MB/s; {stages}), {total / parse:.2f} times; {peak / 1e6:.0f} MB of memory",
                flush=True,
            )


if __name__ == "__main__":
    main()
