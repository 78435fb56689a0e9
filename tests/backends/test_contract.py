"""The contract of every backend: supported inputs as near to float64 as PyTorch, others PyTorch's own to the bit."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.backends.compiled import CompiledBackend
from ingot.backends.cpu_blocks import CPUBackend, CPUDecodeBackend
from ingot.backends.cuda import CUDABackend
from ingot.kernels import build, cpu_train
from ingot.model.backend import Backend
from ingot.model.lm_head import LMHead
from ingot.model.losses import token_logps
from ingot.model.transformer import Transformer
from tests.backends.comparison import BF16, FP32, MODELS, ROWS, Rows, batch, broken, compute, make, same

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
by_precision = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(not cpu_train.available(dtype), reason="no such vectors, or no C++ compiler"),
        id=name,
    )
    for name, dtype in (("bf16", BF16), ("fp32", FP32))
]
each_precision = pytest.mark.parametrize("dtype", by_precision)
TAPS = [frozenset({"hidden.0", "hidden.2"}), frozenset({"attention.1"}), frozenset({"hidden.1", "attention.0"})]
SLOW_ROWS = ("long", "many documents", "two tokens")
QUICK_ROWS = [rows for rows in ROWS if rows not in SLOW_ROWS]


# -- the CPU's kernels -------------------------------------------------------------------------------------------------


@each_precision
@pytest.mark.parametrize("model", MODELS)
def test_the_cpus_backend_keeps_the_contract(model: str, dtype: torch.dtype) -> None:
    """Supported models with all rows, those left to PyTorch with two."""
    on_cpu = MODELS[model].on_cpu
    for rows in QUICK_ROWS if on_cpu else ("documents", "ragged"):
        assert broken(CPUBackend(), model, rows, dtype, supported=on_cpu) == [], rows


@pytest.mark.slow
@each_precision
@pytest.mark.parametrize("model", [name for name, model in MODELS.items() if model.on_cpu])
def test_the_cpus_backend_keeps_the_contract_for_more_rows(model: str, dtype: torch.dtype) -> None:
    for rows in SLOW_ROWS:
        assert broken(CPUBackend(), model, rows, dtype, supported=True) == [], rows


@each_precision
@pytest.mark.parametrize("taps", TAPS, ids=lambda taps: ", ".join(sorted(taps)))
@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_taps_are_left_to_torch(model: str, taps: frozenset[str], dtype: torch.dtype) -> None:
    assert broken(CPUBackend(), model, "documents", dtype, taps, supported=False) == []


@each_precision
@pytest.mark.parametrize(("threads", "rows"), [(2, Rows(10, 40, 3)), (3, Rows(9, 70, 3)), (2, Rows(3, 300, 3))])
def test_threads_change_no_more_than_the_order_of_sums(
    threads: int, rows: Rows, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROWS, f"{rows}", rows)
    assert broken(CPUBackend(), "llama", f"{rows}", dtype, supported=True) == []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert broken(CPUBackend(), "llama", f"{rows}", dtype, supported=True) == []
    finally:
        torch.set_num_threads(before)


@each_precision
def test_the_same_bits_every_time_whichever_thread_is_slower(dtype: torch.dtype) -> None:
    """Threads help each other, which must not show; another process takes one of the cores meanwhile."""
    model, rows = make("llama"), Rows(10, 60, 3)
    model.backend = CPUBackend()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert all(same(model, model, rows, dtype) for _ in range(3))
    finally:
        busy.kill()
        busy.wait()
        torch.set_num_threads(before)


@each_precision
def test_without_gradients_the_same_bits(dtype: torch.dtype) -> None:
    """A policy compared with itself differs by nothing: with gradients, without, frozen, and row by row."""
    model, rows = make("llama"), batch(ROWS["documents"], 50)
    model.backend = CPUBackend()
    labels_BT = rows.pop("labels_BT")

    def logps(part: slice = slice(None)) -> Tensor:
        with torch.autocast("cpu", dtype=BF16, enabled=dtype == BF16):
            out = model(**{name: tensor[part] for name, tensor in rows.items()})
            return token_logps(out.hidden, out.head, labels_BT[part])

    trained = logps()
    assert trained.requires_grad
    with torch.no_grad():
        assert torch.equal(logps(), trained)
        assert torch.equal(torch.cat([logps(slice(row, row + 1)) for row in range(3)]), trained)
    model.requires_grad_(False).eval()
    frozen = logps()
    assert not frozen.requires_grad
    assert torch.equal(frozen, trained)


@each_precision
def test_a_second_backward_pass_is_refused(dtype: torch.dtype) -> None:
    model = make("llama")
    model.backend = CPUBackend()
    with torch.autocast("cpu", dtype=BF16, enabled=dtype == BF16):
        total = model(torch.zeros(2, 8, dtype=torch.long)).hidden.sum()
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="a second backward pass"):
        total.backward()


@each_precision
@pytest.mark.parametrize(
    "name", ["embedding.weight", "layers.0.attention.q.weight", "layers.1.ffn.gate.weight", "layers.1.ffn.down.weight"]
)
def test_what_is_not_a_number_stays_so(name: str, dtype: torch.dtype) -> None:
    """Health checks stop a run whose numbers are NaN; zeros in their place would let it go on."""
    model = make("llama")
    model.backend = CPUBackend()
    with torch.no_grad():
        model.get_parameter(name).fill_(torch.nan)
    found = compute(model, Rows(2, 8), dtype)
    for result in ("hidden", "logps", "layers.0.attention.v.weight", "head.weight"):
        assert found[result].isnan().any(), result


@each_precision
def test_inputs_of_other_kinds_are_left_to_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout while training, parameters in fp64 or bf16, sharded parameters, no compiler."""
    ids_BT, backend = torch.zeros(2, 8, dtype=torch.long), CPUBackend()

    def supported(model: Transformer) -> bool:
        with torch.autocast("cpu", dtype=BF16, enabled=dtype == BF16):
            return backend.supports(model, ids_BT, ())

    assert supported(make("llama"))
    monkeypatch.setitem(MODELS, "dropout", MODELS["llama"]._replace(settings={"dropout": 0.2}))
    dropped = make("dropout")
    assert supported(dropped.eval())
    assert not supported(dropped.train())
    assert broken(backend, "dropout", "ragged", dtype, supported=False) == []
    assert not supported(make("llama", torch.float64))
    assert not supported(make("llama", BF16))
    sharded = make("llama")
    sharded.norm.weight = torch.nn.UninitializedParameter()  # a parameter of another class
    assert not supported(sharded)
    monkeypatch.setattr(cpu_train, "_built", {dtype: None})
    assert not supported(make("llama"))
    assert broken(backend, "llama", "ragged", dtype, supported=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", by_precision[1:])
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="the other tests are of such a CPU")
def test_a_cpu_without_avx512_keeps_the_contract(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of 8 floats."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-mno-avx512f"))
    monkeypatch.setattr(cpu_train, "_built", {})
    cpu_train.function.cache_clear()
    try:
        for model in ("llama", "heads of 128", "large vocabulary", "mistral", "heads wider than the stream"):
            for rows in ("ragged", "documents", "chunks", "long"):
                assert broken(CPUBackend(), model, rows, dtype, supported=True) == [], (model, rows)
    finally:
        cpu_train.function.cache_clear()


