"""Which backend a model gets, and that a model with one is copied, saved and computed as any other."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.backends import select as selection
from ingot.backends.compiled import CompiledBackend
from ingot.backends.cpu_blocks import CPUBackend, CPUDecodeBackend
from ingot.backends.cuda import CUDABackend
from ingot.backends.estimate import cpu_activations, has_kernel
from ingot.backends.select import select
from ingot.core.errors import UserError
from ingot.kernels import cpu_train
from ingot.model.backend import TORCH, Backend
from ingot.model.config import Checkpointing, ModelSettings
from ingot.model.transformer import Transformer, build
from ingot.stages.models import backend as backends
from tests.backends.comparison import BF16, FP32, FP64, MODELS, ROWS, batch, compute, make, reference_of, same
from tests.imports import assert_not_imported

SHAPE = 3, 33
SHORT, LONG = {"shape": SHAPE, "flops": 1e9}, {"shape": SHAPE, "flops": 1e16}
"""Runs of a hundredth of a second and of some hours at the rate of the fixture below."""

needs_kernels = pytest.mark.skipif(not cpu_train.available(FP32), reason="no such vectors, or no C++ compiler")
needs_compiler = pytest.mark.skipif(not selection._has_compiler(), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of a known speed."""
    monkeypatch.setattr(selection, "_matmul_rate", lambda device, dtype: 1e11)


def _chosen(model: Transformer, training: Any = None, dtype: torch.dtype = FP32, **options: Any) -> type[Backend]:
    return type(select(model, options.pop("device", "cpu"), dtype, training=training, **options))


# -- the choice --------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("training", [SHORT, LONG], ids=["short", "long"])
def test_the_common_model_is_trained_by_the_cpus_kernels(training: Any) -> None:
    assert _chosen(make("llama"), training) is CPUBackend
    assert _chosen(make("mistral"), training, name="cpu") is CPUBackend
    assert _chosen(make("llama"), training, name="torch") is CPUDecodeBackend


@needs_compiler
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3", "lora", "dropout", "odd sizes"])
def test_other_models_are_compiled_where_the_run_repays_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "dropout", MODELS["llama"]._replace(settings={"dropout": 0.1}))
    model = make(name)
    assert _chosen(model, LONG) is CompiledBackend
    assert _chosen(model, SHORT) is CPUDecodeBackend
    assert _chosen(model, {"shape": SHAPE, "flops": 0.0}) is CPUDecodeBackend
    assert _chosen(model, LONG, name="torch") is CPUDecodeBackend
    assert _chosen(model, SHORT, name="compiled") is CompiledBackend
    with pytest.raises(UserError, match=r'loop\.backend: found "cpu" for a model, device or precision'):
        _chosen(model, LONG, name="cpu")


@needs_compiler
@pytest.mark.parametrize(("device", "seconds"), [("cpu", 300), ("cuda", 60)])
def test_a_run_repays_compiling_from_some_minutes_on(device: str, seconds: int) -> None:
    """Minutes of matrix products at half of the machine's rate."""
    for factor, expected in ((0.9, False), (1.1, True)):
        run = {"shape": SHAPE, "flops": factor * seconds * 1e11 / 2}
        assert (_chosen(make("gpt2"), run, device=device) is CompiledBackend) == expected


def test_fp64_is_torchs() -> None:
    """Proofs are in fp64; compiled they would be of something else."""
    model = make("llama", FP64)
    assert _chosen(model, LONG, FP64) is CPUDecodeBackend
    with pytest.raises(UserError, match="precision"):
        _chosen(model, LONG, FP64, name="cpu")


def test_a_loaded_model_is_computed_as_it_was_trained() -> None:
    """The CPU's backend decides in each forward pass; what is not trained is not compiled."""
    for name in ("llama", "gpt2"):
        assert _chosen(make(name)) is CPUBackend
        assert _chosen(make(name), name="cpu") is CPUBackend
        assert _chosen(make(name), name="torch") is CPUDecodeBackend
        assert _chosen(make(name), name="compiled") is CPUDecodeBackend
        assert _chosen(make(name), device="cuda:0", name="cpu") is CUDABackend


def test_on_a_gpu() -> None:
    assert _chosen(make("llama"), SHORT, BF16, device="cuda") is CUDABackend
    assert _chosen(make("llama"), LONG, FP64, device="cuda") is CUDABackend
    with pytest.raises(UserError, match="device"):
        _chosen(make("llama"), LONG, BF16, device="cuda", name="cpu")


