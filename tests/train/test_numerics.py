"""Precisions: what the hardware decides, what fp16 needs, and what none of them changes (D7)."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ingot.core.errors import Notice, UserError
from ingot.core.events import read_events, stable
from ingot.data.batches import Batch
from ingot.model.backend import TORCH
from ingot.objectives.lm import LanguageModel
from ingot.optim.groups import clip_, global_norm
from ingot.optim.settings import OptimSettings
from ingot.train import execution, loss_scaling
from ingot.train.engine import Engine
from ingot.train.execution import choose
from ingot.train.objective import Term
from ingot.train.settings import LoopSettings
from tests.train.test_engine import _engine, _gradient, _ragged, _run, _text

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


# -- formats and memory ----------------------------------------------------------------------------------------------


def test_D7_formats() -> None:
    """fp16 1/5/10 bits, up to 65,504, down to 6e-8; bf16 1/8/7; tf32 19 bits: fp32's exponent, fp16's fraction."""
    fp16, bf16, fp32 = (torch.finfo(d) for d in (torch.float16, torch.bfloat16, torch.float32))
    fraction = {f.dtype: round(-math.log2(f.eps)) for f in (fp16, bf16, fp32)}
    exponent = {f.dtype: f.bits - 1 - fraction[f.dtype] for f in (fp16, bf16, fp32)}
    assert (exponent["float16"], fraction["float16"]) == (5, 10)
    assert (exponent["bfloat16"], fraction["bfloat16"]) == (8, 7)
    assert 1 + exponent["float32"] + fraction["float16"] == 19
    assert fp16.max == 65_504
    assert fp16.smallest_normal * fp16.eps == pytest.approx(6e-8, rel=0.01)
    assert torch.tensor(2.9e-8).half() == 0 < torch.tensor(6e-8).half()
    assert bf16.smallest_normal == fp32.smallest_normal


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_D7_source_error_half_precision_halves_no_state(tmp_path: Path, precision: str) -> None:
    """16 B a parameter with Adam in every precision: weight, gradient and two moments stay fp32."""
    engine = _engine(tmp_path, precision)
    engine.gradients(_ragged())
    saved = engine.training_state.tensors()
    held = [tensor for name, tensor in saved.items() if not name.startswith("guard.")]
    held += [p.grad for p in engine.trained.values() if p.grad is not None]
    assert {t.dtype for t in held} == {torch.float32}
    parameters = sum(p.numel() for p in engine.trained.values())
    counters = 4 * len(engine.trained)  # Adam's step numbers
    assert sum(t.numel() * t.itemsize for t in held) - counters == 16 * parameters


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_D7_matrices_are_multiplied_in_16_bits_and_activations_halve(tmp_path: Path, precision: str) -> None:
    engine = _engine(tmp_path, precision)
    seen = []
    engine.model.layers["0"].ffn.up.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    engine.gradients(_ragged())
    assert set(seen) == {HALF[precision]}
    assert HALF[precision].itemsize * 2 == torch.float32.itemsize


def test_D7_the_gradient_in_half_precision_is_that_of_full_precision_to_its_rounding(tmp_path: Path) -> None:
    batch, found = _ragged(), {}
    for precision in ("fp32", "bf16", "fp16"):
        found[precision] = _gradient(_engine(tmp_path, precision), batch)
    for precision, dtype in HALF.items():
        error = (found[precision] - found["fp32"]).norm() / found["fp32"].norm()
        assert 0 < error < 3 * torch.finfo(dtype).eps


# -- what the hardware decides ---------------------------------------------------------------------------------------


def _gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """A machine with such a GPU, on which torch can emulate bf16 as it can on all of them."""
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda *a: True)


@pytest.mark.parametrize(
    ("name", "capability", "precision"),
    [
        ("A100", (8, 0), "bf16"),
        ("H100", (9, 0), "bf16"),
        ("V100", (7, 0), "fp16"),
        ("T4", (7, 5), "fp16"),
        ("P100", (6, 0), "fp32"),
    ],
)
def test_D7_by_hardware(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], precision: str
) -> None:
    _gpu(monkeypatch, capability)
    chosen = choose(LoopSettings(), "auto", 64, 8)
    assert (chosen.device, chosen.precision) == ("cuda", precision), name
    assert f"{precision} (the GPU has" in chosen.summary()


def test_D7_source_error_is_bf16_supported_counts_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, (7, 5))
    assert torch.cuda.is_bf16_supported()
    assert choose(LoopSettings(), "auto", 64, 8).precision == "fp16"


@pytest.mark.parametrize(("real", "precision"), [(True, "bf16"), (False, "fp32")])
def test_D7_on_a_cpu(monkeypatch: pytest.MonkeyPatch, real: bool, precision: str) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: real)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    chosen = choose(LoopSettings(device="cpu"), "auto", 64, 8)
    assert chosen.precision == precision
    assert "matrix instructions" in chosen.summary()
    asked = choose(LoopSettings(device="cpu"), "bf16", 64, 8).reason
    assert asked == ("as set" if real else "as set, emulated and slow: the CPU has no bf16 matrix instructions")


def test_D7_tf32_is_asked_for_and_needs_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"precision: found 'tf32' on the CPU without tf32 units, expected an NVIDIA GPU"
    ):
        choose(LoopSettings(device="cpu"), "tf32", 64, 8)
    _gpu(monkeypatch, (7, 0))
    with pytest.raises(UserError, match="found 'tf32' on a GPU without tf32 units"):
        choose(LoopSettings(), "tf32", 64, 8)
    _gpu(monkeypatch, (8, 0))
    chosen = choose(LoopSettings(threads=torch.get_num_threads()), "tf32", 64, 8)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        replace(chosen, precision="fp32").prepare()
        assert torch.backends.cuda.matmul.fp32_precision == before
        chosen.prepare()
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert chosen.parameter_dtype == torch.float32


_DENORMAL = """
import torch
from ingot.train.execution import choose
from ingot.train.settings import LoopSettings

execution = choose(LoopSettings(device="cpu", threads=2), "fp32", 64, 8)
{prepare}
print(int(torch.full((1 << 20,), 1e-42).mul_(0.9).count_nonzero()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("prepare", "left"), [("execution.prepare()", 0), ("torch.set_num_threads(2)", 1 << 20)])
def test_moments_do_not_stay_denormal_on_any_thread(prepare: str, left: int) -> None:
    code = _DENORMAL.format(prepare=prepare)
    assert int(subprocess.check_output([sys.executable, "-c", code], text=True)) == left


# -- loss scaling ----------------------------------------------------------------------------------------------------


class _Tiny(LanguageModel):
    """A loss so small that its gradients are below fp16's range, like a mean over 100M tokens."""

    weight = 1e-8

    def loss(self, out, batch, ctx):
        (term,) = super().loss(out, batch, ctx).values()
        return {"lm": Term(term.sum, term.unit, self.weight)}


def _tiny(path: Path, precision: str, scale: float | None = None) -> Engine:
    engine = _engine(path, precision, steps=30)
    plan = replace(engine.plan, optim=OptimSettings(eps=1e-20, weight_decay=0))
    engine = Engine(engine.model, _Tiny(), plan, engine.execution, engine.mesh, path)
    if scale is not None:
        engine.state["loss_scale"] = scale
    return engine


def _of_matrices(engine: Engine, batch: Batch) -> list[torch.Tensor]:
    """Gradients of the matrices in blocks; embedding and norms get one through the stream, which is fp32."""
    engine.gradients(batch)
    return [p.grad for n, p in engine.named.items() if n.startswith("layers.") and p.dim() == 2 and p.grad is not None]


def test_D7_an_underflow_that_scaling_cures(tmp_path: Path) -> None:
    """Unscaled, no matrix gets a gradient in fp16, so little is learned; scaled, it is fp32's to rounding."""
    batch = _ragged()
    assert not any(g.any() for g in _of_matrices(_tiny(tmp_path, "fp16", scale=1.0), batch))
    right = _gradient(_tiny(tmp_path, "fp32"), batch)
    for scale in (1024.0 * 64, 1024.0 * 1024):
        found = _gradient(_tiny(tmp_path, "fp16", scale), batch)
        assert (found - right).norm() < 0.05 * right.norm()
    losses = {}
    for name, precision, scale in (("fp32", "fp32", None), ("scaled", "fp16", None), ("unscaled", "fp16", 1.0)):
        engine = _tiny(tmp_path / name, precision, scale)
        losses[name] = [1e8 * float(engine.step(batch).loss) for _ in range(25)]
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.5
    assert losses["scaled"][-1] == pytest.approx(losses["fp32"][-1], abs=0.05)
    assert losses["unscaled"][-1] > losses["scaled"][-1] + 0.1


def test_D7_source_error_bf16_needs_no_scaler(tmp_path: Path) -> None:
    """000 and 002 put a GradScaler around bf16: the same tiny loss trains without one, and the engine has none."""
    batch = _ragged()
    for precision in ("bf16", "fp32", "fp64"):
        engine = _tiny(tmp_path, precision)
        losses = [1e8 * float(engine.step(batch).loss) for _ in range(25)]
        assert losses[-1] < losses[0] - 0.5
        assert (engine.state["loss_scale"], engine.state["loss_scale_steps"]) == (1.0, 0)


def test_D7_a_scale_of_1024(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """000's scale, on a loss of two millionths: nothing in fp16 without it, fp32's gradient with it."""
    monkeypatch.setattr(_Tiny, "weight", 2e-6)
    batch = _ragged()
    right = _gradient(_tiny(tmp_path, "fp32"), batch)
    assert not any(g.any() for g in _of_matrices(_tiny(tmp_path, "fp16", scale=1.0), batch))
    assert (_gradient(_tiny(tmp_path, "fp16", scale=1024.0), batch) - right).norm() < 0.05 * right.norm()


def test_D7_the_scale_halves_on_overflow_and_doubles_after_a_long_calm() -> None:
    assert loss_scaling.adjust(1024.0, 7, finite=False) == (512.0, 0)
    scale, steps = 1024.0, 0
    for _ in range(loss_scaling.GROWTH_STEPS - 1):
        scale, steps = loss_scaling.adjust(scale, steps, finite=True)
    assert (scale, steps) == (1024.0, 1999)
    assert loss_scaling.adjust(scale, steps, finite=True) == (2048.0, 0)


def test_D7_an_overflow_skips_the_update_and_the_step_goes_on(tmp_path: Path) -> None:
    batch, engine = _ragged(), _engine(tmp_path, "fp16")
    engine.state["loss_scale"], engine.state["loss_scale_steps"] = 2.0**30, 5
    before = {n: t.clone() for n, t in engine.training_state.tensors().items()}
    metrics = engine.step(batch)
    assert metrics.lost
    assert math.isfinite(metrics.loss)
    assert not math.isfinite(metrics.grad_norm)
    assert (engine.state["loss_scale"], engine.state["loss_scale_steps"]) == (2.0**29, 0)
    assert engine.state["step"] == 1
    assert engine.state["tokens"] == batch.counts()["token"]
    assert all(torch.equal(t, before[n]) for n, t in engine.training_state.tensors().items())
    while engine.step(batch).lost:
        pass
    assert engine.state["loss_scale"] < 2.0**29
    assert engine.state["loss_scale_steps"] == 1
    assert not torch.equal(engine.named["norm.weight"], before["model.norm.weight"])


def test_D7_what_is_not_the_scales_fault_stops_the_run(tmp_path: Path, make_store) -> None:
    """A broken loss, or an overflow at scale 1, is no reason to go on halving, and never reaches the weights."""
    engine = _engine(tmp_path, "fp16", micro=8)
    with torch.no_grad():
        engine.named["norm.weight"].fill_(math.nan)
    with pytest.raises(UserError, match="step 20: loss nan"):
        _run(engine, _text(make_store), tmp_path)
    huge = _engine(tmp_path / "b", "fp16", micro=8)
    huge.state["loss_scale"] = 1.0
    for p in huge.trained.values():
        p.register_hook(lambda g: g * math.inf)
    assert huge.step(_ragged()).lost
    assert huge.state["loss_scale"] == 1.0


def test_D6_source_error_clipping_scaled_gradients(tmp_path: Path) -> None:
    """000 clips before unscaling: a healthy gradient of norm below 1 then shrinks by the scale. Ours is untouched."""
    batch, engine = _ragged(), _engine(tmp_path, "fp16")
    engine.state["loss_scale"] = 1024.0
    engine.plan = replace(engine.plan, optim=OptimSettings(clip=100.0))
    true = _gradient(engine, batch)
    theirs = [true * 1024]
    clip_(theirs, 100.0, global_norm(theirs))
    assert (theirs[0] / 1024).norm() < 0.2 * true.norm()
    applied = []
    engine.optimizer.step = lambda lr, clip, norm, skipped: applied.append(  # type: ignore[method-assign]
        torch.cat([p.grad.flatten().double() for p in engine.trained.values() if p.grad is not None])
    )
    assert float(engine.step(batch).grad_norm) == pytest.approx(true.norm().item(), rel=1e-5)
    assert torch.equal(applied[0], true)


def test_D12_a_run_in_fp16_goes_on_to_the_bit_with_its_scale(tmp_path: Path, make_store) -> None:
    """Skipped steps are logged as such, counted, and no part of the curve; scale and counter are in the checkpoint."""
    source, options = _text(make_store), {"precision": "fp16", "micro": 8, "steps": 12, "save_every": 3, "log_every": 1}

    def engine(name: str) -> Engine:
        made = _engine(tmp_path / name, **options)
        made.state["loss_scale"] = 2.0**24
        return made

    straight = engine("a")
    final = _run(straight, source, tmp_path / "a")
    for stop in (2, 7):
        with pytest.raises(InterruptedError):
            _run(engine("b"), source, tmp_path / "b", stop_at=stop)
    again = engine("b")
    assert _run(again, source, tmp_path / "b") == final
    assert again.state == straight.state
    for (name, a), b in zip(
        straight.training_state.tensors().items(), again.training_state.tensors().values(), strict=True
    ):
        assert torch.equal(a, b), name
    logs = [[stable(e) for e in read_events(tmp_path / x / "metrics.jsonl")] for x in "ab"]
    assert sorted(map(str, logs[0])) == sorted(map(str, logs[1]))
    skipped = [e["step"] for e in logs[0] if e["event"] == "skipped"]
    assert skipped[:3] == [1, 2, 3]
    assert len(skipped) == straight.state["skipped_steps"] < 10
    assert [e["step"] for e in logs[0] if e["event"] == "step"] == [s for s in range(1, 13) if s not in skipped]


def test_D12_source_error_a_checkpoint_without_scale_best_loss_random_state_or_place(tmp_path: Path) -> None:
    """003 saves model, optimizer, iteration and a pickled config. Here the scale and the best loss are declared state;
    the place in the data and every random draw follow from the step and the seed, so there is nothing else to save.
    """
    engine = _engine(tmp_path, "fp16")
    engine.step(_ragged())
    engine.state["loss_scale"], engine.state["best_val"] = 512.0, 2.5
    engine.training_state.save()
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert not [f for f in os.listdir(path) if f.endswith((".pt", ".pkl", ".bin"))]
    other = _engine(tmp_path, "fp16")
    assert other.training_state.resume(lambda message: None)
    assert other.state == engine.state
    assert (other.state["loss_scale"], other.state["best_val"], other.state["step"]) == (512.0, 2.5, 1)
    torch.manual_seed(5)
    first = torch.get_rng_state()
    other.gradients(_ragged())
    after = torch.get_rng_state()
    torch.manual_seed(6)
    other.gradients(_ragged())
    assert torch.equal(torch.get_rng_state(), after)  # whatever the generator held before
    assert not torch.equal(first, after)


def test_D12_source_error_names_that_change_when_compiled(tmp_path: Path) -> None:
    """003 puts the compiled model in the model's place, and a checkpoint loads only where it is compiled again."""
    compiled_backend = pytest.importorskip("ingot.backends.compiled")
    theirs = torch.compile(torch.nn.Linear(2, 2), backend="eager").state_dict()
    assert set(theirs) == {"_orig_mod.weight", "_orig_mod.bias"}
    plain, compiled = _engine(tmp_path), _engine(tmp_path)
    compiled.model.backend = compiled_backend.CompiledBackend(TORCH, "cpu", depth=2, shape=(16, 12))
    assert compiled.training_state.tensors().keys() == plain.training_state.tensors().keys()


def test_D7_accumulation_is_the_same_in_fp16(tmp_path: Path) -> None:
    batch = _ragged()
    whole, split = (_gradient(_engine(tmp_path, "fp16", micro=m), batch) for m in (16, 4))
    assert (split - whole).norm() < 3 * torch.finfo(torch.float16).eps * whole.norm()


# -- choices of a run ------------------------------------------------------------------------------------------------


def test_cuda_graphs_are_a_choice_for_a_gpu_that_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not choose(LoopSettings(), "fp32", 64, 8).cuda_graphs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = {p: choose(LoopSettings(backend="torch"), p, 64, 8) for p in ("bf16", "fp16")}
    assert chosen["bf16"].cuda_graphs
    details = f"threads {torch.get_num_threads()}, micro-batch 8, backend torch, CUDA graphs"
    assert chosen["bf16"].summary() == f"cuda, bf16 (as set), {details}"
    assert not chosen["fp16"].cuda_graphs, "its loss scale is a number of the device"
    assert not choose(LoopSettings(cuda_graphs=False), "bf16", 64, 8).cuda_graphs


def test_D12_a_resumed_run_computes_as_it_began_and_explicit_settings_win(tmp_path: Path) -> None:
    path, settings = tmp_path / "execution.json", LoopSettings(device="cpu")
    chosen = choose(settings, "fp32", 64, 8)
    assert execution.resumed(path, chosen, settings) == chosen, "nothing was kept"
    assert not path.exists(), "`resumed` writes nothing"
    began = replace(
        chosen, precision="bf16", reason="by hardware", threads=1, micro_batch=3, backend="cpu", cuda_graphs=True
    )
    execution.write(path, began)
    assert execution.resumed(path, chosen, settings) == began
    explicit = LoopSettings(device="cpu", threads=2, micro_batch=5, backend="torch", cuda_graphs=False)
    again = execution.resumed(path, choose(explicit, "fp32", 64, 8), explicit)
    assert again == replace(began, threads=2, micro_batch=5, backend="torch", cuda_graphs=False)


def test_D12_a_run_of_a_larger_machine_resumes_with_the_cores_that_are_here(tmp_path: Path) -> None:
    settings = LoopSettings(device="cpu")
    chosen = choose(settings, "fp32", 64, 8)
    execution.write(tmp_path / "execution.json", replace(chosen, threads=10**6))
    assert execution.resumed(tmp_path / "execution.json", chosen, settings).threads == os.cpu_count()


def test_a_recipe_that_still_says_compile_names_a_backend() -> None:
    for old, new in ((True, "compiled"), (False, "torch")):
        with pytest.warns(Notice, match=f'compile is now called backend; read as backend = "{new}"'):
            assert LoopSettings.model_validate({"compile": old}).backend == new
    with pytest.raises(ValueError, match="compile"):
        LoopSettings.model_validate({"compile": "blocks"})
