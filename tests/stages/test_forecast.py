"""F1, F2, F5, C7, D5, D15: what a train stage will be, before it runs."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.core.errors import UserError
from ingot.core.recipe import load_recipe
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.config import FAMILIES, ModelConfig, ModelSettings
from ingot.model.transformer import Transformer
from ingot.optim.average import Average
from ingot.optim.groups import decay_counts
from ingot.optim.optimizers import build
from ingot.optim.settings import OptimSettings
from ingot.plan.flops import training_flops_per_token
from ingot.plan.machine import GPUS, Device
from ingot.stages.kinds import RECIPE_KINDS
from ingot.stages.training.forecast import ForecastInputs, forecast, moments, parameters
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import AssumedSize
from ingot.train.execution import Execution

CPU = Device("CPU", 16 * 10**9, half="bf16")


pytestmark = pytest.mark.usefixtures("without_cpu_kernels")  # PyTorch's own memory, whatever this machine has
BOTH = ("embedding", "head")
SMALL = {
    "data": {"text": 1.0},
    "tokenizer": "bpe",
    "model": {"depth": 2, "width": 64, "context": 64},
    "batch": 8,
    "duration": "100 steps",
}


def _shipped(name: str) -> tuple[TrainSettings, int]:
    """The stage `base` of a shipped recipe, and its vocabulary."""
    stages = load_recipe(Path(str(files("ingot.recipes") / name)), [], RECIPE_KINDS).stages
    base = stages["base"][1]
    assert isinstance(base, TrainSettings)
    return base, stages["bpe"][1].vocab  # type: ignore[attr-defined]


def _told(settings: TrainSettings, vocab: int = 300, **known: object) -> dict:
    assert settings.model
    return forecast(settings, replace(ForecastInputs(settings.model.resolve(vocab), CPU), **known))


def _small(**changes: object) -> TrainSettings:
    return TrainSettings.model_validate(SMALL | changes)


def test_f5_llama_7b() -> None:
    settings, vocab = _shipped("llama-7b.toml")
    told = _told(settings, vocab, device=GPUS["h100"])
    assert told["parameters"]["total"] == 7_499_681_792
    assert round(told["parameters"]["total"] / 1e9, 2) == 7.50
    assert told["parameters"]["parts"]["embedding"] == told["parameters"]["parts"]["head"] == 128_000 * 4096
    assert 512 * 4096 == 2_097_152
    assert told["length"]["steps"] == 1_000_000
    assert told["length"]["tokens"] == 2_097_152_000_000
    (phase,) = told["phases"]
    assert phase["peak_lr"] == 3e-4
    assert phase["last_lr"] == pytest.approx(3e-5)
    assert phase["first_lr"] == pytest.approx(3e-4 / 2000)
    assert told["memory"]["weights"] == 4 * 7_499_681_792
    assert told["memory"]["optimizer"] == 8 * 7_499_681_792


def test_f2_d9_activations_of_70B() -> None:
    """Source 002: 91 GB for a row of 4,096, and 429 GB more without fused attention."""
    large = {"depth": 80, "width": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "context": 4096}
    forecasts = [_told(_small(model=large, batch=8, loop={"micro_batch": rows}), 32_000) for rows in (1, 2)]
    one, two = (forecast["published"] for forecast in forecasts)
    assert one["activations"] / 1e9 == pytest.approx(91, abs=0.5)
    assert one["attention"] / 1e9 == pytest.approx(429, abs=1)
    assert two == {name: 2 * size for name, size in one.items()}


def _tuned(config: ModelConfig, device: Device, **changes: object) -> dict:
    table = {"data": {"text": 1.0}, "init": "base", "duration": "100 steps", "batch": 16, "loop": {"micro_batch": 1}}
    return forecast(TrainSettings.model_validate(table | changes), ForecastInputs(config, device))


def test_e6_7b_with_lora_fits_24_GB_and_all_of_it_does_not() -> None:
    llama = ModelSettings(depth=32, width=4096, heads=32, ffn=11_008, context=1024).resolve(32_000)
    told = _tuned(llama, GPUS["rtx4090"], adapter={"kind": "lora", "rank": 16})
    memory, counts = told["memory"], told["parameters"]
    trained = 32 * 16 * (4 * 8192 + 3 * (4096 + 11_008))
    assert counts["parts"]["adapter"] == counts["trained"] == counts["undecayed"] == trained == 39_976_960
    assert counts["total"] == 6_738_415_616 + trained
    bf16 = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    assert memory["weights"] == 2 * bf16 + 4 * (6_738_415_616 - bf16) + 4 * trained
    assert pytest.approx(13.5e9, rel=0.002) == 2 * 6_738_415_616
    assert memory["weights"] == pytest.approx(13.5e9, rel=0.06)  # tables, norms and the adapter are fp32
    assert (memory["gradients"], memory["optimizer"]) == (4 * trained, 8 * trained)
    assert memory["total"] < memory["available"] == 24 * 10**9
    whole = _tuned(llama, GPUS["rtx4090"])["memory"]
    assert whole["total"] > 4 * 24 * 10**9
    assert told["length"]["flops"] < 0.7 * _tuned(llama, GPUS["rtx4090"])["length"]["flops"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "tied", "whole"),
    [("adamw", True, ()), ("sgd", True, ()), ("muon", True, ()), ("muon", True, BOTH), ("adamw", False, BOTH)],
)
def test_e6_the_state_of_an_adapter_is_that_of_its_model_and_optimizer(
    kind: str, tied: bool, whole: tuple[str, ...], precision: str
) -> None:
    """Bytes of parameters and moments of a real adapted model, as training holds them."""
    config = ModelSettings(depth=2, width=64, family="gpt2", context=64, tied=tied).resolve(300)
    table = {"kind": "dora", "rank": 4, "targets": ("attention.*", "down"), "modules_to_save": whole}
    adapter = AdapterSettings.model_validate(table)
    optim = OptimSettings.model_validate({"kind": kind, "lr": 0.1, "ema": 0.9 * tied})
    told = _tuned(config, CPU, adapter=adapter, optim=optim, precision=precision)
    model = Transformer(config)
    lora.add_adapters(model, adapter, 0)
    lora.cast_frozen(model, torch.bfloat16 if precision == "bf16" else torch.float32)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    kept = build(trained, optim, 0.1).tensors() | Average(trained, optim.ema).tensors()
    assert told["memory"]["weights"] == sum(p.nbytes for p in model.parameters())
    assert told["memory"]["gradients"] == sum(p.nbytes for p in trained.values())
    assert told["memory"]["optimizer"] == sum(t.nbytes for t in kept.values() if t.dim() > 0)
    assert told["parameters"]["trained"] == sum(p.numel() for p in trained.values())
    tables = 64 * 300 * (2 - tied) * bool(whole)
    assert told["parameters"]["decayed"] == decay_counts(trained, optim)["decayed_parameters"] == tables
    bare = _tuned(config, CPU, adapter={**table, "modules_to_save": ()}, optim=optim, precision=precision)
    flops = told["length"]["flops"] - bare["length"]["flops"]
    assert flops == (2 * 64 * 300 * 100 * 16 * 64 if whole else 0), "the head's gradient; the embedding is looked up"


def test_a_pattern_that_fits_nothing_is_said_by_the_plan() -> None:
    config = ModelSettings(depth=2, family="gpt2").resolve(300)
    with pytest.raises(UserError, match=r"adapter\.targets: 'gate' matches no matrix"):
        _tuned(config, CPU, adapter={"targets": ["gate"]})


def test_f5_d2_d3_the_optimizers_numbers_of_the_full_sizes() -> None:
    for name in ("llama-7b.toml", "gpt2-124m.toml"):
        optim = _shipped(name)[0].optim
        assert (optim.kind, optim.betas, optim.eps, optim.weight_decay) == ("adamw", (0.9, 0.95), 1e-8, 0.1)
        assert (optim.warmup, optim.min_ratio, optim.clip) == (2000, 0.1, 1.0)


def test_f5_the_feed_forward_in_use_has_7_52B() -> None:
    """8/3 x 4,096 = 10,922.67: 10,944 is the next multiple of 64, 11,008 that of 256, and Llama's."""
    settings, vocab = _shipped("llama-7b.toml")
    assert settings.model
    assert settings.model.ffn == 10_944
    default = settings.model.model_copy(update={"ffn": None}).resolve(vocab)
    assert (default.ffn, default.parameters) == (11_008, 7_524_847_616)