# -- a GPU, torch.compile ----------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "model",
    ["llama", "llama tied", "large vocabulary", "odd sizes", "mistral", "gpt2", "qwen2", "qwen3", "lora", "dora"],
)
def test_a_gpus_backend_keeps_the_contract(model: str, dtype: torch.dtype) -> None:
    for rows in ("one document", "ragged", "documents", "own positions", "chunks"):
        assert broken(CUDABackend(), model, rows, dtype, supported=True, device="cuda") == [], rows


@needs_gpu
@pytest.mark.parametrize("taps", TAPS, ids=lambda taps: ", ".join(sorted(taps)))
def test_a_gpus_backend_gives_taps(taps: frozenset[str]) -> None:
    assert broken(CUDABackend(), "qwen3", "documents", BF16, taps, supported=True, device="cuda") == []


COMPILED = [
    pytest.param("mistral", "documents", FP32, 1, marks=pytest.mark.long, id="mistral, fp32"),
    pytest.param("dora", "own positions", BF16, 1, marks=pytest.mark.long, id="dora, bf16"),
    pytest.param("gpt2", "ragged", BF16, None, marks=pytest.mark.slow, id="deep gpt2, bf16"),
    pytest.param("qwen3", "one document", FP32, None, marks=pytest.mark.slow, id="deep qwen3, fp32"),
]


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize(("model", "rows", "dtype", "depth"), COMPILED)
def test_compiled_blocks_keep_the_contract(
    model: str, rows: str, dtype: torch.dtype, depth: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shallow model is compiled as a whole, of a deep one the first block for all."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    depth = depth or {"cpu": 9, "cuda": 25}[device]
    name = f"{model} of {depth} blocks"
    monkeypatch.setitem(MODELS, name, MODELS[model]._replace(settings={**MODELS[model].settings, "depth": depth}))
    before = counters["stats"]["unique_graphs"]
    base = CUDABackend() if device == "cuda" else CPUDecodeBackend()
    backend = CompiledBackend(base, device, depth, (ROWS[rows].rows, ROWS[rows].tokens))
    # Other orders of sums than torch's, in tensors of few numbers and over up to 25 blocks.
    assert broken(backend, name, rows, dtype, supported=True, device=device, factor=2.5) == []
    assert counters["stats"]["unique_graphs"] == before + 1


# -- controls: the comparison notices what is wrong --------------------------------------------------------------------


class _NoDocuments(Backend):
    def mask(self, model: Any, documents_BT: Tensor | None, T: int) -> Any:
        return super().mask(model, None, T)


class _NoWindow(Backend):
    def mask(self, model: Any, documents_BT: Tensor | None, T: int) -> Any:
        other = model.config.model_copy(update={"window": model.config.window + 1})
        config, model.config = model.config, other
        try:
            return super().mask(model, documents_BT, T)
        finally:
            model.config = config


class _NoRope(Backend):
    def blocks(self, model: Any, x_BTW: Tensor, rope: Any, mask: Any, taps: Any) -> Any:
        return super().blocks(model, x_BTW, None, mask, taps)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 1.03 * gradient


class _WrongGradient(Backend):
    def blocks(self, model: Any, x_BTW: Tensor, rope: Any, mask: Any, taps: Any) -> Any:
        hidden_BTW, tapped = super().blocks(model, x_BTW, rope, mask, taps)
        return _Scaled.apply(hidden_BTW), tapped


class _WrongHead(Backend):
    def lm_head(self, weight_VD: Tensor) -> LMHead:
        class Late(LMHead):
            def weight_grad(self, logit_grad_nP: Tensor, scaled_nD: Tensor, total_VD: Tensor | None) -> Tensor:
                return super().weight_grad(logit_grad_nP, scaled_nD.roll(1, 0), total_VD)

        return Late(weight_VD)


class _Imprecise(Backend):
    def blocks(self, model: Any, x_BTW: Tensor, rope: Any, mask: Any, taps: Any) -> Any:
        hidden_BTW, tapped = super().blocks(model, x_BTW, rope, mask, taps)
        return hidden_BTW + hidden_BTW.detach() * 0.02, tapped


class _Refuses(Backend):
    def supports(self, model: Any, ids_BT: Tensor, taps: Any) -> bool:
        return False


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("backend", "model", "noticed"),
    [
        (_NoDocuments, "llama", "hidden"),
        (_NoWindow, "mistral", "hidden"),
        (_NoRope, "llama", "layers.0.attention.q.weight"),
        (_WrongGradient, "llama", "layers.1.ffn.down.weight"),
        (_WrongHead, "llama", "head.weight"),
        (_Imprecise, "llama", "hidden"),
        (_Refuses, "llama", "supports"),
    ],
)
def test_a_control_a_broken_backend_is_noticed(
    backend: Callable[[], Backend], model: str, noticed: str, dtype: torch.dtype
) -> None:
    assert broken(Backend(), model, "documents", dtype, supported=True) == []
    assert any(failure.startswith(noticed) for failure in broken(backend(), model, "documents", dtype, supported=True))


def test_a_control_a_backend_that_answers_for_what_it_was_to_refuse_is_noticed() -> None:
    assert broken(Backend(), "qwen3", "ragged", FP32, supported=False) != []


def test_the_kernels_share_torchs_threads() -> None:
    """Two libraries of threads would keep each other from the cores."""
    if not cpu_train.available(FP32) or not os.path.exists("/proc/self/maps"):
        pytest.skip("no C++ compiler, or no Linux")
    code = (
        "import torch; from ingot.kernels import cpu_train; assert cpu_train.available(torch.float32); "
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}, sep='\\n')"
    )  # in a process of its own: packages that other tests load bring libraries of theirs
    libraries = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert len(libraries.split()) == 1
