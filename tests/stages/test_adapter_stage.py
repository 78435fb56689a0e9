"""A train stage with an adapter: what is trained, saved, loaded and shared, and what every neighbour sees of it."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.convert import hf_weights, peft
from ingot.core.errors import UserError
from ingot.core.events import read_events
from ingot.model import lora
from ingot.model.config import ModelSettings
from ingot.pipeline.gc import orphans
from ingot.pipeline.graph import import_graph, load_graph
from ingot.pipeline.run import job_of, link, require_files
from ingot.report.plan import plan_rows
from ingot.stages import child
from ingot.stages.models.export import export_hf, export_peft
from ingot.stages.models.load import load_model, load_with_adapter
from ingot.stages.training import build
from ingot.stages.training.phases import build_timeline
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import assumed_size
from ingot.train.engine import Engine

TRAIN = """
kind = "train"
data = { old = 1.0 }
batch = 4
precision = "fp32"
"""
RECIPE = f"""
[run]
name = "small"

[stage.old]
kind = "corpus"
sources = ["old.txt"]
quality = "none"
holdout = {{ fraction = 0.2, by = "tail" }}

[stage.bpe]
kind = "tokenizer"
from = "old"
vocab = 280

[stage.base]
{TRAIN}
tokenizer = "bpe"
model = {{ depth = 2, width = 16, heads = 2, context = 32, dropout = 0.1 }}
duration = "8 steps"
evaluate = {{ sample = false, tokens = 64 }}
loop = {{ threads = 1 }}

[stage.tuned]
{TRAIN}
init = "base"
adapter = {{ kind = "dora", rank = 2, alpha = 4, dropout = 0.2 }}
duration = "8 steps"
optim = {{ lr = 0.05 }}
evaluate = {{ sample_tokens = 4, tokens = 64, every = 3 }}
loop = {{ threads = 1, save_every = 2, log_every = 1 }}

[stage.again]
{TRAIN}
init = "tuned"
adapter = "lora"
duration = "2 steps"
evaluate = {{ sample = false, tokens = 64 }}
loop = {{ threads = 1 }}

[stage.pairs]
kind = "corpus"
sources = ["pairs.jsonl"]
format = "pairs"
pii = false
holdout = {{ fraction = 0.2, by = "document" }}

[stage.prefer]
{TRAIN.replace("old", "pairs")}
init = "base"
adapter = {{ rank = 2 }}
objective = "dpo"
duration = "2 steps"
evaluate = {{ sample = false, tokens = 64 }}
loop = {{ threads = 1, log_every = 1 }}

[stage.worth]
kind = "fisher"
model = "base"
data = {{ old = 1.0 }}
samples = 4

[stage.held]
{TRAIN}
init = "base"
adapter = {{ kind = "lora", rank = 2, targets = ["q", "ffn.*"] }}
duration = "4 steps"
penalties = [
  {{ kind = "ewc", fisher = "worth", weight = 5.0 }},
  {{ kind = "l2sp", weight = 0.1 }},
  {{ kind = "kl", weight = 0.5 }},
]
evaluate = {{ sample = false, tokens = 64 }}
loop = {{ threads = 1, log_every = 1 }}