def test_f5_source_error_d_ff_10952_is_no_multiple_of_64_and_counts_alike() -> None:
    settings, vocab = _shipped("llama-7b.toml")
    assert settings.model
    theirs = settings.model.model_copy(update={"ffn": 10_952}).resolve(vocab)
    assert 10_952 % 64 != 0 == 10_944 % 64
    assert round(theirs.parameters / 1e9, 2) == 7.50


@pytest.mark.parametrize(("ranks", "passes"), [(1, 128), (8, 16), (64, 2), (128, 1)])
def test_f5_c7_accumulation_is_derived_from_the_world_size(ranks: int, passes: int) -> None:
    settings, vocab = _shipped("llama-7b.toml")
    batch = _told(settings, vocab, ranks=ranks)["batch"]
    assert batch == {"rows": 512, "context": 4096, "micro_batch": 4, "accumulation": passes, "ranks": ranks}


def test_d13_the_shakespeare_recipe() -> None:
    """4 layers, 4 heads, d 128, T 64, B 64, 1e-3, 100 warmup, 5,000 steps of a cosine to 1e-4."""
    recipe = load_recipe(Path(str(files("ingot.recipes") / "shakespeare-char.toml")), [], RECIPE_KINDS)
    settings = recipe.stages["base"][1]
    assert isinstance(settings, TrainSettings)
    assert settings.model
    config = settings.model.resolve(65)
    assert (config.depth, config.heads, config.width, config.context) == (4, 4, 128, 64)
    assert (config.dropout, config.bias, recipe.run.seed) == (0.0, "none", 1337)
    optim = settings.optim
    assert (optim.betas, optim.weight_decay, optim.clip) == ((0.9, 0.99), 0.1, 1.0)
    told = _told(settings, 65)
    assert told["batch"]["rows"] * told["batch"]["context"] == 4096
    assert told["length"]["steps"] == 5000
    (phase,) = told["phases"]
    assert [phase[f"{at}_lr"] for at in ("first", "peak", "last")] == pytest.approx([1e-5, 1e-3, 1e-4])


