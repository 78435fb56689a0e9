"""Partitions and runners: the same bytes from any of them, also after workers or the leader were killed."""

import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import UserError
from ingot.corpus import partitions, spool
from ingot.corpus.readers import packing
from ingot.corpus.readers.files import TextFile
from tests.corpus.corpus_helpers import make, quarantine, settings

DROP = """
import os, signal
from pathlib import Path

def {name}(documents):
    found = documents["text"].str.contains("word77").any()
    if found and os.getpid() != {leader} and not Path({marker!r}).exists():
        Path({marker!r}).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return documents["text"].str.contains("word7 ")
"""


def rows(number: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    texts = [" ".join(f"word{draw.randrange(90)}" for _ in range(40)) for _ in range(number)]
    return [{"text": texts[i // 3] if i % 9 == 0 else text, "other": i} for i, text in enumerate(texts)]


def lines(number: int, seed: int) -> bytes:
    each = [json.dumps(row).encode() for row in rows(number, seed)]
    for place in range(5, number, 50):
        each[place] = b"{broken"
    return b"\n".join(each)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Lines (plain and packed), Parquet and small texts: about 600 kB."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(700, 1))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(700, 2)))
    pq.write_table(pa.Table.from_pylist(rows(500, 3)), folder / "c.parquet", row_group_size=50)
    for i in range(30):
        (folder / f"d{i:02}.txt").write_text(rows(1, i)[0]["text"])
    return folder


def digests(out: Path) -> dict[str, str]:
    files = sorted(path for path in out.glob("[!.]*") if path.name != "metrics.jsonl")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


TABLE: dict[str, Any] = {"dedup": {"minhash": {}}, "holdout": {"fraction": 0.1, "by": "tail"}}


@pytest.fixture
def whole(tmp_path: Path, sources: Path) -> dict[str, str]:
    """What one partition a source gives."""
    make(tmp_path / "whole", sources, **TABLE)
    assert {"documents-00000.parquet", "near_duplicates.parquet", "quarantine.jsonl"} <= {*digests(tmp_path / "whole")}
    return digests(tmp_path / "whole")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, whole: dict[str, str]) -> None:
    """Partitions of 8 kB."""
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 8_000)
    monkeypatch.setattr(packing, "BLOCK", 1_000)


def test_small_partitions_give_the_same_bytes(tmp_path: Path, sources: Path, whole: dict[str, str], small: None):
    plan = partitions.plan(settings(sources))
    assert len(plan.partitions) > 40
    ranges = {p.file.file.name for each in plan.partitions for p in each.pieces if p.start}
    assert ranges == {"a.jsonl", "b.jsonl.gz", "c.parquet"}
    make(tmp_path / "one", sources, workers=1, **TABLE)
    assert digests(tmp_path / "one") == whole
    make(tmp_path / "two", sources, workers=2, **TABLE)
    assert digests(tmp_path / "two") == whole


@given(st.lists(st.binary(max_size=5), max_size=12), st.lists(st.integers(0, 40), max_size=4), st.booleans())
def test_ranges_give_every_line_once(tmp_path_factory: Any, parts: list[bytes], cuts: list[int], packed: bool):
    data = b"\n".join(parts)
    path = tmp_path_factory.mktemp("ranges") / "a"
    path.write_bytes(gzip.compress(data) if packed else data)
    file = TextFile(path, "gzip" if packed else None)
    whole = [(line.offset, line.data) for line in file.lines()]
    borders = [0, *sorted(cuts)]
    found = [
        (line.offset, line.data)
        for start, end in zip(borders, [*borders[1:], None], strict=True)
        for line in TextFile(path, file.packing, start=start, end=end).lines()
    ]
    assert found == whole


def test_a_truncated_file_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.jsonl.gz"
    data = gzip.compress(lines(700, 1))
    path.write_bytes(data[: len(data) // 2])
    make(tmp_path / "whole", path)
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 8_000)
    monkeypatch.setattr(packing, "BLOCK", 1_000)
    make(tmp_path / "parts", path)
    one, parts = quarantine(tmp_path / "whole"), quarantine(tmp_path / "parts")
    assert len(one) > 3
    assert [{**record, "reason": ""} for record in parts] == [{**record, "reason": ""} for record in one]
    assert "truncated gzip data" in parts[-1]["reason"]


def test_a_source_of_no_use_and_a_bad_filter_end_the_run(tmp_path: Path, sources: Path, small: None):
    (tmp_path / "bad.jsonl").write_bytes(b"{broken\n" * 4_000)
    with pytest.raises(UserError, match=r"bad.jsonl: line 1: malformed JSON.*no line of this file is usable"):
        make(tmp_path / "out", [sources, tmp_path / "bad.jsonl"], workers=2)
    (tmp_path / "mine.py").write_text("def odd(documents):\n    return documents['missing']\n")
    with pytest.raises(UserError, match="filters: 'odd' raised ColumnNotFoundError"):
        make(tmp_path / "out", sources, filters=[f"{tmp_path}/mine.py:odd"], workers=2)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]


def test_a_run_whose_leader_was_interrupted_continues(
    tmp_path: Path, sources: Path, whole: dict[str, str], small: None, monkeypatch: pytest.MonkeyPatch
):
    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        return written(*arguments)

    written = spool._write
    monkeypatch.setattr(spool, "_write", counted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", sources, workers=1, **TABLE)
    assert len(list((tmp_path / "out" / spool.SPOOL).glob("part-*.json"))) == 19
    make(tmp_path / "out", sources, workers=1, **TABLE)
    assert calls == 1 + len(partitions.plan(settings(sources)).partitions)
    assert digests(tmp_path / "out") == whole


def killing(tmp_path: Path, name: str) -> dict[str, Any]:
    """Settings with a filter that kills its process once, if it is not this one."""
    marker = str(tmp_path / f"{name}.killed")
    (tmp_path / f"{name}.py").write_text(DROP.format(name=name, marker=marker, leader=os.getpid()))
    return {**TABLE, "filters": [f"{tmp_path}/{name}.py:{name}"]}


def test_a_killed_worker_is_named_and_the_same_command_continues(tmp_path: Path, sources: Path, small: None):
    table = killing(tmp_path, "once")
    with pytest.raises(UserError, match="was ended from outside"):
        make(tmp_path / "out", sources, workers=2, **table)
    make(tmp_path / "out", sources, workers=2, **table)
    make(tmp_path / "again", sources, workers=1, **table)
    assert digests(tmp_path / "out") == digests(tmp_path / "again")


def test_a_runner_that_is_not_installed_is_named(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ingot.corpus.runners.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"runner: found no package daft.*pip install 'ingot\[ray\]'"):
        make(tmp_path / "out", sources, runner="daft")


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["daft", "ray"])
def test_daft_and_ray_give_the_same_bytes(
    tmp_path: Path, sources: Path, whole: dict[str, str], small: None, runner: str
):
    pytest.importorskip(runner)
    make(tmp_path / "out", sources, runner=runner, workers=2, **TABLE)
    assert digests(tmp_path / "out") == whole


RUN = """
import sys
from pathlib import Path
from ingot.corpus import partitions
from tests.corpus.corpus_helpers import make
partitions.PARTITION_BYTES = 8_000
if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2], runner="ray", **eval(sys.argv[3]))
"""


@pytest.mark.slow
def test_two_nodes_a_killed_worker_and_a_killed_driver_leave_no_trace(tmp_path: Path, sources: Path, small: None):
    """Ray repeats the partition of the worker; after the driver's death the same command continues."""
    pytest.importorskip("ray")
    table = killing(tmp_path, "once")
    (tmp_path / "once.killed").touch()
    make(tmp_path / "local", sources, workers=1, **table)
    (tmp_path / "once.killed").unlink()
    script = tmp_path / "run.py"
    script.write_text(RUN)
    ray = Path(sys.executable).parent / "ray"
    port = str(20_000 + os.getpid() % 20_000)
    environment = os.environ | {
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": os.pathsep.join([*sys.path[:1], str(Path(__file__).parents[2])]),
    }
    temporary = tempfile.mkdtemp(prefix="r")  # short: paths of sockets are
    head = [ray, "start", "--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=1", "--block"]
    head.append(f"--temp-dir={temporary}")
    second = [ray, "start", f"--address=127.0.0.1:{port}", "--num-cpus=1", "--block"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    nodes = [subprocess.Popen(head, start_new_session=True, **quiet)]
    command = [sys.executable, script, tmp_path / "out", sources, repr(table)]
    done = tmp_path / "out" / spool.SPOOL
    try:
        _wait_for(lambda: nodes[0].poll() is not None or subprocess.run([ray, "status"], **quiet).returncode == 0)
        nodes.append(subprocess.Popen(second, start_new_session=True, **quiet))
        driver = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
        _wait_for(lambda: driver.poll() is not None or len(list(done.glob("part-*.json"))) > 10)
        assert driver.poll() is None, driver.communicate()[1].decode()
        driver.kill()
        driver.communicate()
        before = {path.name: path.stat().st_mtime_ns for path in done.glob("part-*.json")}
        assert (tmp_path / "once.killed").exists()
        subprocess.run(command, env=environment, check=True)
        assert len(before) > 10
    finally:
        for node in nodes[::-1]:
            os.killpg(node.pid, signal.SIGTERM)
            node.wait()
        shutil.rmtree(temporary, ignore_errors=True)
    assert digests(tmp_path / "out") == digests(tmp_path / "local")


def _wait_for(condition: Any) -> None:
    while not condition():
        time.sleep(0.1)
