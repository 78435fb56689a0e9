"""Kernels of training over a table of shapes: as near to float64 as PyTorch is in the same precision."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.backends.cpu_head import CPUHead
from ingot.kernels import LANES, build, cpu_train
from ingot.model.attention import attend_eager, document_mask
from ingot.model.lm_head import LMHead
from ingot.model.losses import IGNORE, cross_entropy, token_logps
from ingot.model.rope import Rope, apply_rope, make_rope
from ingot.train.divergences import Divergence, LiveTeacher, StoredTeacher, distillation_terms, most_likely
from tests.exactness import FLOOR, draw, error, failures

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
slow = pytest.mark.slow
Results = dict[str, Tensor]


@pytest.fixture(params=["bf16", "fp32", pytest.param("fp32 without AVX-512", marks=slow)])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """The dtype of kernels as they are built for this CPU, or for one with vectors of 8 floats."""
    dtype = BF16 if request.param == "bf16" else FP32
    if "without" in request.param:
        if not torch.cpu._is_avx512_supported():
            pytest.skip("the kernels for this CPU are such ones")
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-mno-avx512f"))
        monkeypatch.setattr(cpu_train, "_built", {})
        cpu_train.function.cache_clear()
    if not cpu_train.available(dtype):
        pytest.skip("no such vectors, or no C++ compiler")
    yield dtype
    cpu_train.function.cache_clear()


# -- attention ---------------------------------------------------------------------------------------------------------

ATTENTION = {
    "small": (2, 5, 2, 2, 32),
    "one token": (12, 1, 2, 1, 32),
    "two tokens": (9, 2, 2, 2, 16),
    "ragged": (3, 33, 2, 1, 16),
    "grouped": (2, 70, 4, 2, 32),
    "heads of 48": (1, 96, 6, 3, 48),
    "heads of 64": (2, 97, 2, 2, 64),
    "heads of 128": (1, 130, 2, 1, 128),
    "heads of 256": (1, 20, 1, 1, 256),
    "long": pytest.param((1, 300, 3, 1, 80), marks=slow),
    "many rows": pytest.param((17, 40, 2, 1, 32), marks=slow),
}
"""B, T, H, K, D."""
ATTENTION_FLOOR = {BF16: 5e-3, FP32: 1e-5}
"""A query that sees one key has no gradient; kernels, which do not treat it apart, leave the rounding of others."""


def _named(table: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(*shape.values, marks=shape.marks, id=name)
        if hasattr(shape, "marks")
        else pytest.param(shape, id=name)
        for name, shape in table.items()
    ]


def _torch_attention(qkv: Tensor, slope: Tensor, rope: Rope | None, mask: Tensor, H: int, K: int) -> Results:
    """Output and gradients by attention that writes its scores out, in the dtype of qkv."""
    qkv = qkv.detach().requires_grad_()
    q, k, v = qkv.split([H, K, K], dim=2)
    if rope is not None:
        rope = Rope(*(part.to(torch.promote_types(qkv.dtype, FP32)) for part in rope))
        q, k = apply_rope(q, rope), apply_rope(k, rope)
    out, _ = attend_eager(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
    out = out.transpose(1, 2).flatten(2)
    (gradient,) = torch.autograd.grad(out, qkv, slope.to(qkv.dtype))
    return {"out": out.detach(), **dict(zip("qkv", gradient.split([H, K, K], dim=2), strict=True))}


def _attention(shape: tuple[int, ...], seen: str, rotated: bool, dtype: torch.dtype) -> list[str]:
    """How the kernels differ from float64 more than PyTorch does."""
    B, T, H, K, D = shape
    qkv, slope = draw(B, T, H + 2 * K, D, dtype=dtype), draw(B, T, H * D, seed=1, dtype=dtype)
    rope = make_rope(torch.arange(T)[None], D, 10_000.0, FP32) if rotated else None
    drawn_BT = torch.randint(3, (B, T), generator=torch.Generator().manual_seed(T)).sort(dim=1).values
    documents_BT = drawn_BT if seen == "documents" else torch.zeros_like(drawn_BT)
    mask_BTT = document_mask(documents_BT, 7 if seen == "window" else None)
    first_BT = mask_BTT.int().argmax(-1).int() if seen != "all" else None

    out, logs, given = torch.empty(B, T, H * D, dtype=dtype), torch.empty(B, H, T), qkv.clone()
    angles = None if rope is None else torch.cat((rope.cos_BT1E, rope.sin_BT1E), -1)
    shared = (angles, int(rotated), first_BT, B, T, H, K, D, 2)
    cpu_train.call(dtype, "attention_forward", out, logs, given, *shared)
    gradient = torch.empty_like(qkv)
    cpu_train.call(dtype, "attention_backward", gradient, slope, out, logs, given, *shared)
    found = {"out": out, **dict(zip("qkv", gradient.split([H, K, K], dim=2), strict=True))}
    torchs = _torch_attention(qkv, slope, rope, mask_BTT, H, K)
    exact = _torch_attention(qkv.double(), slope, rope, mask_BTT, H, K)
    return failures(found, torchs, exact, ATTENTION_FLOOR[dtype])


@pytest.mark.parametrize("shape", _named(ATTENTION))
def test_attention(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for seen in ("all", "documents", "window"):
        for rotated in (False, True):
            assert _attention(shape, seen, rotated, dtype) == [], (seen, rotated)


def test_a_control_a_token_too_many_is_noticed(dtype: torch.dtype) -> None:
    B, T, H, K, D = 2, 70, 4, 2, 32
    qkv, slope = draw(B, T, H + 2 * K, D, dtype=dtype), draw(B, T, H * D, seed=1, dtype=dtype)
    right, wrong = (document_mask(torch.zeros(B, T), window) for window in (30, 31))
    torchs, exact = (_torch_attention(x, slope, None, right, H, K) for x in (qkv, qkv.double()))
    failed = failures(_torch_attention(qkv, slope, None, wrong, H, K), torchs, exact, ATTENTION_FLOOR[dtype])
    assert [failure.split(":")[0] for failure in failed] == ["out", "q", "k", "v"]


# -- the gradient of weights -------------------------------------------------------------------------------------------


def _weight_gradient(g: Tensor, x: Tensor, out: Tensor, add: bool, threads: int) -> None:
    """`g` and `x` may be columns of wider rows."""
    (M, O), I, strides = g.shape, x.shape[1], (g.stride(0), x.stride(0))  # noqa: E741
    arguments = (out, out.stride(0), g, strides[0], x, strides[1], add, M, O, I, threads)
    cpu_train.call(g.dtype, "weight_gradient", *arguments)


@pytest.mark.parametrize("M", [1, 2, 7, 601, pytest.param(2100, marks=slow)])
def test_the_gradient_of_weights(M: int, dtype: torch.dtype) -> None:
    """In fp32, of columns of wider rows, for any number of threads; written, or added to what is there."""
    for O, I in [(8, 48), (98, 130), (400, 16), (9, 7), (208, 200)]:  # noqa: E741
        g, x = draw(M, O + 8, dtype=dtype)[:, 8:], draw(M, I + 16, seed=1, dtype=dtype)[:, :I]
        exact, torchs = g.double().T @ x.double(), g.float().T @ x.float()
        for threads in (1, 2, 3, 8):
            for add in (False, True):
                out = torch.full((O, I + 1), 7.0)
                _weight_gradient(g, x, out[:, :I], add, threads)
                found = {"gradient": out[:, :I] - 7 * add}
                assert failures(found, {"gradient": torchs}, {"gradient": exact}, 5e-6) == [], (O, I, threads, add)
                assert (out[:, I] == 7).all(), "written past a row's end"


@slow
@pytest.mark.parametrize("M", [70, 1100])
@pytest.mark.parametrize(("stride", "add"), [(1040, False), (1041, False), (1040, True)])
def test_a_large_gradient_of_weights(M: int, stride: int, add: bool, dtype: torch.dtype) -> None:
    """It is written past the caches where its rows begin as lines of memory do and nothing is added to it."""
    O, I = 1100, 1030  # noqa: E741
    g, x = draw(M, O, dtype=dtype), draw(M, I, seed=1, dtype=dtype)
    exact = g.double().T @ x.double() + 7 * add
    for threads in (1, 2, 3):
        out = torch.full((O + 1, stride), 7.0)
        _weight_gradient(g, x, out[:O, :I], add, threads)
        assert error(out[:O, :I], exact) < 5e-6
        assert (out[:O, I:] == 7).all()
        assert (out[O] == 7).all()


def test_the_gradient_of_weights_without_rows(dtype: torch.dtype) -> None:
    """What is added to stays."""
    out = torch.full((4, 16), 7.0)
    _weight_gradient(draw(0, 4, dtype=dtype), draw(0, 16, dtype=dtype), out, True, 2)
    assert (out == 7).all()


# -- the last norm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("M", "W"), [(1, 16), (7, 48), (33, 160), (600, 64), (0, 32)])
def test_the_last_norm(M: int, W: int, dtype: torch.dtype) -> None:
    """Both passes in fp32; the gradient of the stream also in the dtype of the products."""
    x, gain, slope, eps = 3 * draw(M, W), draw(W, seed=1), draw(M, W, seed=2), 1e-5

    def by_torch(dtype: torch.dtype) -> Results:
        given = [tensor.to(dtype).requires_grad_() for tensor in (x, gain)]
        out = F.rms_norm(given[0], (W,), given[1], eps)
        gradients = torch.autograd.grad(out, given, slope.to(dtype))
        return {"out": out.detach(), "x": gradients[0], "gain": gradients[1]}

    for threads in (1, 3):
        out, of_x, of_gain = torch.empty(M, W), torch.empty(M, W), torch.empty(W)
        rounded = torch.empty(M, W, dtype=dtype) if dtype == BF16 else of_x
        cpu_train.call(dtype, "final_norm", out, x, gain, eps, M, W, threads)
        inputs = (of_x, rounded, of_gain, False, None, slope, x, gain, eps, M, W, threads)
        cpu_train.call(dtype, "final_norm_backward", *inputs)
        assert failures({"out": out, "x": of_x, "gain": of_gain}, by_torch(FP32), by_torch(FP64), 1e-6) == []
        assert torch.equal(rounded, of_x.to(dtype))


# -- the head ----------------------------------------------------------------------------------------------------------

PIECE = 32 * 3 * LANES
"""Columns of logits that the head computes at once on a CPU with AVX-512."""
HEADS = {
    "small": (1, 16, 2, None),
    "ragged": (7, 48, 65, None),
    "chunks": (64, 128, 65, 20),
    "wide": (130, 32, 257, 50),
    "a piece but one": (33, 80, PIECE - 1, None),
    "a piece": (40, 64, PIECE, None),
    "a piece and one": (40, 64, PIECE + 1, 9),
    "no rows": (0, 32, 50, None),
    "pieces": pytest.param((136, 48, 2 * PIECE + 33, None), marks=slow),
    "large": pytest.param((65, 96, 4096, 64), marks=slow),
}
"""Positions, width, vocabulary, positions at once."""


def _head(head: type[LMHead], shape: tuple[Any, ...], dtype: torch.dtype) -> Results:
    """Negative log-likelihoods, and gradients of hidden states and the matrix."""
    n, width, vocab, chunk = shape
    hidden, weight, grad_n = draw(n, width), draw(vocab, width) / width**0.5 * 2, draw(n, seed=1)
    labels_n = torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(n))
    # Inputs are rounded first, so that the products alone are compared.
    hidden, weight = (x.bfloat16().to(FP64 if dtype == FP64 else FP32).requires_grad_() for x in (hidden, weight))
    with torch.autocast("cpu", dtype=BF16, enabled=dtype == BF16):
        nll_n = head(weight).nll(hidden, labels_n, chunk and chunk * vocab)
    gradients = torch.autograd.grad((nll_n * grad_n).sum(), (hidden, weight))
    return {"nll": nll_n.detach(), "hidden": gradients[0], "weight": gradients[1]}


@pytest.mark.parametrize("shape", _named(HEADS))
def test_the_head(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    """In pieces of the vocabulary and chunks of positions."""
    found, torchs, exact = _head(CPUHead, shape, dtype), _head(LMHead, shape, dtype), _head(LMHead, shape, FP64)
    assert failures(found, torchs, exact, 1e-6) == []


def test_a_control_a_broken_head_is_noticed(dtype: torch.dtype) -> None:
    class Late(CPUHead):
        def weight_grad(self, logit_grad_nP: Tensor, scaled_nD: Tensor, total_VD: Tensor | None) -> Tensor:
            return super().weight_grad(logit_grad_nP, scaled_nD.roll(1, 0), total_VD)

    shape = (40, 64, 300, None)
    failed = failures(_head(Late, shape, dtype), _head(LMHead, shape, dtype), _head(LMHead, shape, FP64), 1e-6)
    assert [failure.split(":")[0] for failure in failed] == ["weight"]


@pytest.mark.parametrize("size", [10.0, 64.0])
def test_labels_that_are_certain_and_impossible(size: float, dtype: torch.dtype) -> None:
    """The loss of a certain label is 0, as is its gradient; that of an impossible one is the distance of the logits."""
    weight = torch.zeros(20, 16)
    weight[3, 0], weight[4, 0] = size, -size
    hidden = torch.zeros(2, 16)
    hidden[:, 0] = 2.0
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype=BF16, enabled=dtype == BF16):
        nll_n = CPUHead(weight).nll(hidden, torch.tensor([3, 4]))
    nll_n.sum().backward()
    certain, impossible = nll_n.tolist()
    assert 0 <= certain < 1e-6
    assert impossible == pytest.approx(4 * size)
    assert hidden.grad is not None
    assert hidden.grad[0].abs().max() < 1e-6
    assert hidden.grad[1, 0] == pytest.approx(2 * size)


@pytest.mark.parametrize("label", [IGNORE, -1, 50])
def test_labels_outside_the_vocabulary_are_refused(label: int, dtype: torch.dtype) -> None:
    """The kernel would read memory that is not there."""
    hidden, weight, labels_n = draw(9, 32), draw(50, 32), torch.arange(9)
    labels_n[3] = label
    with torch.autocast("cpu", dtype=BF16, enabled=dtype == BF16), pytest.raises(AssertionError, match="labels"):
        CPUHead(weight).nll(hidden, labels_n)


def test_a_head_that_is_frozen_unlabelled_or_not_a_number(dtype: torch.dtype) -> None:
    hidden, weight, labels_n = draw(9, 32), draw(50, 32), torch.arange(9)
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype=BF16, enabled=dtype == BF16):
        loss, count = cross_entropy(hidden[None], CPUHead(weight), labels_n[None])
        loss.backward()
        assert (count, weight.grad) == (9, None)
        assert hidden.grad is not None
        with torch.no_grad():
            some_1n = torch.where(labels_n % 2 == 0, labels_n, IGNORE)[None]
            logps, torchs = (token_logps(hidden[None], head(weight), some_1n) for head in (CPUHead, LMHead))
            assert torch.equal(logps[0, 1::2], torch.zeros(4))
            torch.testing.assert_close(logps, torchs, rtol=0, atol=4 * FLOOR[dtype] * float(torchs.abs().max()))
            broken = hidden.detach().clone()
            broken[4, 7] = torch.nan
            assert CPUHead(weight).nll(broken, labels_n).isnan().tolist() == [i == 4 for i in range(9)]


def test_a_head_in_bf16_is_refused(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=BF16, enabled=dtype == BF16), pytest.raises(AssertionError, match="expected fp32"):
        CPUHead(draw(50, 32).to(FP64)).prepare(dtype)


# -- whether they are there --------------------------------------------------------------------------------------------


def test_dtypes_without_kernels() -> None:
    assert not cpu_train.available(FP64)
    assert not cpu_train.available(torch.float16)


# -- the head with a teacher -------------------------------------------------------------------------------------------

DISTILLED = {
    "one softmax": (37, 32, 500, 500, None, 1.0),
    "temperature": (37, 48, PIECE + 1, PIECE + 1, None, 2.5),
    "padded heads": (9, 32, PIECE - 1, PIECE + 40, PIECE - 9, 1.0),
}
"""Positions, width, ids of the student, of the teacher, and of the tokenizer; temperature."""


def _distilled(
    head: type[LMHead], shape: tuple[Any, ...], dtype: torch.dtype, name: str, stored: bool, **options: Any
) -> Results:
    """Losses, and gradients of the student's hidden states and matrix."""
    n, width, vocab, teacher_vocab, cut, temperature = shape
    like = FP64 if dtype == FP64 else FP32
    draws = draw(n, width), draw(vocab, width) / width**0.5 * 3, draw(n, 64), draw(teacher_vocab, 64) / 4
    hidden, weight, known, known_weight = (x.bfloat16().to(like) for x in draws)
    labels_n = torch.randint(cut or vocab, (n,), generator=torch.Generator().manual_seed(n))
    ids, logits, tails = most_likely(known.float() @ known_weight.float().T[:, : cut or vocab], 6, (temperature,))
    labels_n[: n // 2] = ids[: n // 2, 2]  # labels among the stored ids, and others
    teacher = LiveTeacher(known[None], head(known_weight))
    if stored:
        teacher = StoredTeacher(ids[None], logits[None].to(like), tails[None, :, 0].to(like))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", dtype=BF16, enabled=dtype == BF16):
        d = Divergence(name, temperature, 0.3, cut)
        terms = distillation_terms(hidden[None], head(weight), labels_n[None], teacher, d, 0.3, **options)
    gradients = torch.autograd.grad((terms[0] * draw(n, seed=1)).sum(), (hidden, weight))
    return dict(zip(("loss", "nll", "divergence"), (x.detach()[0] for x in terms), strict=True)) | {
        "hidden": gradients[0],
        "weight": gradients[1],
    }


@pytest.mark.parametrize("source", ["stored forward", "stored jsd", "live forward"])
@pytest.mark.parametrize("shape", _named(DISTILLED))
def test_the_head_with_a_teacher(shape: tuple[Any, ...], source: str, dtype: torch.dtype) -> None:
    kind, name = source.split()
    compared = [(CPUHead, dtype), (LMHead, dtype), (LMHead, FP64)]
    found, torchs, exact = (_distilled(head, shape, of, name, kind == "stored") for head, of in compared)
    assert failures(found, torchs, exact, 1e-5) == []
    chunks = _distilled(CPUHead, shape, dtype, name, kind == "stored", max_logits=5 * shape[2])
    assert failures(chunks, torchs, exact, 1e-5) == []


def test_a_control_a_kernel_that_forgets_the_tail_is_noticed(dtype: torch.dtype) -> None:
    shape = DISTILLED["one softmax"]
    without = _distilled(CPUHead, (*shape[:4], 400, 1.0), dtype, "forward", True)
    torchs, exact = (_distilled(LMHead, shape, of, "forward", True) for of in (dtype, FP64))
    assert failures(without, torchs, exact, 1e-5)


def test_rows_without_labels_have_no_loss_and_no_gradient() -> None:
    hidden, weight = draw(3, 32).requires_grad_(), draw(50, 32)
    labels_n = torch.full((1, 3), IGNORE)
    for teacher in (
        LiveTeacher(draw(1, 3, 32), CPUHead(weight)),
        StoredTeacher(torch.zeros(1, 3, 2, dtype=torch.int64), torch.zeros(1, 3, 2), torch.full((1, 3), -1.0)),
    ):
        terms = distillation_terms(hidden[None], CPUHead(weight), labels_n, teacher, Divergence(), 0.5)
        assert all(x.tolist() == [[0.0] * 3] for x in terms)
        assert not torch.autograd.grad(terms[0].sum(), hidden)[0].any()


def test_stored_ids_outside_the_vocabulary_are_refused() -> None:
    """The kernel would read and write memory that is not there."""
    hidden, weight, labels_n = draw(3, 32), draw(50, 32), torch.arange(3)
    teacher = StoredTeacher(torch.full((1, 3, 2), 50), torch.zeros(1, 3, 2), torch.full((1, 3), -1.0))
    with pytest.raises(AssertionError, match="stored ids"):
        distillation_terms(hidden[None], CPUHead(weight), labels_n[None], teacher, Divergence(), 0.5)