@pytest.mark.parametrize(("ranks", "passes"), [(1, 40), (4, 10), (8, 5)])
def test_c7_gpt2_124m(ranks: int, passes: int) -> None:
    settings, vocab = _shipped("gpt2-124m.toml")
    told = _told(settings, vocab, ranks=ranks)
    assert told["parameters"]["total"] == 124_439_808
    batch = told["batch"]
    assert batch["rows"] * batch["context"] == 491_520
    assert (batch["micro_batch"], batch["accumulation"]) == (12, passes)
    assert told["length"]["tokens"] == 600_000 * 491_520


def test_d5_gpt2_124m_has_the_rates_of_600k_steps() -> None:
    settings, vocab = _shipped("gpt2-124m.toml")
    (phase,) = _told(settings, vocab)["phases"]
    rates = (phase["first_lr"], phase["peak_lr"], phase["last_lr"])
    assert rates == pytest.approx((6e-4 / 2000, 6e-4, 6e-5))


def test_f1_operations_of_the_run() -> None:
    told = _told(_small())
    config = ModelSettings.model_validate(SMALL["model"]).resolve(300)
    assert told["length"]["flops"] == training_flops_per_token(config) * 100 * 8 * 64
    assert told["length"]["gpu_hours"] is None
    fast = _told(_small(), device=GPUS["a100"])["length"]
    assert fast["gpu_hours"] == pytest.approx(fast["flops"] / (0.4 * 312e12) / 3600)


