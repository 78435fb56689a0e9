"""Alternation, summaries, refusals and resuming with fake contenders; the real ones on the tiny shape."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.commands import Options, bench_train
from benchmarks.peers import common
from benchmarks.process import TURN, ResultCache, measure

from benchmarks import contenders, shapes, train
from ingot.core.errors import UserError
from tests.benchmarks.conftest import RESULT

TINY = shapes.SHAPES["tiny"]
PEAKS = {"gemm_fp32_gflop_s": 100.0, "gemm_bf16_gflop_s": 400.0}
IN_TURNS = """
import json, sys
from benchmarks.peers.common import take_turn
def note(text):
    with open({log!r}, "a") as file:
        file.write(text + "\\n")
job = json.loads(sys.stdin.readline())
{steps}
{last}
print(json.dumps({result!r}))
"""
JOB = {"shape": {"rows": 4, "context": 16}}


def test_repetitions_alternate(fake, calls) -> None:
    found = train.alternate([fake("a"), fake("b"), fake("c")], JOB, 3, ResultCache(None), lambda text: None)
    assert calls() == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert {name: len(results) for name, results in found.items()} == {"a": 3, "b": 3, "c": 3}


@pytest.mark.long
def test_contenders_that_are_there_at_once_take_turns(fake, calls, tmp_path: Path) -> None:
    """Each is ready before the next starts; windows go forwards and backwards, and nobody ends before the last one."""
    fakes = [fake("a"), fake("b"), fake("c")]
    for contender in fakes:
        script = Path(contender.command[1])
        noted = [f"note('{contender.name}{what}')" for what in ("ready", 1, 2, "ends")]
        steps = "\n".join(f"{note}\nprint('unfinished', end=' ')\ntake_turn()" for note in noted[:3])
        script.write_text(IN_TURNS.format(log=str(tmp_path / "calls"), steps=steps, last=noted[3], result=RESULT))
    kept = ResultCache(tmp_path / "kept")
    found = train.alternate(fakes, JOB, 1, kept, lambda text: None, windows=2)
    assert calls() == ["aready", "bready", "cready", "c1", "b1", "a1", "a2", "b2", "c2", "cends", "bends", "aends"]
    assert found == {name: [RESULT] for name in "abc"}
    assert train.alternate(fakes, JOB, 1, kept, lambda text: None, windows=2) == found
    assert len(calls()) == 12
    Path(fakes[1].command[1]).write_text("input(); print('@turn', flush=True); input(); raise SystemExit('no memory')")
    said: list[str] = []
    found = train.alternate(fakes, JOB, 2, ResultCache(None), said.append, windows=2)
    assert {name: len(results) for name, results in found.items()} == {"a": 2, "c": 2}
    assert said == ["b: its process ended without a result: no memory; it is left out"]


def test_windows_of_a_clock(monkeypatch) -> None:
    """Steps that take a second: those that warm up and those after a pause are not timed, the others are."""
    now, waits = [0.0], []
    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(common.torch.cuda, "is_available", lambda: False)

    def pause() -> None:
        now[0] += 100
        waits.append(clock.steps)

    monkeypatch.setattr(common, "take_turn", pause)
    clock = common.Clock({"shape": {"checked": 2}, "seconds": 12.0, "least": 4, "turns": 3})
    while True:
        now[0] += 1
        if not clock.tick(torch.tensor(0.5)):
            break
    assert waits == [2, 6, 10, 14]
    assert clock.result() == {"step_s": 1.0, "p10_s": 1.0, "p90_s": 1.0, "steps": 12, "losses": [0.5, 0.5]}
    assert TURN == common.TURN


def test_turns_only_where_memory_holds_all() -> None:
    shape = shapes.named("S4")
    assert [train.windows(shape, 4, memory) for memory in (0.0, 16e9, 64e9)] == [1, 1, train.MAX_WINDOWS]


def test_summary_takes_the_fastest_peer_that_does_the_same_work() -> None:
    mine = [{**RESULT, "step_s": s} for s in (0.010, 0.011, 0.0125)]
    slow = [{**RESULT, "step_s": 0.05}] * 3
    fast = [{**RESULT, "step_s": s} for s in (0.030, 0.033, 0.0375)]
    cheat = [{**RESULT, "step_s": 0.001, "parameters": 10}] * 3
    row = train.summary(TINY, mine, {"slow": slow, "fast": fast, "cheat": cheat}, PEAKS)
    assert row["peer"] == "fast"
    assert row["ratio"] == row["low"] == row["high"] == 3.0
    assert row["tok_s"] == round(64 / 0.011)
    assert row["peer_tok_s"] == round(64 / 0.033)
    assert row["gflop_s"] == pytest.approx(220608 * 64 / 0.011 / 1e9, abs=0.06)
    assert row["of_peak"] == pytest.approx(row["gflop_s"] / 100, abs=1e-3)
    assert row["peers"]["slow"]["ratio"] == pytest.approx(4.5, abs=0.05)
    assert "ratio" not in row["peers"]["cheat"]
    assert row["peers"]["cheat"]["differs"] == "parameters: 10 against our 34,880"


def test_no_ratio_where_no_peer_does_the_same() -> None:
    row = train.summary(TINY, [RESULT], {"peer": [{**RESULT, "losses": [4.11, 4.3]}]}, PEAKS)
    assert row["ratio"] is None
    assert row["peer"] is None


def test_bf16_has_a_wider_band_and_its_own_peak() -> None:
    mine, peer = {**RESULT, "precision": "bf16"}, {**RESULT, "losses": [4.11, 4.06]}
    row = train.summary(TINY, [mine], {"peer": [peer]}, PEAKS)
    assert row["loss_band_nats"] == 0.03
    assert row["of_peak"] == pytest.approx(row["gflop_s"] / 400, abs=1e-3)
    assert row["peers"]["peer"]["of_peak"] == pytest.approx(row["gflop_s"] / 100, abs=1e-3)


def test_an_interrupted_run_goes_on_with_what_it_has(fake, calls, tmp_path: Path) -> None:
    kept = ResultCache(tmp_path / "kept")
    fakes = [fake("a"), fake("b")]
    first = train.alternate(fakes, {**JOB, "ids": "/tmp/one"}, 2, kept, lambda text: None)
    assert train.alternate(fakes, {**JOB, "ids": "/tmp/two"}, 2, kept, lambda text: None) == first
    assert len(calls()) == 4
    train.alternate(fakes, {**JOB, "ids": "/tmp/two"}, 3, kept, lambda text: None)
    assert len(calls()) == 6
    measure(fakes[0].variant("a", seconds=9), JOB, kept)
    assert len(calls()) == 7, "another job is another measurement"
    kept.clear()
    train.alternate(fakes, JOB, 1, kept, lambda text: None)
    assert len(calls()) == 9


def test_a_process_that_fails_is_told_with_its_last_line(fake, tmp_path: Path) -> None:
    broken = fake("broken")
    Path(broken.command[1]).write_text("raise SystemExit('no such kernel')")
    with pytest.raises(UserError, match="broken: its process ended without a result: no such kernel"):
        measure(broken, JOB, ResultCache(None))


def test_a_peer_that_fails_is_left_out_and_ours_is_not(fake, calls) -> None:
    peer, broken, said = fake("peer"), fake("broken"), list[str]()
    Path(broken.command[1]).write_text("raise SystemExit('no such kernel')")
    found = train.alternate([peer, broken], JOB, 2, ResultCache(None), said.append)
    assert {name: len(results) for name, results in found.items()} == {"peer": 2}
    assert "broken: its process ended without a result: no such kernel; it is left out" in said
    with pytest.raises(UserError, match="no such kernel"):
        train.alternate([peer, replace(broken, ours=True)], JOB, 2, ResultCache(None), said.append)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match=r"--shape: found 'tin', expected one of the known shapes; did you mean 'tiny'"):
        shapes.named("tin")
    with pytest.raises(UserError, match=r"--against: found 'litgbt'.*did you mean 'litgpt'"):
        contenders.peers("train", ["litgbt"], print)
    with pytest.raises(UserError, match="--against: found 'datatrove'"):
        contenders.peers("train", ["datatrove"], print)
    assert contenders.peers("train", ["none"], print) == ([], {})


def test_a_peer_that_cannot_be_installed_is_left_out_with_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    (tmp_path / "python").write_text("#!/bin/sh\necho 'ERROR: No matching distribution' >&2; exit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("benchmarks.contenders.sys.executable", str(tmp_path / "python"))
    wanted = contenders.Peer(("no-such-package==1.0",), {"train": {"odd": "odd.py"}})
    monkeypatch.setattr(contenders, "PEERS", {"odd": wanted})
    said: list[str] = []
    found, skipped = contenders.peers("train", [], said.append)
    assert found == []
    assert said[0].startswith("odd: installing no-such-package==1.0 into")
    assert said[1] == (
        "odd: left out, since it could not be installed (ERROR: No matching distribution); to use an existing "
        "environment, set INGOT_PEER_ODD"
    )
    assert list(skipped) == ["odd"]


def test_a_peer_may_be_an_interpreter_that_is_there(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("INGOT_PEER_LITGPT", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"INGOT_PEER_LITGPT: found '.*python', which is no program"):
        contenders.interpreter("litgpt", print)
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    found, _ = contenders.peers("train", ["litgpt"], print, autocast=True)
    assert [c.command[0] for c in found] == [str(tmp_path / "python")]
    assert found[0].changes == {"autocast": True}


def test_peers_run_as_shipped_and_ours_as_a_stage_does(monkeypatch) -> None:
    for name in contenders.ALLOCATOR_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert contenders.ours("train").environment.items() >= contenders.ALLOCATOR_ENVIRONMENT.items()
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    assert not contenders.peer_environment().keys() & contenders.ALLOCATOR_ENVIRONMENT.keys()


@pytest.mark.slow
def test_the_tiny_shape_for_real(monkeypatch, fake) -> None:
    """Ours against the plain loop that the peers share, here around our own model: the same losses to the last bits."""
    peer = fake("loop")
    Path(peer.command[1]).write_text(LOOP)
    monkeypatch.setattr("benchmarks.commands.peers", lambda *a, **k: ([peer], {}))
    monkeypatch.setattr(
        "benchmarks.commands.machine.describe", lambda *a: {**PEAKS, "device": "cpu", "memory_bytes": 8e9}
    )
    data = bench_train(["tiny"], Options(lambda text: None, repetitions=1, seconds=0.0), precision="fp32")
    row = data["shapes"]["tiny"]
    assert row["peer"] == "loop", row["peers"]["loop"].get("differs")
    assert row["ratio"] > 0
    assert row["parameters"] == TINY.config().parameters
    assert row["loss"] < math.log(TINY.vocab) - 0.03, "it learned"


LOOP = """
import sys
import torch
from benchmarks.peers.common import *
from ingot.convert.hf_weights import _LLAMA
from ingot.model.config import ModelConfig
from ingot.model.transformer import build
job = read_job()
config = ModelConfig.model_validate(job["config"])
model = build(config, seed=7)
theirs = torch.load(job["weights"], weights_only=True)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        *path, module, role = name.split(".")
        key = _LLAMA[".".join([*path[2:], module])].format(layer=path[1] if path else None)
        parameter.copy_(theirs[key + "." + role])
done = work(model, config.depth, config.width, config.context)
done["flops_per_token"] += 6 * config.vocab * config.width  # the tied head is no module of ours
def loss_of(ids, targets):
    out = model(ids)
    return torch.nn.functional.cross_entropy(out.head(out.hidden).flatten(0, 1), targets.flatten())
result = train_plainly(job, model, loss_of)
print_result({**result, **done, "peak_bytes": peak_bytes(), "versions": versions()})
"""


@pytest.mark.long
def test_command_prints_one_document(bench: Callable) -> None:
    done = bench("train", "--shape", "tiny", "--against", "none", "--repetitions", 1, "--seconds", 0, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["shapes"]["tiny"]["tok_s"] > 0
    assert data["shapes"]["tiny"]["ratio"] is None
    assert {"cpu", "cores", "torch", "gemm_fp32_gflop_s", "read_gb_s"} <= data["machine"].keys()


@pytest.mark.long
def test_command_refuses_what_it_does_not_know(bench: Callable) -> None:
    for arguments, words in ((("--shape", "S9"), "--shape: found 'S9'"), (("--against", "x"), "--against: found 'x'")):
        done = bench("train", *arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stdout == ""