def test_sharded_parameters_and_other_modules_are_torchs() -> None:
    """A kernel would read one shard as if it were all."""
    model = make("llama")
    model.norm.weight = torch.nn.UninitializedParameter()  # a parameter of another class, as a sharded one is
    for name in ("auto", "torch", "compiled", "cpu"):
        assert select(model, "cpu", FP32, name=name, training=LONG) is TORCH  # type: ignore[arg-type]
        assert select(torch.nn.Linear(2, 2), "cpu", FP32, name=name) is TORCH


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Named backends are refused in one sentence, `auto` does without."""
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cpu_train, "_built", {})
    messages: list[str] = []
    assert _chosen(make("llama"), LONG, notify=messages.append) is CPUDecodeBackend
    if cpu_train.has_instructions(FP32):
        assert "/nowhere/g++ could not build the C++ kernels (FileNotFoundError); using PyTorch" in messages[-1]
    for name, words in (("compiled", "no C\\+\\+ compiler on the PATH"), ("cpu", "no C\\+\\+ compiler")):
        with pytest.raises(UserError, match=f'loop\\.backend: found "{name}" .*{words}') as caught:
            _chosen(make("llama"), LONG, name=name)
        assert "\n" not in str(caught.value)
    loaded = make("llama")
    loaded.backend = select(loaded, "cpu", FP32)
    assert same(loaded, reference_of(loaded), ROWS["documents"], FP32)


@needs_kernels
def test_building_kernels_is_reported_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    messages: list[str] = []
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_train, "build", lambda source, notify, macros: notify("building"))
    monkeypatch.setattr(cpu_train, "_built", {})
    for _ in range(2):
        select(make("llama"), "cpu", FP32, training=SHORT, notify=messages.append)  # type: ignore[arg-type]
    assert messages == ["building"]


def test_the_estimate_of_memory_agrees_with_the_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`ingot plan` asks it without torch."""
    for name, model in MODELS.items():
        if name not in ("lora", "dora", "one frozen matrix"):  # which the shape does not tell
            assert has_kernel(make(name).config) == model.on_cpu, name
    config = ModelSettings(depth=2, width=64, heads=4).resolve(50)
    for precision, dtype in (("fp32", FP32), ("bf16", BF16), ("fp64", FP64)):
        assert (cpu_activations(config, 4, precision, 1 << 20) is not None) == cpu_train.available(dtype)
    assert cpu_activations(config.model_copy(update={"dropout": 0.1}), 4, "fp32", 1 << 20) is None
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert cpu_activations(config, 4, "fp32", 1 << 20) is None


def test_where_the_package_was_removed_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    assert backends.backend_for(model, "cpu", FP32) is not TORCH
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert backends.backend_for(model, "cpu", FP32, name="cpu", training=LONG) is TORCH


# -- compilation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """No compiled code of other tests is found, in this process or on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiler_that_fails_leaves_the_base_backend(fresh_compiler: None) -> None:
    messages: list[str] = []
    model = make("gpt2")
    model.backend = select(model, "cpu", FP32, training=LONG, notify=messages.append)  # type: ignore[arg-type]
    assert type(model.backend) is CompiledBackend
    rows = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE) % 50
    with torch._inductor.config.patch("cpp.cxx", ("/bin/false",)):
        assert torch.equal(model(rows).hidden, reference_of(model)(rows).hidden)
    assert len(messages) == 1
    assert re.fullmatch(r"torch\.compile failed \(.+\); the run continues without it", messages[0])
    model.backend = select(model, "cpu", FP32, name="compiled", training=LONG)  # type: ignore[arg-type]
    with torch._inductor.config.patch("cpp.cxx", ("/bin/false",)), pytest.raises(RuntimeError, match="/bin/false"):
        model(rows)


@pytest.mark.long
@needs_compiler
def test_gradients_of_keys_in_bf16_are_right_in_spite_of_gcc(fresh_compiler: None) -> None:
    """With models of this size two kernels call PyTorch's transpose, which GCC 12.2 vectorises wrongly by default."""
    model: Any = build(ModelSettings(depth=2, width=128, heads=4, context=64).resolve(65), seed=1)
    ids = torch.randint(65, (12, 64), generator=torch.Generator().manual_seed(1))
    gradients = []
    for backend in (TORCH, CompiledBackend(TORCH, "cpu", 2, (12, 64))):
        model.backend = backend
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model(ids).hidden
        hidden.float().square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).norm() <= 0.03 * expected.norm(), name