@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_d15_decayed_and_undecayed_are_the_optimizers(family: str, embeddings: bool) -> None:
    config = ModelSettings(family=family, depth=2, width=64, context=32).resolve(300)  # type: ignore[arg-type]
    optim = OptimSettings(decay_embeddings=embeddings)
    with torch.device("meta"):
        real = decay_counts(dict(Transformer(config).named_parameters()), optim)
    told = parameters(config, optim)
    assert (told["decayed"], told["undecayed"]) == (real["decayed_parameters"], real["undecayed_parameters"])
    assert told["decayed"] + told["undecayed"] == sum(told["parts"].values()) == config.parameters


@pytest.mark.parametrize(
    "optim",
    [{"kind": "adamw"}, {"kind": "adam"}, {"kind": "sgd", "lr": 0.1}, {"kind": "sgd", "lr": 0.1, "momentum": 0.0},
     {"kind": "muon"}, {"kind": "lion"}],
    ids=lambda o: "-".join(map(str, o.values())),
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_d4_numbers_that_an_optimizer_keeps(family: str, optim: dict) -> None:
    config = ModelSettings(family=family, depth=2, width=64, context=32).resolve(300)  # type: ignore[arg-type]
    settings = OptimSettings.model_validate(optim)
    with torch.device("meta"):
        model = Transformer(config)
    kept = build(dict(model.named_parameters()), settings, 0.1).tensors()
    assert moments(config, settings) == sum(t.numel() for t in kept.values() if t.dim() > 0)


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("adapted", [False, True])
def test_d4_bytes_that_an_optimizer_keeps(adapted: bool, family: str, state: str) -> None:
    if state == "8bit":
        pytest.importorskip("torchao")
    config = ModelSettings(family=family, depth=2, width=64, context=32).resolve(300)  # type: ignore[arg-type]
    optim = OptimSettings.model_validate({"state": state, "ema": 0.9})
    model = Transformer(config)
    adapter = AdapterSettings(rank=64, modules_to_save=("embedding",)) if adapted else None
    if adapter:
        lora.add_adapters(model, adapter, 0)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = build(trained, optim, 0.1).tensors() | Average(trained, optim.ema).tensors()
    told = _tuned(config, CPU, adapter=adapter, optim=optim) if adapter else _small_state(family, optim)
    assert told["memory"]["optimizer"] == sum(t.nbytes for t in kept.values() if t.dim() > 0)


def _small_state(family: str, optim: OptimSettings) -> dict:
    return _told(_small(model={"family": family, "depth": 2, "width": 64, "context": 32}, optim=optim))


def test_d9_checkpointing_lowers_the_forecast() -> None:
    model = {"depth": 16, "width": 64, "context": 64}
    modes = ("none", "selective", "sqrt", "full")
    memory = [_told(_small(model=model, loop={"checkpointing": mode}))["memory"] for mode in modes]
    sums = [m["activations"] + m["attention"] + m["casts"] + m["recomputed"] for m in memory]
    assert sums == sorted(sums, reverse=True)
    assert memory[0]["recomputed"] == 0
    assert all(m["total"] == sum(n for name, n in m.items() if name not in ("total", "available")) for m in memory)


def test_f2_memory_adds_up_and_follows_the_micro_batch() -> None:
    one, two = (_told(_small(loop={"micro_batch": n}, precision="fp32"))["memory"] for n in (1, 2))
    assert one["total"] == sum(n for name, n in one.items() if name not in ("total", "available"))
    assert two["activations"] == 2 * one["activations"]
    assert {n: one[n] for n in ("weights", "gradients", "optimizer")} == {
        n: two[n] for n in ("weights", "gradients", "optimizer")
    }
    assert one["casts"] == 0
    assert _told(_small(precision="bf16"))["memory"]["casts"] > 0
    assert _told(_small(precision="fp64"))["memory"]["weights"] == 2 * one["weights"]


def test_a_window_and_isolated_documents_cost_masks() -> None:
    gpu = GPUS["a100"]
    plain = _told(_small(), device=gpu)["memory"]["attention"]
    window = _told(_small(model={**SMALL["model"], "window": 16}), device=gpu)["memory"]["attention"]
    isolated = _told(_small(loop={"micro_batch": 4}), device=gpu, isolated=True)["memory"]["attention"]
    assert plain == 0
    assert window == 2 * 64 * 64 * 2  # a T x T mask in bf16, in each of two layers
    assert isolated == 4 * window


@pytest.mark.parametrize(
    ("device", "precision", "attention"),
    [
        (CPU, "bf16", "plain"),
        (replace(CPU, half=None), "fp32", "fused"),
        (GPUS["a100"], "bf16", "fused"),
        (GPUS["v100"], "fp16", "fused"),
    ],
    ids=["cpu with bf16", "cpu", "gpu", "gpu without bf16"],
)
def test_d7_what_the_device_decides(device: Device, precision: str, attention: str) -> None:
    choice = _told(_small(), device=device)["execution"]
    assert (choice["precision"], choice["attention"]) == (precision, attention)


def test_the_cpu_backend_keeps_less_and_is_not_for_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = pytest.importorskip("ingot.backends.estimate")

    def told(kernels: bool, **other: Any) -> dict[str, Any]:
        monkeypatch.setattr(estimate, "_has_instructions", lambda precision: kernels)
        return _told(_small(**other))

    plain, ours = told(False)["memory"], told(True)["memory"]
    assert ours["activations"] < plain["activations"]
    assert (ours["attention"], ours["casts"]) == (0, 0)
    assert told(True)["execution"]["attention"] == "fused"
    for other in ({"loop": {"backend": "torch"}}, {"model": {**SMALL["model"], "family": "gpt2"}}):
        assert told(True, **other) == told(False, **other)
    assert told(True, precision="fp64") == told(False, precision="fp64")


def test_epochs_are_known_with_the_data_and_not_before() -> None:
    assert _told(_small())["length"]["epochs"] is None
    unknown = _told(_small(duration="2 epochs"))
    assert "epoch" in unknown["unknown"]
    assert "length" not in unknown
    assert unknown["parameters"]["total"] > 0
    extent = AssumedSize(row_targets=60.0, targets=60 * 400, rows=400)
    told = _told(_small(duration="2 epochs"), sizes=lambda name, context: extent)
    assert told["length"]["steps"] == 2 * 400 / 8
    assert told["length"]["epochs"] == {"text": pytest.approx(2.0)}
    assert told["length"]["tokens"] == 2 * 60 * 400


def test_the_plan_says_why_a_default_batch_has_its_rows() -> None:
    def told(**table: object) -> dict[str, Any]:
        few = AssumedSize(row_targets=64.0, targets=64 * 250, rows=250)
        settings = {name: value for name, value in (SMALL | table).items() if value is not None}
        batch = _told(TrainSettings.model_validate(settings), sizes=lambda name, context: few)["batch"]
        return {"rows": batch["rows"], "why": batch.get("why")}

    assert told(batch=8)["why"] is None
    short = told(batch=None, duration="1 epoch")
    assert short["rows"] == 2
    assert "100 updates" in str(short["why"])
    assert told(batch=None, duration="10 steps")["why"] == "512 x depth^2 tokens by default"


def test_rows_are_as_long_as_a_phase_has_them_whatever_the_model_can_do() -> None:
    tuned = {"data": {"text": 1.0}, "init": "base", "batch": 8, "duration": "10 steps", "loop": {"micro_batch": 2}}
    config = ModelSettings(family="gpt2", depth=2, width=64, context=4096).resolve(300)
    short = TrainSettings.model_validate(tuned | {"phases": [{"name": "all", "fraction": 1.0, "context": 128}]})
    told = [forecast(TrainSettings.model_validate(s), ForecastInputs(config, CPU)) for s in (tuned, short)]
    assert [t["batch"]["context"] for t in told] == [4096, 128]
    assert told[0]["memory"]["activations"] == 32 * told[1]["memory"]["activations"]
    for same in ("generation", "parameters"):
        assert told[0][same] == told[1][same]
    assert told[0]["memory"]["weights"] == told[1]["memory"]["weights"] == 4 * config.parameters


def test_a_phase_of_shorter_rows_has_more_of_them_at_once() -> None:
    """As the engine splits it: the micro-batch is for the longest rows, and a pass holds no more tokens than that."""
    phases = [{"name": "short", "fraction": 0.5, "context": 16, "batch": 64}, {"name": "long", "fraction": 0.5}]
    batch = _told(_small(loop={"micro_batch": 4}, batch=8, phases=phases))["batch"]
    assert batch == {"rows": 64, "context": 16, "micro_batch": 16, "accumulation": 4, "ranks": 1}
    execution = Execution("cpu", "fp32", 1, 4, "test", context=64)
    assert execution.rows(16) == batch["micro_batch"]


@pytest.mark.parametrize(
    ("objective", "rows"),
    [
        ({"kind": "grpo", "group": 6, "reward": "r.py:f"}, 48),
        ({"kind": "ppo", "beta": 0, "reward": "r.py:f"}, 8),
        ("reward", 16),
    ],
)
def test_a_pass_holds_both_sides_of_a_pair_and_all_samples_of_a_prompt(objective: object, rows: int) -> None:
    """8 are drawn a step; what they become is one pass, as long as it holds no more tokens than any other."""
    batch = _told(_small(objective=objective))["batch"]
    assert batch == {"rows": rows, "context": 64, "micro_batch": rows, "accumulation": 1, "ranks": 1}
    assert _told(_small(objective=objective, loop={"micro_batch": 4}))["batch"]["accumulation"] == rows // 4


def test_operations_are_of_every_row_that_is_trained_on_each_time() -> None:
    """Both sides of a pair; every sample of a prompt, in every epoch over them."""

    def flops(objective: object) -> int:
        return _told(_small(objective=objective))["length"]["flops"]

    once = flops({"kind": "ppo", "beta": 0, "reward": "r.py:f", "epochs": 1})
    assert flops({"kind": "ppo", "beta": 0, "reward": "r.py:f"}) == 4 * once
    assert flops({"kind": "grpo", "group": 6, "epochs": 2, "reward": "r.py:f"}) == 12 * once
    assert flops("reward") == 2 * once


def test_b9_c8_phases_and_a_ramp_have_their_own_figures() -> None:
    phases = [
        {"name": "first", "fraction": 0.75, "context": 32},
        {"name": "last", "fraction": 0.25, "data": {"text": 0.5, "code": 0.5}, "lr": 1e-4},
    ]
    told = _told(_small(batch={"start": 2, "to": 8, "over": "50 steps"}, phases=phases))
    first, last = told["phases"]
    assert (first["first_step"], first["last_step"], last["first_step"], last["last_step"]) == (1, 75, 76, 100)
    assert (first["context"], last["context"]) == (32, 64)
    assert (first["rows"], last["last_rows"]) == (2, 8)
    assert last["data"] == {"code": 0.5, "text": 0.5}
    assert told["curve"]["rows"][0] == 2 < told["curve"]["rows"][-1] == 8
    assert told["batch"]["rows"] == 8
    config = ModelSettings.model_validate(SMALL["model"]).resolve(300)
    short = config.model_copy(update={"context": 32})
    rows = [told["phases"][i]["tokens"] / c for i, c in ((0, 32), (1, 64))]
    assert told["length"]["flops"] == pytest.approx(
        training_flops_per_token(short) * rows[0] * 32 + training_flops_per_token(config) * rows[1] * 64
    )


def test_a_reward_model_has_no_logits() -> None:
    """Only what the last block's backward pass needs is counted in their place, so the vocabulary does not matter."""
    logits = [_told(_small(objective="reward"), vocab)["memory"]["logits"] for vocab in (300, 30_000)]
    assert logits[0] == logits[1]
    assert _told(_small(), 30_000)["memory"]["logits"] > 10 * logits[0]