[stage.whole]
{TRAIN}
init = "base"
adapter = {{ rank = 2, modules_to_save = ["embedding", "head"] }}
duration = "4 steps"
penalties = [{{ kind = "ewc", fisher = "worth", weight = 5.0 }}, {{ kind = "l2sp", weight = 0.1 }}]
evaluate = {{ sample = false, tokens = 64 }}
loop = {{ threads = 1, log_every = 1 }}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's directory, its stages built in this process, each as its child would build it."""
    path = tmp_path_factory.mktemp("adapter")
    sides = [(a, b, c) for a in ("red", "old", "sun") for b in ("cat", "dog") for c in "abcdef"]
    (path / "old.txt").write_text("\n".join(f"the {a} {b} ran over hill {c}" for a, b, c in sides * 4) + "\n")
    pairs = [{"prompt": f"the {i}", "chosen": f"cat {i}", "rejected": f"{i} dog"} for i in range(20)]
    (path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (path / "small.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for name in load_graph(Path("small.toml"), [], Path("runs")).nodes:
            _run(path, name)
    return path


@pytest.fixture(autouse=True)
def _there(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)


def _run(work: Path, name: str, to: str | None = None) -> Path:
    graph = load_graph(work / "small.toml", [], Path("runs"))
    job = job_of(graph, graph.nodes[name], quiet=True)
    if to:
        job["dir"] = str((work / "runs" / "stages" / to).absolute())
    else:
        link(graph, graph.nodes[name])
    child.run(job)
    return Path(job["dir"])


def _at(name: str) -> Path:
    return Path("runs", "small", name)


def _result(name: str) -> dict[str, Any]:
    return json.loads((_at(name) / "result.json").read_text())


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in checkpoint.glob("*.safetensors") for n, t in load_file(file).items()}


def _weights(stage: Path, **options: Any) -> dict[str, torch.Tensor]:
    model = load_model(stage, print, device="cpu", **options).model
    return {n: p.detach() for n, p in model.named_parameters()}


def _same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return bool(one) and one.keys() == two.keys() and all(torch.equal(t, two[n]) for n, t in one.items())


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model.eval()(torch.arange(60).view(2, 30))
        return out.head(out.hidden)


def test_a_checkpoint_holds_what_is_trained_and_its_moments() -> None:
    checkpoints = _at("tuned") / "checkpoints"
    layers = [n.removesuffix("weight") for n in _weights(_at("tuned")) if "attention." in n or "ffn." in n]
    assert len(layers) == 2 * 7
    trained = {f"{n}{part}" for n in layers for part in ("lora_A", "lora_B", "lora_magnitude")}
    moments = {f"optim.{n}.{m}" for n in trained for m in ("step", "exp_avg", "exp_avg_sq")}
    assert set(_tensors(checkpoints / "00000008")) == {f"model.{n}" for n in trained} | moments | {"guard.losses"}
    assert set(_tensors(checkpoints / "best")) == {f"model.{n}" for n in trained}


def test_the_run_and_its_plan_name_the_backend_and_why(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter trains without the C++ kernels; all weights of the same model train with them, where there are any."""
    graph = load_graph(work / "small.toml", [], Path("runs"))
    reason = "the C++ kernels do not train adapters"
    told = {row["name"]: row["forecast"]["execution"] for row in plan_rows(graph) if "forecast" in row}
    assert told["tuned"]["why_backend"] == reason
    assert reason not in told["base"].get("why_backend", "")
    for name in ("base", "tuned"):
        job = job_of(graph, graph.nodes[name], quiet=False)
        job["dir"] = str((work / "runs" / "stages" / f"said-{name}").absolute())
        child.run(job)
        said = " ".join(capsys.readouterr().err.split())
        assert (f"backend torch: {reason}" in said) == (name == "tuned")


def test_the_result_counts_what_is_trained() -> None:
    base, tuned = _result("base"), _result("tuned")
    assert base["trained_parameters"] == base["parameters"]
    sizes = [(16, 16)] * 4 + [(16, 64)] * 2 + [(64, 16)]
    assert tuned["trained_parameters"] == 2 * sum(2 * (i + o) + o for i, o in sizes)
    assert tuned["parameters"] == base["parameters"] + tuned["trained_parameters"]
    assert tuned["decayed_parameters"] == 0


def test_the_rate_of_an_adapter_is_ten_times_that_of_all_weights() -> None:
    """Where the recipe sets none: 6e-4 * sqrt(768 / width), and a tenth of it where all weights are tuned."""
    config = ModelSettings(depth=2, width=48).resolve(100)
    table = {"data": {"a": 1.0}, "init": "b", "duration": "9 steps"}
    whole, adapter = (
        build_timeline(TrainSettings.model_validate(table | more), config, assumed_size).peak
        for more in ({}, {"adapter": "lora"})
    )
    assert (whole, adapter) == (pytest.approx(6e-5 * 4), pytest.approx(6e-4 * 4))


def test_a_loaded_stage_is_the_merged_model() -> None:
    for options in ({}, {"best": True}):
        beside = load_with_adapter(_at("tuned"), print, device="cpu", **options).model
        merged = load_model(_at("tuned"), print, device="cpu", **options).model
        assert len(lora.adapters(beside)) == 14
        assert not lora.adapters(merged)
        assert (_logits(merged) - _logits(beside)).abs().max() < 1e-5
        frozen = {n: p.detach() for n, p in beside.named_parameters() if "lora_" not in n}
        assert _same(frozen, _weights(_at("base")))
        assert not _same(_weights(_at("tuned"), **options), frozen)


def test_a_stage_upon_an_adapter_starts_from_merged_weights() -> None:
    beside = load_with_adapter(_at("again"), print, device="cpu").model
    frozen = {n: p.detach() for n, p in beside.named_parameters() if "lora_" not in n}
    assert _same(frozen, _weights(_at("tuned")))
    draws = [load_with_adapter(_at(n), print, device="cpu").model.layers["0"].ffn.up.lora_A for n in ("again", "held")]  # type: ignore[union-attr]
    assert not torch.equal(draws[0][:2], draws[1])


def test_an_export_is_the_merged_model(tmp_path: Path) -> None:
    export_hf(_at("tuned"), tmp_path / "hf", "float32", False, print)
    assert _same(
        {n: p.detach() for n, p in hf_weights.load(tmp_path / "hf").named_parameters()}, _weights(_at("tuned"))
    )


@pytest.mark.slow
def test_an_adapter_goes_out_and_comes_back_upon_its_model(tmp_path: Path, ingot: Callable[..., Any]) -> None:
    """Over the command line: the model under it and the adapter apart, then both imported as one."""
    export_hf(_at("base"), tmp_path / "base", "float32", False, print)
    written = ingot("export", _at("tuned"), tmp_path / "adapter", "--to", "peft", "--json", cwd=Path.cwd())
    assert written.returncode == 0, written.stderr
    assert set(json.loads(written.stdout)["files"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert "the base model of the adapter is base; `ingot export" in written.stderr
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    arguments = ("import", f"hf:{tmp_path / 'base'}", "--adapter", tmp_path / "adapter", "--out", tmp_path / "runs")
    brought = ingot(*arguments, "--json", cwd=tmp_path)
    assert brought.returncode == 0, brought.stderr
    ours, back = _weights(_at("tuned")), _weights(Path(json.loads(brought.stdout)["directory"]))
    assert ours.keys() == back.keys()
    assert max(float((ours[n] - back[n]).abs().max()) for n in ours) < 1e-6
    for n, t in _weights(_at("base")).items():
        assert torch.equal(t, ours[n]) == ("attention." not in n and "ffn." not in n)


def test_embedding_and_head_are_trained_whole_beside_it(tmp_path: Path) -> None:
    """Saved, counted, held by penalties, carried out and in as the corrections are; to the bit, for they are whole."""
    tables, base = {"embedding.weight", "head.weight"}, _weights(_at("base"))
    saved = _tensors(_at("whole") / "checkpoints" / "00000004")
    assert {n for n in saved if "lora_" not in n} == {"guard.losses"} | {f"model.{n}" for n in tables} | {
        f"optim.{n}.{m}" for n in tables for m in ("step", "exp_avg", "exp_avg_sq")
    }
    trained, count = _weights(_at("whole")), _result("whole")
    corrections = 2 * sum(2 * (i + o) for i, o in [(16, 16)] * 4 + [(16, 64)] * 2 + [(64, 16)])
    assert count["trained_parameters"] == corrections + 2 * 16 * count["vocab"]
    assert count["parameters"] == _result("base")["parameters"] + count["trained_parameters"]
    events = [e for e in read_events(_at("whole") / "metrics.jsonl") if e["event"] == "step"]
    for name in ("penalty/ewc", "penalty/l2sp"):
        assert events[0][name] == 0 < events[-1][name]
    away = sum(float((trained[n] - base[n]).double().square().sum()) for n in base)
    on_tables = sum(float((trained[n] - base[n]).double().square().sum()) for n in tables)
    assert on_tables > 0.05 * away, "the control: the pull would be far less without them"
    assert 0.1 / 2 * (away - on_tables) < events[-1]["penalty/l2sp"] < 0.1 / 2 * away * 1.5
    export_peft(_at("whole"), tmp_path / "adapter", "float32", False, print)
    model = load_model(_at("base"), print, device="cpu").model
    peft.merge(tmp_path / "adapter", model)
    for n, p in model.named_parameters():
        assert torch.equal(p, trained[n]) if n in tables else torch.allclose(p, trained[n], rtol=0, atol=1e-6)
        assert torch.equal(p, base[n]) == n.endswith("norm.weight")


def test_an_adapter_upon_an_import_names_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    export_hf(_at("base"), tmp_path / "base", "float32", False, print)
    for file in ("old.txt", "pairs.jsonl"):
        (tmp_path / file).write_text(Path(file).read_text())
    text = RECIPE.replace('init = "base"', 'init = "hf:base"').replace('model = "base"', 'model = "hf:base"')
    (tmp_path / "small.toml").write_text(text.split("[stage.again]")[0])
    monkeypatch.chdir(tmp_path)
    for name in load_graph(Path("small.toml"), ["stage.tuned.duration='1 steps'"], Path("runs")).needed(["tuned"]):
        _run(tmp_path, name.name)
    export_peft(_at("tuned"), tmp_path / "adapter", "bfloat16", True, said.append)
    assert not said
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert {t.dtype for t in _tensors(tmp_path / "adapter").values()} == {torch.bfloat16}


def test_an_adapter_upon_the_stage_of_a_run_names_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT cannot load the directory of a stage."""
    said: list[str] = []
    stage = _at("base").absolute()
    for file in ("old.txt", "pairs.jsonl"):
        (tmp_path / file).write_text(Path(file).read_text())
    text = RECIPE.replace('init = "base"', f'init = "{stage}"').replace('model = "base"', f'model = "{stage}"')
    (tmp_path / "small.toml").write_text(text.split("[stage.again]")[0])
    monkeypatch.chdir(tmp_path)
    for name in load_graph(Path("small.toml"), ["stage.tuned.duration='1 steps'"], Path("runs")).needed(["tuned"]):
        _run(tmp_path, name.name)
    export_peft(_at("tuned"), tmp_path / "adapter", "float32", False, said.append)
    assert "`ingot export " in said[0]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] is None


def test_what_is_no_adapter_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"base: found no adapter, expected a stage with one; .*--to hf"):
        export_peft(_at("base"), tmp_path / "no", "float32", False, print)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "adapter_config.json").write_text("{}")
    export_hf(_at("base"), tmp_path / "base", "float32", False, print)
    with pytest.raises(UserError, match=r"half: found adapter_config\.json, expected .*as PEFT writes them"):
        require_files([import_graph(f"hf:{tmp_path / 'base'}", tmp_path, adapter=str(tmp_path / "half"))], [])
    with pytest.raises(UserError, match=r"contains an adapter and no model.*add a stage with kind = \"import\""):
        require_files([import_graph(f"hf:{tmp_path / 'half'}", tmp_path)], [])


