"""Models, rows and the comparison of a backend with float64 that the tests of this directory share."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.backend import TORCH, Backend
from ingot.model.config import ModelSettings
from ingot.model.losses import IGNORE, token_logps
from ingot.model.transformer import Transformer, build, parse_taps
from tests.exactness import FLOOR, failures

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
Results = dict[str, Tensor]


class Model(NamedTuple):
    """A model, and whether the CPU's kernels compute it."""

    settings: dict[str, Any]
    on_cpu: bool = True
    vocab: int = 50
    prepare: Callable[[Transformer], None] = lambda model: None
    """Changes the model after it was built."""


class Rows(NamedTuple):
    """A batch."""

    rows: int
    tokens: int
    documents: int = 0
    """Documents in a row at most; 0: a row is one document, and documents are not given."""
    positions: bool = False
    """Whether positions are given, each token's own and out of order."""
    unlabelled: float = 0.0
    """Fraction of the tokens without a label."""
    chunk: int | None = None
    """Positions whose logits are held at once."""


def _adapted(kind: str, modules_to_save: tuple[str, ...] = ()) -> Callable[[Transformer], None]:
    """Adapters as if trained."""

    def prepare(model: Transformer) -> None:
        lora.add_adapters(model, AdapterSettings(kind=kind, rank=3, modules_to_save=modules_to_save), 0)
        with torch.no_grad():
            for layer in lora.adapters(model):
                layer.lora_B.normal_(std=0.1, generator=torch.Generator().manual_seed(1))

    return prepare


def _freeze_one(model: Transformer) -> None:
    model.get_parameter("layers.1.attention.k.weight").requires_grad_(False)


def _freeze_blocks(model: Transformer) -> None:
    for parameter in (*model.layers.parameters(), *model.norm.parameters()):
        parameter.requires_grad_(False)


_SHAPE = {"depth": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "context": 400}
_SCALING = {"factor": 4, "low_freq_factor": 1, "high_freq_factor": 4, "original_context": 16}
MODELS = {
    "llama": Model({}),
    "llama tied": Model({"tied": True}),
    "llama without groups": Model({"heads": 2, "kv_heads": 2, "width": 160, "ffn": 112}),
    "one head of keys": Model({"heads": 8, "kv_heads": 1, "width": 128, "ffn": 352, "depth": 1}),
    "heads of 64": Model({"heads": 2, "width": 128, "ffn": 48, "tied": True}),
    "heads of 128": Model({"heads": 2, "kv_heads": 1, "width": 256, "ffn": 304, "depth": 1}),
    "heads wider than the stream": Model({"heads": 3, "kv_heads": 3, "head_size": 48}),
    "heads of 256": Model({"heads": 1, "kv_heads": 1, "head_size": 256, "depth": 1}),
    "large vocabulary": Model({"depth": 1}, vocab=1569),
    "vocabulary of two": Model({"depth": 1, "tied": True}, vocab=2),
    "stretched positions": Model({"depth": 1, "rope_scaling": _SCALING}),
    "learned positions": Model({"positions": "learned"}),
    "mistral": Model({"family": "mistral", "window": 9}),
    "window of one": Model({"family": "mistral", "window": 1}),
    "frozen blocks": Model({"tied": True}, prepare=_freeze_blocks),
    "gpt2": Model({"family": "gpt2", "kv_heads": 4}, on_cpu=False),
    "qwen2": Model({"family": "qwen2"}, on_cpu=False),
    "qwen3": Model({"family": "qwen3"}, on_cpu=False),
    "gelu": Model({"activation": "gelu"}, on_cpu=False),
    "layer norm": Model({"norm": "layer"}, on_cpu=False),
    "odd sizes": Model({"width": 40, "heads": 5, "kv_heads": 1, "ffn": 52, "tied": True}, on_cpu=False),
    "heads of 272": Model({"heads": 1, "kv_heads": 1, "head_size": 272, "depth": 1}, on_cpu=False),
    "lora": Model({}, on_cpu=False, prepare=_adapted("lora")),
    "dora": Model({"family": "qwen2"}, on_cpu=False, prepare=_adapted("dora", ("embedding", "head"))),
    "one frozen matrix": Model({}, on_cpu=False, prepare=_freeze_one),
}
ROWS = {
    "one document": Rows(4, 32),
    "one token": Rows(12, 1),
    "two tokens": Rows(16, 2, unlabelled=0.5),
    "ragged": Rows(3, 33, unlabelled=0.6),
    "documents": Rows(3, 40, documents=3),
    "many documents": Rows(2, 71, documents=20, unlabelled=0.3),
    "own positions": Rows(2, 17, documents=2, positions=True),
    "chunks": Rows(5, 23, chunk=20),
    "long": Rows(2, 150, documents=2),
}


