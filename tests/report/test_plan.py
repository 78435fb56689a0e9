"""`ingot plan`: the data and what is printed of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.core.errors import UserError
from ingot.pipeline.graph import load_graph
from ingot.plan.cost import Speed
from ingot.plan.machine import GPUS, Device
from ingot.report.plan import device_of, plan_rows, print_plan, sparkline
from ingot.stages.training.calibration import workload, write_speed
from ingot.stages.training.plan_inputs import forecast_inputs
from tests.report.conftest import Run, graph_of, write_sources

CPU = Device("CPU", 16 * 10**9)


def _by_name(made: Run, **options: object) -> dict[str, dict]:
    rows = plan_rows(made.graph, CPU, **options)  # type: ignore[arg-type]
    assert json.loads(json.dumps(rows)) == rows
    return {row["name"]: row for row in rows}


def test_rows(finished: Run, capsys: pytest.CaptureFixture) -> None:
    rows = _by_name(finished)
    assert rows["base"]["state"] == "HIT"
    assert rows["chat"]["state"] == "RESUME"
    assert rows["base"]["inputs"] == ["bpe", "clean@bpe"]
    assert "missing" not in rows["clean"]
    print_plan(list(rows.values()))
    shown = capsys.readouterr().out
    assert "questions@bpe" in shown
    assert "0.9 questions + 0.1 clean" in shown


def test_figures_are_exact_where_the_corpora_are_encoded(
    finished: Run, capsys: pytest.CaptureFixture, without_cpu_kernels: None
) -> None:
    """The store's own count, not the assumption that every row is full; the shape of `chat` comes with its init."""
    rows = _by_name(finished)
    base, chat = rows["base"]["forecast"], rows["chat"]["forecast"]
    tokens = json.loads((finished.dir("clean@bpe") / "result.json").read_text())["train_tokens"]
    rows_of_text = (tokens - 1) // 256
    assert base["length"]["epochs"]["clean"] == pytest.approx(400 * base["batch"]["rows"] / rows_of_text)
    assert set(chat["length"]["epochs"]) == {"clean", "questions"}
    assert chat["length"]["tokens"] < 40 * chat["batch"]["rows"] * 256  # conversations do not fill their rows
    assert chat["parameters"] == base["parameters"]
    assert chat["memory"]["attention"] > 0 == base["memory"]["attention"]  # documents do not see each other
    print_plan(list(rows.values()))
    shown = capsys.readouterr().out
    assert "epochs" in shown
    assert "about" not in shown


def test_figures_before_anything_has_run(empty: Run, capsys: pytest.CaptureFixture) -> None:
    rows = _by_name(empty, ranks=2)
    base = rows["base"]["forecast"]
    assert base["length"]["epochs"] is None
    assert base["length"]["tokens"] == 400 * base["batch"]["rows"] * 256
    assert base["batch"]["ranks"] == 2
    print_plan(list(rows.values()))
    shown = capsys.readouterr().out
    assert f"{base['parameters']['total']:,}" in shown
    assert "exact after tokenizing" in shown
    assert "x 2 rank(s)" in shown
    assert "(each rank)" in shown


def test_nothing_is_left(finished: Run, capsys: pytest.CaptureFixture) -> None:
    print_plan([row for row in _by_name(finished).values() if row["state"] == "HIT"])
    assert "nothing to run" in capsys.readouterr().out


def test_what_does_not_fit_is_said(empty: Run, capsys: pytest.CaptureFixture) -> None:
    print_plan(plan_rows(empty.graph, Device("CPU", 10**6)))
    assert "of 1.0 MB, does not fit" in capsys.readouterr().out


def test_f6_hours_of_a_gpu_with_a_known_peak(empty: Run, capsys: pytest.CaptureFixture) -> None:
    flops = next(r for r in plan_rows(empty.graph, CPU) if r["name"] == "base")["forecast"]["length"]["flops"]
    day = Device("Card", 10**12, peak=flops / 0.4 / (96 * 3600), half="bf16")  # 96 hours of it
    for ranks, time in ((1, "4 days"), (32, "3 h 0 min")):
        print_plan(plan_rows(empty.graph, day, ranks))
        shown = capsys.readouterr().out
        assert f"; 96 GPU-hours, {time}, at an assumed 40% of the peak" in shown