def test_the_content_of_an_adapter_is_in_the_key_and_its_place_is_not(tmp_path: Path) -> None:
    export_hf(_at("base"), tmp_path / "base", "float32", False, print)
    for name in ("one", "two"):
        export_peft(_at("tuned"), tmp_path / name, "float32", False, print)

    def key(adapter: str | None) -> str:
        where = str(tmp_path / adapter) if adapter else None
        return list(import_graph(f"hf:{tmp_path / 'base'}", tmp_path, adapter=where).nodes.values())[-1].key

    assert key("one") == key("two") != key(None)
    before = key("two")
    config = tmp_path / "two" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 5'))
    assert key("two") != before


def test_an_interrupted_stage_goes_on_to_the_bit(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout in the model and in the adapter, interrupted between two checkpoints."""
    original = Engine.step

    def step(self: Engine, raw: Any) -> Any:
        if self.state["step"] == 5:
            raise InterruptedError
        return original(self, raw)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", step)
        with pytest.raises(InterruptedError):
            _run(work, "tuned", to="killed")
    stopped = work / "runs" / "stages" / "killed"
    assert [p.name for p in sorted((stopped / "checkpoints").glob("0*"))] == ["00000002", "00000004"]
    _run(work, "tuned", to="killed")
    for name in ("00000008", "best"):
        assert _same(_tensors(stopped / "checkpoints" / name), _tensors(_at("tuned") / "checkpoints" / name))


def test_the_frozen_model_is_not_loaded_a_second_time(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of a penalty is what lies under the adapter: the same memory, and the same numbers."""
    seen: list[Engine] = []
    original = Engine.__init__

    def init(self: Engine, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        seen.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "__init__", init)
        _run(work, "held", to="seen")
        patch.setattr(build, "companion_is_model", lambda stage: False)
        apart = _run(work, "held", to="apart")
    shared, loaded = ({p.data_ptr() for c in e.companions.values() for p in c.parameters()} for e in seen)
    assert len(seen[0].companions) == 1
    assert shared == {p.data_ptr() for p in seen[0].model.parameters()}
    assert not loaded & {p.data_ptr() for p in seen[1].model.parameters()}
    assert _same(_tensors(apart / "checkpoints" / "00000004"), _tensors(_at("held") / "checkpoints" / "00000004"))


def test_penalties_hold_on_to_the_merged_weights() -> None:
    events = [e for e in read_events(_at("held") / "metrics.jsonl") if e["event"] == "step"]
    for name in ("penalty/ewc", "penalty/l2sp", "penalty/kl"):
        assert events[-1][name] > 0, name
        if name != "penalty/kl":  # dropout is part of that one
            assert events[0][name] == 0, name
    moved, start = _weights(_at("held")), _weights(_at("base"))
    away = sum(float((moved[n] - start[n]).double().square().sum()) for n in start)
    assert 0 < events[-1]["penalty/l2sp"] < 0.1 / 2 * away * 4  # of the step before the last update
    assert {n for n in start if not torch.equal(moved[n], start[n])} == {
        f"layers.{i}.{role}.weight" for i in (0, 1) for role in ("attention.q", "ffn.gate", "ffn.up", "ffn.down")
    }


def test_2_5_dpo_upon_an_adapter_starts_at_ln_2_with_one_copy_of_the_weights() -> None:
    losses = [e["loss_nats"] for e in read_events(_at("prefer") / "metrics.jsonl") if e["event"] == "step"]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[1] != losses[0]


def test_what_lies_under_an_adapter_is_kept_and_missed(work: Path, tmp_path: Path) -> None:
    """No link may lead to it any more, and it is no orphan; where it was deleted by hand, one sentence says so."""
    shutil.copytree(work, tmp_path / "w", symlinks=True)
    root = tmp_path / "w" / "runs"
    base = (root / "small" / "base").resolve()
    (root / "small" / "base").unlink()
    assert base not in {o.path.resolve() for o in orphans(root)}
    shutil.rmtree(base)
    with pytest.raises(
        UserError, match=r"found no directory .*, expected 'base', the base model of its adapter; run the recipe again"
    ) as caught:
        load_model(root / "small" / "again", print, device="cpu")
    assert "\n" not in str(caught.value)


def test_an_adapter_needs_a_model() -> None:
    table = {"data": {"a": 1.0}, "tokenizer": "t", "model": {"depth": 2}, "duration": "9 steps", "adapter": "lora"}
    with pytest.raises(ValueError, match="found adapter without init, expected a trained model to adapt"):
        TrainSettings.model_validate(table)