def make(name: str, dtype: torch.dtype = FP32) -> Transformer:
    """A model in fp32 or fp64, as if trained: gains differ from 1, biases from 0."""
    model = build(ModelSettings(**{**_SHAPE, **MODELS[name].settings}).resolve(MODELS[name].vocab), 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    MODELS[name].prepare(model)
    return model.to(dtype)


def batch(rows: Rows, vocab: int) -> dict[str, Tensor]:
    """Inputs of a forward pass, and `labels_BT`."""
    generator = torch.Generator().manual_seed(rows.rows + rows.tokens)
    shape = rows.rows, rows.tokens
    ids_BT, labels_BT = torch.randint(vocab, (2, *shape), generator=generator)
    labels_BT[torch.rand(shape, generator=generator) < rows.unlabelled] = IGNORE
    found = {"ids_BT": ids_BT, "labels_BT": labels_BT}
    if rows.documents:
        found["documents_BT"] = torch.randint(rows.documents, shape, generator=generator).sort(dim=1).values
    if rows.positions:
        found["positions_BT"] = torch.randint(2 * rows.tokens, shape, generator=generator)
    return found


def compute(
    model: Transformer, rows: Rows, dtype: torch.dtype, taps: frozenset[str] = frozenset(), device: str = "cpu"
) -> Results:
    """Hidden states, log-probabilities, taps, and every gradient of a random function of them all, in float64.

    Args:
        dtype: of products; bf16 under autocast, others as the parameters are.
    """
    model = model.to(device)
    given = {name: tensor.to(device) for name, tensor in batch(rows, model.config.vocab).items()}
    labels_BT = given.pop("labels_BT")
    max_logits = None if rows.chunk is None else rows.chunk * model.config.vocab
    torch.manual_seed(0)  # dropout
    with torch.autocast(device, dtype=BF16, enabled=dtype == BF16):
        out = model(**given, taps=taps)
        logps_BT = token_logps(out.hidden, out.head, labels_BT, max_logits=max_logits)
    outputs = {"hidden": out.hidden, "logps": logps_BT, **out.taps}
    generator = torch.Generator().manual_seed(3)
    total = torch.zeros((), dtype=FP64, device=device)
    for name in sorted(outputs):
        weights = torch.randn(outputs[name].shape, generator=generator, dtype=FP64).to(device)
        total = total + (outputs[name].double() * weights).sum() * (1.0 if name == "logps" else 0.1)
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {name: x.detach().to("cpu", FP64) for name, x in (outputs | gradients).items()}


@cache
def expected(model: str, rows: str, dtype: torch.dtype, taps: frozenset[str], device: str) -> Results:
    """What PyTorch computes."""
    return compute(make(model, FP64 if dtype == FP64 else FP32), ROWS[rows], dtype, taps, device)


def broken(
    backend: Backend,
    model: str,
    rows: str,
    dtype: torch.dtype,
    taps: frozenset[str] = frozenset(),
    *,
    supported: bool,
    device: str = "cpu",
    factor: float = 1.3,
) -> list[str]:
    """How a backend breaks its contract for a model and rows; nothing where it keeps it.

    Where it supports them its numbers are as near to float64 as PyTorch's, else they equal PyTorch's to the bit.

    Args:
        dtype: of products.
        supported: whether the backend is to support them.
        factor: of PyTorch's error that is allowed.
    """
    candidate = make(model).to(device)
    candidate.backend = backend
    ids_BT = batch(ROWS[rows], candidate.config.vocab)["ids_BT"].to(device)
    with torch.autocast(device, dtype=BF16, enabled=dtype == BF16):
        found_support = backend.supports(candidate, ids_BT, parse_taps(taps, candidate.config.depth))
    if found_support != supported:
        return [f"supports: {found_support}, expected {supported}"]
    found = compute(candidate, ROWS[rows], dtype, taps, device)
    torchs = expected(model, rows, dtype, taps, device)
    if not supported:
        assert found.keys() == torchs.keys()
        return [f"{name} differs from torch's" for name in found if not torch.equal(found[name], torchs[name])]
    return failures(found, torchs, expected(model, rows, FP64, taps, "cpu"), FLOOR[dtype], factor)


def same(model: Transformer, other: Transformer, rows: Rows, dtype: torch.dtype) -> bool:
    """Whether both models give the same bits."""
    found, wanted = compute(model, rows, dtype), compute(other, rows, dtype)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


def reference_of(model: Transformer) -> Transformer:
    """A copy that PyTorch computes."""
    copied = copy.deepcopy(model)
    copied.backend = TORCH
    return copied