@pytest.mark.parametrize("kind", ["type = 'char'", "type = 'word'\nvocab = 300"], ids=["char", "at most 300 words"])
def test_an_unknown_vocabulary_names_who_makes_it(tmp_path: Path, kind: str) -> None:
    write_sources(tmp_path)
    recipe = Path(graph_of(tmp_path, tmp_path / "runs").recipe.path)
    text, _ = recipe.read_text().split("[stage.chat]")
    text = text.replace("vocab = 300", kind)
    tuned = '[stage.tuned]\nkind = "train"\ninit = "base"\ndata = { clean = 1.0 }\nduration = "40 steps"\n'
    recipe.write_text(text + tuned)
    rows = plan_rows(load_graph(recipe, [], tmp_path / "runs"), CPU)
    told = {row["name"]: row.get("forecast") for row in rows}
    assert told["base"] == {"unknown": "its size is known once bpe has run"}
    assert told["tuned"] == {"unknown": "its size is known once base has run"}
    print_plan(rows)


def test_sources_that_are_not_there_are_told_and_all_else_is_planned(tmp_path: Path, ingot) -> None:
    write_sources(tmp_path)
    graph_of(tmp_path, tmp_path / "runs")
    (tmp_path / "text.jsonl").unlink()
    result = ingot("plan", "small.toml", "--json", cwd=tmp_path)
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert rows["clean"]["state"] == "MISSING"
    assert rows["questions"]["state"] == rows["base"]["state"] == "RUN"
    assert rows["base"]["forecast"]["parameters"]["total"] > 0
    assert result.returncode == 2
    (sentence,) = result.stderr.strip().splitlines()
    assert sentence == f"error: {rows['clean']['missing']}"
    assert "stage.clean" in sentence
    assert "text.jsonl" in sentence
    refused = ingot("run", "small.toml", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == result.stderr
    assert not list((tmp_path / "runs").glob("stages/*-*/inputs.json"))


SPEED = Speed(step_s=0.5, token_s=1e-5, sample_s=0.1, byte_s=1e-9, start_s=3.0)


def test_time_and_price_of_a_machine_that_was_measured(
    empty: Run, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.stages.training.calibration.cache_directory", lambda: tmp_path / "cache")
    base = _by_name(empty, per_hour=36.0)["base"]["forecast"]
    assert base["time"] is base["price"] is None
    print_plan(list(_by_name(empty, per_hour=36.0).values()))
    shown = capsys.readouterr().out
    assert "add --measure" in shown
    assert "price       not known" in shown
    node = empty.graph.nodes["base"]
    inputs = forecast_inputs(node, empty.graph.stage, CPU, 1, here=True)
    write_speed(workload(node.settings, inputs, base), SPEED, by="a measurement", gemm_flops=1e11)  # type: ignore[arg-type]
    rows = _by_name(empty, per_hour=36.0)
    time = rows["base"]["forecast"]["time"]
    assert time["steps"] == pytest.approx(400 * 0.5)
    assert rows["base"]["forecast"]["price"] == pytest.approx(time["total"] / 100)
    print_plan(list(rows.values()))
    shown = capsys.readouterr().out
    assert "500 ms a step, as a measurement on this machine showed" in shown
    assert "of 100 GFLOP/s, the fastest matrix product measured (MFU)" in shown
    assert _by_name(empty, here=False)["base"]["forecast"]["time"] is None


def test_what_stages_cost(ingot) -> None:
    shown = ingot("plan", "--stages")
    assert shown.returncode == 0
    assert "pre-training  1T to 3T" in shown.stdout
    rows = json.loads(ingot("plan", "--stages", "--price", "2.4", "--json").stdout)
    assert rows[0]["compute"][0] == pytest.approx(2 * 1.04e6, rel=0.01)
    assert [row["printed"] for row in rows] == [2e6, 1e4, 5e3]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--stages", "--nproc", "2"], "found --stages with a recipe or its options"),
        (["pairs.toml", "--stages"], "found --stages with a recipe or its options"),
        (["pairs.toml", "--price", "inf"], "found --price inf, expected a number"),
        (["pairs.toml", "--nproc", "4", "--set", "stage.base.mesh={shard=3}"], "base: mesh: found replicate any x"),
    ],
)
def test_what_a_plan_cannot_take_is_refused(words: list[str], sentence: str, ingot, tmp_path: Path) -> None:
    (tmp_path / "pairs.toml").write_text(ALIGNED)
    write_sources(tmp_path)
    refused = ingot("plan", *words, cwd=tmp_path)
    assert refused.returncode == 2
    assert sentence in refused.stderr


def test_only_this_machine_can_be_measured(ingot, tmp_path: Path) -> None:
    (tmp_path / "pairs.toml").write_text(ALIGNED)
    refused = ingot("plan", "pairs.toml", "--measure", "--gpu", "a100", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--measure with --gpu a100" in refused.stderr
    assert ingot("plan").returncode == 2


def test_gpus_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of("A100") == GPUS["a100"]
    with pytest.raises(UserError, match="--gpu a10000: no such GPU"):
        device_of("a10000")
    monkeypatch.setattr("ingot.report.plan.this_machine", lambda: CPU)
    assert device_of(None) == CPU


def test_sparkline() -> None:
    assert sparkline([0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([7, 7]) == "██"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""


def test_no_torch(finished: Run) -> None:
    """The parent plans without loading torch, data or not."""
    code = (
        "import sys; from ingot.cli.app import main; sys.argv = ['ingot', 'plan', *sys.argv[1:]]\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(finished.graph.recipe.path), "--out", str(finished.root)]
    subprocess.run(command, check=True, capture_output=True)


ALIGNED = """
[run]
name = "pairs"
[stage.text]
kind = "corpus"
sources = ["python:stdlib"]
[stage.pairs]
kind = "corpus"
sources = ["python:docs"]
format = "pairs"
[stage.bpe]
kind = "tokenizer"
from = "text"
vocab = 3072
[stage.base]
kind = "train"
data = { text = 1.0 }
tokenizer = "bpe"
model = { depth = 4, context = 1024 }
duration = "10 steps"
[stage.reward]
kind = "train"
init = "base"
objective = "reward"
data = { pairs = 1.0 }
duration = "10 steps"
[stage.dpo]
kind = "train"
init = "base"
objective = "dpo"
data = { pairs = 1.0 }
duration = "10 steps"
[stage.asked]
kind = "corpus"
sources = ["python:docs"]
format = "prompts"
[stage.ppo]
kind = "train"
init = "base"
objective = { kind = "ppo", reward = "reward" }
data = { asked = 1.0 }
duration = "10 steps"
"""


@pytest.mark.parametrize("packing", ["{}", "{isolate=true}"])
def test_pairs_have_rows_of_their_own_that_need_no_mask(tmp_path: Path, packing: str) -> None:
    (tmp_path / "pairs.toml").write_text(ALIGNED)
    memory = {}
    for stage in ("base", "reward"):
        graph = load_graph(tmp_path / "pairs.toml", [f"stage.{stage}.packing={packing}"], tmp_path)
        rows = {row["name"]: row for row in plan_rows(graph, GPUS["a100"])}
        memory[stage] = rows[stage]["forecast"]["memory"]["attention"]
    assert memory["reward"] == 0
    assert (memory["base"] > 0) == ("true" in packing)  # the control: windows over text may be isolated


def test_the_models_beside_a_stage_are_in_its_memory(tmp_path: Path) -> None:
    """What it is held to, and what rewards it; the model under an adapter is its reference without a copy."""
    (tmp_path / "pairs.toml").write_text(ALIGNED)
    graph = load_graph(tmp_path / "pairs.toml", ["stage.ppo.adapter={rank=4}"], tmp_path)
    told = {row["name"]: row["forecast"] for row in plan_rows(graph, GPUS["a100"]) if "forecast" in row}
    own = 4 * told["base"]["parameters"]["total"]
    assert {name: told[name]["memory"]["companions"] for name in ("base", "reward", "dpo", "ppo")} == {
        "base": 0,
        "reward": 0,
        "dpo": own,
        "ppo": own,
    }
    graph = load_graph(tmp_path / "pairs.toml", [], tmp_path)
    ppo = next(row for row in plan_rows(graph, GPUS["a100"]) if row["name"] == "ppo")["forecast"]["memory"]
    assert ppo["companions"] == 2 * own
    assert ppo["total"] == sum(n for name, n in ppo.items() if name not in ("total", "available"))