# -- a model with a backend --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_backend",
    [
        lambda: CPUBackend(lambda message: None),
        lambda: CPUDecodeBackend(lambda message: None),
        lambda: CompiledBackend(CPUDecodeBackend(lambda message: None), "cpu", 2, SHAPE),
        CUDABackend,
        lambda: TORCH,
    ],
    ids=["cpu", "torch", "compiled", "cuda", "reference"],
)
def test_a_model_is_copied_and_saved_as_if_it_had_none(make_backend: Callable[[], Backend]) -> None:
    plain, model = make("llama"), make("llama")
    model.backend = make_backend()
    assert model.state_dict().keys() == plain.state_dict().keys()
    copied = copy.deepcopy(model)
    assert copied.backend is model.backend
    assert copied.norm.weight is not model.norm.weight
    read = pickle.loads(pickle.dumps(model))
    assert read.backend is TORCH
    assert same(read, plain, ROWS["ragged"], FP32)


def test_nothing_is_compiled_nor_imported_for_it_where_no_backend_compiles() -> None:
    code = (
        "import torch\n"
        "from ingot.backends.select import select\n"
        "from ingot.infer.generate import generate\n"
        "from ingot.infer.sampling import Sampling\n"
        "from tests.backends.comparison import ROWS, compute, make\n"
        "for name in ('llama', 'gpt2'):\n"
        "    model = make(name)\n"
        "    for backend in ('auto', 'torch'):\n"
        "        training = {'shape': (3, 33), 'flops': 1}\n"
        "        model.backend = select(model, 'cpu', torch.float32, name=backend, training=training)\n"
        "        compute(model, ROWS['ragged'], torch.float32)\n"
        "        generate(model, [[1, 2]], Sampling(max_new=3))"
    )
    assert_not_imported(code, "torch._dynamo", "torch._inductor", "sympy")


# -- compiled blocks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that `torch.compile` was given; its programs run them operation by operation."""
    graphs: list[Any] = []
    real = torch.compile

    def compiler(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic, options: real(function, dynamic=dynamic, backend=compiler)
    )
    torch.compiler.reset()
    return graphs


@pytest.mark.parametrize(
    ("depth", "checkpointing"), [(2, "none"), (2, "full"), (2, "selective"), (9, "none"), (9, "sqrt")]
)
def test_blocks_of_the_one_shape_are_compiled_once_for_all(
    depth: int, checkpointing: Checkpointing, compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other shapes, passes without gradients and taps are the base's: to the bit, and without compiling again."""
    monkeypatch.setitem(MODELS, "qwen3", MODELS["qwen3"]._replace(settings={"family": "qwen3", "depth": depth}))
    model = make("qwen3")
    model.checkpointing, shape = checkpointing, (ROWS["ragged"].rows, ROWS["ragged"].tokens)
    segmented = checkpointing in ("full", "sqrt")
    model.backend = CompiledBackend(CPUDecodeBackend(), "cpu", depth, shape, segmented=segmented)
    plain = reference_of(model)
    assert same(model, plain, ROWS["documents"], FP32)
    ids_BT = batch(ROWS["ragged"], model.config.vocab)["ids_BT"]
    with torch.no_grad():
        assert torch.equal(model(ids_BT).hidden, plain(ids_BT).hidden)
    taps = frozenset({"hidden.1"})
    assert torch.equal(model(ids_BT, taps=taps).taps["hidden.1"], plain(ids_BT, taps=taps).taps["hidden.1"])
    assert compilations == []
    for _ in range(3):
        found, wanted = compute(model, ROWS["ragged"], FP32), compute(plain, ROWS["ragged"], FP32)
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            for copied in (model, plain):
                copied.norm.weight.add_(1.0)  # the next turn sees weights that have moved
    assert len(compilations) == 1
    assert same(model, plain, ROWS["documents"], FP32)
    assert len(compilations) == 1


def test_a_compiled_backend_keeps_what_its_base_has_for_the_rest() -> None:
    class Base(Backend):
        def decode_ops(self, device: Any, dtype: Any, stream: Any) -> str:
            return "ops"

        def recorder(self, update: Any) -> Any:
            return "recorder", update

        def lm_head(self, weight_VD: Tensor) -> Any:
            return "head", weight_VD

    backend = CompiledBackend(Base(), "cpu", 2, SHAPE)
    assert backend.decode_ops(torch.device("cpu"), FP32, FP32) == "ops"
    assert backend.recorder(1) == ("recorder", 1)
    assert backend.lm_head(torch.zeros(1))[0] == "head"
