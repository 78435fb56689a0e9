"""Generation, data, start-up, the head and the page: summaries by hand, and each command once on tiny numbers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.commands import Options, bench_generate, bench_startup, everything
from benchmarks.contenders import Contender
from benchmarks.corpus import write_prose
from benchmarks.process import ResultCache, measure

from benchmarks import data, generate, machine, page, startup, tables
from tests.benchmarks.conftest import RESULT

PEAKS = {"gemm_fp32_gflop_s": 100.0, "gemm_bf16_gflop_s": 400.0, "read_gb_s": 40.0, "device": "cpu"}
GENERATED = {
    "seconds": 1.0,
    "first_s": 0.1,
    "token_s": 0.012,
    "runs": 2,
    "tokens": [[1, 2, 3, 4]] * 25,
    "parameters": 120_000_000,
    "peak_bytes": 10**9,
    "in_turn": [(0.012, 40.0)],
    "versions": {},
}
MACHINE = {
    **{"cpu": "Test 9", "cores": 2, "flags": ["avx2"], "memory_bytes": 2**34, "system": "Linux", "python": "3.11"},
    **{"torch": "2.13.0", "threads": 2, **PEAKS},
}


def test_the_floor_of_one_row_is_weights_over_bandwidth() -> None:
    row = generate.summary(1, "float32", 4, [GENERATED], {})
    assert row["floor_ms"] == 12.0  # 480 MB at 40 GB/s
    assert row["of_floor"] == 1.0
    assert generate.summary(1, "bfloat16", 4, [GENERATED], {})["floor_ms"] == 6.0
    busier = {**GENERATED, "in_turn": [(0.012, 40.0), (0.024, 20.0), (0.024, 20.0)]}
    assert generate.summary(1, "float32", 4, [busier], {})["of_floor"] == 1.0  # neighbours slow both down
    assert generate.summary(32, "float32", 4, [{**GENERATED, "in_turn": []}], {})["of_floor"] is None


def test_generations_compare_where_the_tokens_are_the_same() -> None:
    slow = {**GENERATED, "seconds": 2.5}
    other = {**GENERATED, "tokens": [[1, 2, 3, 9]] * 25}
    short = {**GENERATED, "tokens": [[1, 2]] * 25}
    peers = {"slow": [slow], "other": [other], "short": [short]}
    row = generate.summary(25, "float32", 4, [GENERATED], peers)
    assert (row["peer"], row["ratio"], row["tok_s"]) == ("slow", 2.5, 100.0)
    assert row["peers"]["other"]["differs"] == "tokens: 75.0 % are ours, expected 99.8 % at least"
    assert row["peers"]["short"]["differs"] == "new tokens: 50 against our 100"
    assert "work differs" in str(tables.generate_rows([row]))


def test_tokens_count_as_long_as_the_text_before_them_is_the_same() -> None:
    once = {**GENERATED, "tokens": [[9, 8, 7, 6], *GENERATED["tokens"][1:]]}  # 96 of 97 choices are the same
    assert generate.difference(GENERATED, once, 0.989) is None
    assert generate.difference(GENERATED, once, 0.99) == "tokens: 99.0 % are ours, expected 99.0 % at least"
    often = {**GENERATED, "tokens": [[1, 9, 3, 4]] * 25}  # half of them, however much is equal behind that
    assert generate.difference(GENERATED, often, 0.51) == "tokens: 50.0 % are ours, expected 51.0 % at least"


def test_corpus_chains_compare_where_they_keep_and_mask_the_same() -> None:
    facts = {"bytes": 10**7, "documents": 100, "kept": 90, "masked": 5}
    mine = [{"seconds": s, "kept": 90, "masked": 5} for s in (1.0, 2.0)]
    same = [{"seconds": s, "kept": 90, "masked": 5} for s in (4.0, 8.0)]
    row = data.summary(facts, mine, {"same": same, "lazy": [{"seconds": 1.0, "kept": 100, "masked": 5}] * 2})
    assert (row["ratio"], row["peer"]) == (4.0, "same")
    assert row["mb_s"] == 7.5
    assert row["peers"]["lazy"]["differs"] == "kept: 100, expected 90"
    assert tables.corpus_rows(row)[1]["ingot is"].startswith("4.00x")


def test_our_corpus_chain_keeps_and_masks_what_the_prose_was_made_for(tmp_path: Path) -> None:
    facts = write_prose(tmp_path / "corpus", 0.3)
    assert facts["kept"] < facts["documents"]
    assert facts["masked"] > 0
    result = measure(data.our_corpus(), {"corpus": str(tmp_path / "corpus")}, ResultCache(None))
    assert data.difference(facts, result) is None


def test_processor_and_flags_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: Foo 7\nflags\t\t: fpu avx2 avx512f sse\n")
    assert machine.processor(tmp_path / "cpuinfo") == "Foo 7"
    assert machine.flags(tmp_path / "cpuinfo") == ["avx2", "avx512f"]
    assert machine.flags(tmp_path / "none") == []


def test_a_machine_that_others_compute_on_is_told(fake, monkeypatch) -> None:
    """The peak is the better of two, and what it was at worst stands beside it where that is much less."""
    told = {name: 0.9 * rate if isinstance(rate, float) else rate for name, rate in PEAKS.items()}
    monkeypatch.setattr("benchmarks.machine.ours", lambda what: fake("machine", **told))
    steady = machine.measure_again(MACHINE, ResultCache(None), lambda text: None)
    assert machine.load_warning(MACHINE) is machine.load_warning(steady) is None
    assert machine.one_line(steady) == machine.one_line(MACHINE)
    told["gemm_bf16_gflop_s"] = 900.0
    monkeypatch.setattr("benchmarks.machine.ours", lambda what: fake("machine", **told))
    other = machine.measure_again(MACHINE, ResultCache(None), lambda text: None)
    assert (other["gemm_bf16_gflop_s"], other["gemm_fp32_gflop_s"]) == (900, 100)
    assert "100 GFLOP/s in fp32, 400 to 900 GFLOP/s in bf16" in machine.one_line(other)
    warning = machine.load_warning(other)
    assert warning is not None
    assert "products in bf16 400 to 900 GFLOP/s between" in warning
    assert "fp32" not in warning


@pytest.mark.long
def test_generation_for_real(fake, monkeypatch) -> None:
    """Our process on the tiny shape; the peer says what ours says, so the ratio exists.

    `token_ms` has no sign here: the difference of two times of milliseconds, measured once, beside other tests.
    """
    echo = fake("echo")
    Path(echo.command[1]).write_text("from benchmarks.ours import *\nprint_result(generate(read_job()))\n")
    monkeypatch.setattr("benchmarks.commands.peers", lambda *a, **k: ([echo], {}))
    monkeypatch.setattr("benchmarks.commands.machine.describe", lambda *a: MACHINE)
    options = Options(lambda text: None, repetitions=1, seconds=0.0)
    found = bench_generate("tiny", [3], ["bfloat16"], options, prompt=5, new=4)
    (row,) = found["rows"]
    assert row["peer"] == "echo"
    assert row["tok_s"] > 0
    assert row["first_ms"] > 0
    assert row["new_tokens"] == 4


@pytest.mark.long
def test_startup_for_real(monkeypatch) -> None:
    """To the first step, once."""
    monkeypatch.setattr("benchmarks.startup.SCENARIOS", (("warm", "a", startup.TORCH),))
    monkeypatch.setattr("benchmarks.commands.peers", lambda *a, **k: ([], {}))
    monkeypatch.setattr("benchmarks.startup.imports", lambda *a: {"numpy": 0.1})
    monkeypatch.setattr("benchmarks.commands.machine.describe", lambda *a: MACHINE)
    found = bench_startup(Options(lambda text: None))
    assert 0 < found["first_step_warm_s"] < 200
    assert tables.startup_rows(found)[-1] == {"what": "import numpy", "seconds": "0.10"}


@pytest.mark.long
def test_head_command(bench: Callable) -> None:
    done = bench("head", "--vocab", 300, "--width", 8, "--tokens", 16, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert all(rows[way]["peak_bytes"] > 0 for way in ("chunked", "whole"))


def test_a_peer_that_cannot_generate_is_told(fake) -> None:
    broken, said = fake("broken"), list[str]()
    Path(broken.command[1]).write_text("raise SystemExit('no such kernel')")
    how = {"prompt": 2, "new": 2, "repetitions": 1, "seconds": 0.0, "cache": ResultCache(None), "log": said.append}
    found = generate.measure_batch({"shape": {}}, [fake("ingot", **GENERATED), broken], 1, "float32", **how)
    assert list(found) == ["ingot"]
    assert "broken: its process ended without a result: no such kernel; it is left out" in said


@pytest.mark.parametrize("bf16", [True, False])
def test_everything_becomes_a_page(monkeypatch, fake, tmp_path: Path, bf16: bool) -> None:
    """The whole of `bench all` with contenders that only say what they measured, where the CPU has bf16 or not."""
    said = {**GENERATED, **RESULT, **MACHINE, "batch_s": 1e-5, "weights": "", "kept": 0, "masked": 0}
    said |= {"updates": 1, "learned": 64}
    if not bf16:
        del said["gemm_bf16_gflop_s"]
    monkeypatch.setattr(
        "benchmarks.commands.ours", lambda what, name="ingot", **c: fake(name, **said).variant(name, **c)
    )
    monkeypatch.setattr("benchmarks.align.ours", lambda what, name="ingot", **c: fake(name, **said).variant(name, **c))
    monkeypatch.setattr("benchmarks.train.ours", lambda what: fake("weights"))
    monkeypatch.setattr("benchmarks.machine.ours", lambda what: fake("machine", **said))
    monkeypatch.setattr("benchmarks.data.ours", lambda what: fake("ours", **said))
    monkeypatch.setattr("benchmarks.data.our_corpus", lambda: fake("ingot", **said))
    peer: Contender = fake("litgpt", **{**said, "step_s": 0.02, "seconds": 2.0})
    monkeypatch.setattr("benchmarks.commands.peers", lambda *a, **k: ([peer], {"other": "other: left out"}))
    monkeypatch.setattr("benchmarks.startup.bench_startup", lambda *a: {"first_step_cold_s": 3.0, "imports_s": {}})
    monkeypatch.setattr("benchmarks.commands.CORPUS_MB", 0.1)
    monkeypatch.setattr("benchmarks.train.write_ids", lambda *a: {"ids": "", "store": ""})
    found = everything(Options(lambda text: None, repetitions=1, cache=ResultCache(tmp_path / "kept")), full=True)
    file = page.keep(found, tmp_path / "BENCHMARKS.md")
    text = (tmp_path / "BENCHMARKS.md").read_text()
    assert json.loads(file.read_text())["machine"]["cpu"] == "Test 9"
    assert not (tmp_path / "kept").exists(), "all is done, so nothing is kept"
    modes = ["as shipped", "autocast", "fp32"] if bf16 else ["as shipped"]
    assert list(found["train"]["modes"]) == modes
    assert all(list(rows) == ["S1", "S2", "S3", "S4"] for rows in found["train"]["modes"].values())
    assert ("training S4, fp32; peers with bf16 autocast | 102,400 tok/s" in text) == bf16
    assert ("400 GFLOP/s in bf16" in text) == bf16
    assert [row["dtype"] for row in found["generate"]["rows"]] == ["float32"] * 2 + ["bfloat16"] * 2 * bf16
    assert "2.00x" in text
    assert "| ppo A1 |" in text
    assert "litgpt, activations kept 20 ms a step" in text
    assert "Left out: other: left out." in text
    assert "Test 9, 2 cores (avx2)" in text


@pytest.mark.parametrize("command", ["train", "generate", "align", "data", "startup", "head", "all"])
def test_help_teaches(bench: Callable, command: str) -> None:
    done = bench(command, "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout
