"""Blocks computed by our own functions: against float64, and as exact as torch is in the same precision."""

import copy
import ctypes
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.backends import cpu_blocks
from ingot.backends.select import compiled
from ingot.kernels import cpu_train
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.attention import attend_plain, document_mask
from ingot.model.config import ModelConfig, ModelSettings
from ingot.model.rope import Rotation, rotate, rotation
from ingot.model.transformer import Transformer, build
from ingot.objectives.preference import answer_logps
from ingot.train.engine import Engine
from ingot.train.execution import choose, remembered
from ingot.train.settings import LoopSettings
from tests.train.test_engine import _engine, _gradient, _ragged

EXACT, BF16, FP32 = torch.float64, torch.bfloat16, torch.float32
WHY = "no such vectors, or no C++ compiler"
needed = pytest.mark.skipif(not cpu_train.available(BF16), reason=WHY)
wide_vectors = pytest.mark.skipif(not cpu_train.available(FP32), reason=WHY)
each = pytest.mark.parametrize(
    "dtype", [pytest.param(BF16, marks=needed, id="bf16"), pytest.param(FP32, marks=wide_vectors, id="fp32")]
)


def _config(context: int = 32, **more: Any) -> ModelConfig:
    shape = {"depth": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "tied": True}
    return ModelSettings(**{**shape, **more}, context=context).resolve(50)


def _model(config: ModelConfig) -> Transformer:
    model = build(config, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def _native(model: Transformer) -> Any:
    return compiled(model, "native")


def _found(model: Transformer, forward: Any, rows: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Hidden states, and every gradient of their sum with random weights, in float64."""
    B, T = rows["ids_BT"].shape
    weights = torch.randn(B, T, model.config.width, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == BF16):
        hidden = forward(**rows).hidden
    (hidden.double() * weights).sum().backward()
    gradients = {name: p.grad.to_dense().to(EXACT) for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach().to(EXACT), **gradients}


def _off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-9))


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _rows(B: int, T: int, documents: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(B + T)
    rows = {"ids_BT": torch.randint(50, (B, T), generator=generator)}
    if documents:
        rows["documents_BT"] = torch.randint(documents, (B, T), generator=generator).sort(dim=1).values
        rows["positions_BT"] = torch.randint(2 * T, (B, T), generator=generator)  # each row its own, and out of order
    return rows


CASES = {
    "plain": (_config(), 4, 32, 0),
    "odd": (_config(33), 3, 33, 0),
    "documents": (_config(40), 3, 40, 3),
    "window": (_config(70, window=9), 2, 70, 0),
    "both": (_config(50, window=5), 2, 50, 4),
    "no groups": (_config(heads=2, kv_heads=2, width=160, ffn=112), 5, 17, 0),
    "one head of keys": (_config(130, heads=8, kv_heads=1, width=128, ffn=352), 2, 130, 2),
    "heads of 64": (_config(200, heads=2, kv_heads=2, width=128, ffn=48), 1, 200, 0),
    "heads of 128": (_config(64, heads=2, kv_heads=1, width=256, ffn=304), 2, 64, 2),
    "learned positions": (_config(positions="learned"), 2, 32, 0),
    "two tokens": (_config(), 2, 2, 0),
    "wide": (_config(160, width=256, kv_heads=4, ffn=304), 2, 160, 2),
}


@each
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_gradients_are_as_exact_as_torchs(case: str, dtype: torch.dtype) -> None:
    config, B, T, documents = CASES[case]
    model, rows = _model(config), _rows(B, T, documents)
    exact, torchs, ours = (copy.deepcopy(model) for _ in range(3))
    wanted = _found(exact.double(), exact, rows, EXACT)
    torchs_found, found = _found(torchs, torchs, rows, dtype), _found(ours, _native(ours), rows, dtype)
    more = 2e-3 if dtype == BF16 else 2e-7
    assert found.keys() == wanted.keys() == torchs_found.keys()
    for name, value in wanted.items():
        allowed = 1.3 * _off(torchs_found[name], value) + more
        assert _off(found[name], value) < allowed, f"{name}: {_off(found[name], value):.2g}, allowed {allowed:.2g}"


@each
@pytest.mark.parametrize(("threads", "B"), [(1, 4), (2, 10), (3, 9), (2, 3)])
def test_sequences_that_threads_take_through_a_block_by_themselves(threads: int, B: int, dtype: torch.dtype) -> None:
    """By matrix tiles several parts for each thread, whose gradients are added up; where threads would wait, none."""
    model, rows = _model(_config(300, width=48, heads=3, kv_heads=1)), _rows(B, 300, 3)
    found, before = {}, torch.get_num_threads()
    for some in (1, threads):
        torch.set_num_threads(some)
        try:
            ours = copy.deepcopy(model)
            found[some] = _found(ours, _native(ours), rows, dtype)
        finally:
            torch.set_num_threads(before)
    exact = copy.deepcopy(model)
    wanted = _found(exact.double(), exact, rows, EXACT)
    for name, value in wanted.items():
        assert _off(found[threads][name], found[1][name]) < (2e-3 if dtype == BF16 else 2e-6), name
        assert _off(found[threads][name], value) < (2e-2 if dtype == BF16 else 2e-5), name


@each
def test_a_control_a_document_that_is_seen_by_the_next_is_noticed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The comparison above can fail."""
    config, B, T, documents = CASES["documents"]
    model, rows = _model(config), _rows(B, T, documents)
    exact, ours = copy.deepcopy(model), copy.deepcopy(model)
    wanted = _found(exact.double(), exact, rows, EXACT)
    monkeypatch.setattr("ingot.model.transformer.first_seen", lambda *_: None)
    found = _found(ours, _native(ours), rows, dtype)
    assert _off(found["hidden"], wanted["hidden"]) > 0.05
    assert _off(found["layers.0.attention.v.weight"], wanted["layers.0.attention.v.weight"]) > 0.05


HEADS = [
    (3, 33, 2, 1, 16),
    (2, 70, 4, 2, 32),
    (1, 96, 6, 3, 48),
    (2, 97, 2, 2, 64),
    (1, 300, 3, 1, 80),
    (1, 130, 2, 1, 128),
    (1, 20, 1, 1, 256),
    (2, 1, 2, 1, 32),
    (2, 5, 2, 2, 64),
]


@each
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("seen", ["all", "documents", "window"])
@pytest.mark.parametrize(("B", "T", "H", "K", "D"), HEADS)
def test_attention(B: int, T: int, H: int, K: int, D: int, seen: str, turned: bool, dtype: torch.dtype) -> None:
    """Output and gradients of queries, keys and values, against the one that writes scores out, in float64."""
    qkv = _drawn(B, T, H + 2 * K, D).to(dtype)
    slope = _drawn(B, T, H * D, seed=1).to(dtype)
    turn = rotation(torch.arange(T)[None], D, 10_000.0, torch.float32) if turned else None
    drawn = torch.randint(3, (B, T), generator=torch.Generator().manual_seed(T))
    documents = drawn.sort(dim=1).values if seen == "documents" else torch.zeros(B, T).long()
    mask = document_mask(documents, 7 if seen == "window" else None)
    first = mask.int().argmax(-1).int() if seen != "all" else None

    out, logs, given = torch.empty(B, T, H * D, dtype=dtype), torch.empty(B, H, T), qkv.clone()
    angles = None if turn is None else torch.cat((turn.cos_BT1E, turn.sin_BT1E), -1)
    where = (angles, int(turned), first, B, T, H, K, D, 2)
    cpu_train.call(dtype, "attention_forward", out, logs, given, *where)
    found = torch.empty_like(qkv)
    cpu_train.call(dtype, "attention_backward", found, slope, out, logs, given, *where)

    exact = qkv.double().requires_grad_()
    q, k, v = exact.split([H, K, K], dim=2)
    if turn is not None:
        wide = Rotation(turn.cos_BT1E.double(), turn.sin_BT1E.double())
        q, k = rotate(q, wide), rotate(k, wide)
    mixed, _ = attend_plain(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
    wanted = mixed.transpose(1, 2).flatten(2)
    wanted.backward(slope.double())
    allowed, allowed_slope = (8e-3, 2.5e-2) if dtype == BF16 else (3e-7, 1e-6)
    assert _off(out.double(), wanted.detach()) < allowed
    assert exact.grad is not None
    for part in (slice(H), slice(H, H + K), slice(H + K, None)):
        if float(exact.grad[:, :, part].norm()) > 1e-9:  # of one token alone queries and keys have none
            assert _off(found[:, :, part].double(), exact.grad[:, :, part]) < allowed_slope


@each
@pytest.mark.parametrize("M", [1, 2, 7, 601, 2100])
@pytest.mark.parametrize(("O", "I"), [(8, 48), (98, 130), (400, 16), (9, 7), (208, 200)])
def test_the_gradient_of_weights(M: int, O: int, I: int, dtype: torch.dtype) -> None:  # noqa: E741
    """In fp32, of parts of wider rows too, whatever the number of threads."""
    g, x = _drawn(M, O + 8).to(dtype)[:, 8:], _drawn(M, I + 16, seed=1).to(dtype)[:, :I]
    wanted = g.double().T @ x.double()
    for threads in (1, 2, 3, 8):
        out = torch.full((O, I + 1), 7.0)
        cpu_train.call(dtype, "weight_gradient", out, I + 1, g, O + 8, x, I + 16, False, M, O, I, threads)
        assert _off(out[:, :I].double(), wanted) < 1e-5
        assert (out[:, I] == 7).all()


@each
@pytest.mark.parametrize("M", [70, 1100])
@pytest.mark.parametrize(("apart", "onto"), [(1040, False), (1041, False), (1040, True)])
def test_a_large_gradient_of_weights(M: int, apart: int, onto: bool, dtype: torch.dtype) -> None:
    """One that is written past the caches where its rows begin as lines of memory do and nothing is added to it."""
    O, I = 1100, 1030  # noqa: E741
    g, x = _drawn(M, O).to(dtype), _drawn(M, I, seed=1).to(dtype)
    wanted = g.double().T @ x.double() + 7 * onto
    for threads in (1, 2, 3):
        out = torch.full((O + 1, apart), 7.0)
        cpu_train.call(dtype, "weight_gradient", out, apart, g, O, x, I, onto, M, O, I, threads)
        assert _off(out[:O, :I].double(), wanted) < 1e-5
        assert (out[:O, I:] == 7).all()
        assert (out[O] == 7).all()


@each
def test_the_same_every_time_and_gone_after_one_backward_pass(dtype: torch.dtype) -> None:
    config, B, T, documents = CASES["documents"]
    model, rows = _model(config), _rows(B, T, documents)
    forward = _native(model)
    once, again = ({n: g.clone() for n, g in _found(model, forward, rows, dtype).items()} for _ in range(2))
    assert torch.equal(once["hidden"], again["hidden"])
    assert torch.equal(2 * once["norm.weight"], again["norm.weight"]), "gradients are added up"
    loss = forward(**rows).hidden.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="gone"):
        loss.backward()


@each
def test_the_same_bits_whichever_thread_is_slower(dtype: torch.dtype) -> None:
    """Threads help each other, and who does what must not show: here something else computes on one of the cores."""
    model, rows = _model(_config(300, width=48, heads=3, kv_heads=1)), _rows(10, 300, 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wanted = _found(model, _native(model), rows, dtype)
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            for _ in range(12):
                model.zero_grad()
                found = _found(model, _native(model), rows, dtype)
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        finally:
            busy.kill()
            busy.wait()
    finally:
        torch.set_num_threads(threads)


@each
def test_what_is_no_number_is_not_hidden(dtype: torch.dtype) -> None:
    """The guard stops a run that has gone wrong; a weight of nothing in its place would let it go on."""
    for name in ("layers.0.attention.q.weight", "layers.1.ffn.gate.weight", "layers.1.ffn.down.weight"):
        model, rows = _model(_config()), _rows(2, 8)
        with torch.no_grad():
            model.get_parameter(name).fill_(torch.nan)
        found = _found(model, _native(model), rows, dtype)
        assert found["hidden"].isnan().any()
        assert found["layers.0.attention.v.weight"].isnan().any()


@wide_vectors
def test_what_is_asked_for_between_blocks_comes_from_the_plain_model() -> None:
    model, rows = _model(_config()), _rows(2, 8)
    taps = frozenset({"hidden.1", "attention.0"})
    assert _native(model)(**rows, taps=taps).taps.keys() == taps
    assert _native(model)(**rows).taps == {}


OTHERS = [
    {"activation": "gelu"},
    {"norm": "layer"},
    {"bias": "qkv"},
    {"qk_norm": True},
    {"dropout": 0.1},
    {"ffn": 100},
    {"width": 72, "heads": 3, "kv_heads": 3},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_other_blocks_are_not_taken_for_these(other: dict[str, Any]) -> None:
    config = _config(**other)
    assert not config.common_block
    model = build(config, 0)
    assert _native(model) is model
    assert _config().common_block


def test_a_model_that_learns_in_part_or_in_float64_is_left_to_torch() -> None:
    model = build(_config(), 0)
    model.layers["1"].attention.k.weight.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue]
    assert not cpu_blocks.supports(model)
    assert not cpu_blocks.supports(build(_config(), 0, dtype=torch.float64))
    adapted = build(_config(), 0)
    lora.adapt(adapted, AdapterSettings(), 0)
    assert not cpu_blocks.supports(adapted)
    assert not cpu_blocks.supports(torch.nn.Linear(2, 2))


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_train, "_built", {})
    said: list[str] = []
    assert not cpu_train.available(FP32, said.append)
    assert "FileNotFoundError" in said[-1] or not cpu_train._vectors(FP32)
    model, rows = build(_config(), 0), _rows(2, 8)
    assert torch.equal(_native(model)(**rows).hidden, model(**rows).hidden)
    assert choose(LoopSettings(), "auto", 32, 8, common=True).compile == ""


@needed
def test_it_is_chosen_where_nobody_says_otherwise_and_told_when_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert choose(LoopSettings(), "auto", 32, 8, common=True).compile == "native"
    assert choose(LoopSettings(), "bf16", 32, 8, common=True).line().endswith("blocks in C++")
    assert choose(LoopSettings(), "auto", 32, 8, common=False).compile == ""
    assert choose(LoopSettings(), "fp32", 32, 8, common=True).compile == "native"
    assert choose(LoopSettings(), "fp64", 32, 8, common=True).compile == ""
    assert choose(LoopSettings(compile=False), "auto", 32, 8, common=True).compile == ""
    assert choose(LoopSettings(compile=True), "auto", 32, 8, common=True).compile == "whole"
    fresh = choose(LoopSettings(), "auto", 32, 8, common=True)
    path = tmp_path / "execution.json"
    remembered(path, replace(fresh, compile=""), LoopSettings())
    assert remembered(path, fresh, LoopSettings()).compile == "", "goes on as it began"

    path.unlink()
    exact = replace(fresh, precision="fp32", compile="whole")
    assert remembered(path, fresh, LoopSettings()).compile == "native"
    monkeypatch.setattr(cpu_train, "available", lambda dtype, say=None: dtype == FP32)
    moved = remembered(path, exact, LoopSettings())
    assert (moved.precision, moved.compile) == ("bf16", "whole"), "another machine, without bf16"
    monkeypatch.undo()

    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    for expected in (1, 0):
        said: list[str] = []
        monkeypatch.setattr(cpu_train, "_built", {})
        assert cpu_train.available(BF16, said.append)
        assert len(said) == expected


def _like(plain: Engine, directory: Path, context: int) -> Engine:
    """The same with blocks in C++."""
    execution = replace(plain.execution, compile="native", micro_batch=1, context=context)
    return Engine(copy.deepcopy(plain.model), plain.objective, plain.plan, execution, plain.mesh, directory)


@each
def test_a_model_compared_with_itself_differs_by_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    """What the reference and the policy of before say of an answer is computed as training computes it, to the bit."""
    batch, plain = _ragged(), _engine(tmp_path, "bf16" if dtype == BF16 else "fp32")
    ours = _like(plain, tmp_path, batch.context)
    frozen = copy.deepcopy(ours.model).requires_grad_(False).eval()

    def said(engine: Engine, model: torch.nn.Module) -> Tensor:
        with torch.no_grad():
            return engine.context(1).over(model, batch, answer_logps)

    with ours.execution.forward():
        trained = [
            answer_logps(ours._compiled(m.ids_BT, positions_BT=m.positions_BT, documents_BT=m.documents_BT), m)
            for m in (micro.to("cpu") for micro in batch.micro(1))
        ]
    assert trained[0].requires_grad
    assert torch.equal(torch.cat(trained), said(ours, ours.model))
    assert torch.equal(torch.cat(trained), said(ours, frozen))
    assert not torch.equal(torch.cat(trained), said(plain, plain.model)), "a control"
    with torch.no_grad():
        evaluated = ours._terms(batch)
    assert all(torch.equal(evaluated[name].sum, term.sum) for name, term in ours._terms(batch).items())
    if dtype == BF16:  # rounding in fp32 may leave a sum as it is
        assert evaluated["lm"].sum != plain._terms(batch)["lm"].sum, "a control"


@each
def test_steps_of_training_are_those_of_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    """Gradients of a ragged batch in micro-batches, a few steps, and an evaluation."""
    precision, near = ("bf16", 0.01) if dtype == BF16 else ("fp32", 1e-5)
    batch, plain = _ragged(), _engine(tmp_path, precision)
    if not cpu_blocks.supports(plain.model):
        pytest.fail("the test's model is no common one")
    ours = _like(plain, tmp_path, batch.context)
    exact = _engine(tmp_path, "fp64")
    wanted, torchs = _gradient(exact, batch), _gradient(plain, batch)
    assert float((_gradient(ours, batch) - wanted).norm()) < 1.3 * float((torchs - wanted).norm()) + 0.1 * near
    for _ in range(5):
        a, b = plain.step(batch).loss, ours.step(batch).loss
    assert float(a) == pytest.approx(float(b), abs=near)
    assert ours.evaluate([batch])[0] == pytest.approx(plain.evaluate([batch])[0], abs=near)


@wide_vectors
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("micro", [1, 16])
def test_the_gradient_of_an_embedding(tied: bool, micro: int, tmp_path: Path) -> None:
    """It holds only rows that were looked up where a micro-batch has fewer tokens than there are; a step's is whole."""
    batch, plain = _ragged(), _engine(tmp_path, "fp32")
    config = plain.model.config.model_copy(update={"tied": tied})
    plain = Engine(build(config, 3), plain.objective, plain.plan, plain.execution, plain.mesh, tmp_path)
    ours = _like(plain, tmp_path, batch.context)
    ours.execution = replace(ours.execution, micro_batch=micro)
    few = ours._compiled(torch.zeros(1, 4, dtype=torch.int64)).hidden.sum()
    (alone,) = torch.autograd.grad(few, [ours.model.get_parameter("embedding.weight")])
    assert alone.is_sparse
    wanted = _gradient(plain, batch)
    assert float((_gradient(ours, batch) - wanted).norm()) < 1e-5 * float(wanted.norm())
    assert not any(p.grad is None or p.grad.is_sparse for p in ours.trained.values())


@wide_vectors
def test_it_shares_torchs_threads() -> None:
    """Two libraries of threads would keep each other from the cores."""
    library = cpu_train._library(FP32)
    assert isinstance(library, ctypes.CDLL)
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line}) == 1


@wide_vectors
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="the tests above are of such a CPU")
def test_a_cpu_without_avx512_computes_the_same(tmp_path: Path) -> None:
    """Vectors of 8 floats, by the tests of fp32."""
    environment = {**os.environ, "CXX": "g++ -mno-avx512f", "INGOT_CACHE": str(tmp_path)}
    tests = [str(Path(__file__).with_name(name)) for name in ("test_cpu_blocks.py", "test_cpu_head.py")]
    only = "fp32 and (attention or hidden or weights or costs) and not documents"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", only, *tests]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert found.returncode == 0, found.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", found.stdout)[0]) > 40
    assert list(tmp_path.rglob("*.so")), "they were built for it"
