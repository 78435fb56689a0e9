"""Models, prompts and the comparison of decoding with full forward passes that the tests of generation share."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ingot.infer.decoder import Decoder, DecodeState
from ingot.infer.ops import TorchOps
from ingot.model.backend import TORCH, Backend
from ingot.model.config import ModelSettings
from ingot.model.transformer import Transformer, build
from tests.exactness import FLOOR, failures

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
VOCAB = 37


class Case(NamedTuple):
    """Prompts that are continued by random ids."""

    lengths: tuple[int, ...]
    """Of the prompts."""
    new: int
    """Tokens of each continuation."""
    samples: int = 1
    dropped_at: int | None = None
    """The step before which every second row is dropped."""


RAGGED = Case((12, 3, 1, 9), 18)
CASES = [RAGGED, Case((8,), 12), Case((5, 11, 2), 14, samples=2, dropped_at=6), Case((9, 9, 9), 8, dropped_at=3)]


class WithOps(Backend):
    """Decodes with operations of that class."""

    def __init__(self, kind: type[TorchOps]):
        self._kind = kind

    def decode_ops(self, device: torch.device, dtype: torch.dtype, stream: torch.dtype) -> TorchOps:
        return self._kind(dtype, stream)


def make(dtype: torch.dtype = FP32, **settings: Any) -> Transformer:
    """A model as if trained: gains and biases, too, differ from their first values."""
    shape = {"depth": 2, "width": 48, "heads": 6, "context": 40}
    model = build(ModelSettings(**{**shape, **settings}).resolve(VOCAB), seed=2, dtype=dtype)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.mul_(3).add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def logits(model: Transformer, ids_BT: Tensor, dtype: torch.dtype = FP32) -> Tensor:
    """Of the full forward pass by PyTorch; in bf16 under autocast."""
    plain = copy.deepcopy(model)
    plain.backend = TORCH
    device = ids_BT.device.type
    with torch.inference_mode(), torch.autocast(device, dtype=BF16, enabled=dtype == BF16):
        return plain(ids_BT).logits


def _ids(case: Case) -> Tensor:
    """Prompts and continuations without a gap, R x (longest prompt + new); samples share their prompt."""
    generator, rows = torch.Generator().manual_seed(0), len(case.lengths) * case.samples
    ids_RT = torch.randint(VOCAB, (rows, max(case.lengths) + case.new), generator=generator)
    for row in range(rows):
        first, length = row - row % case.samples, case.lengths[row // case.samples]
        ids_RT[row, :length] = ids_RT[first, :length]
    return ids_RT


def steps(decoder: Decoder, case: Case) -> list[tuple[Tensor, Tensor]]:
    """The rows in the batch and their logits after the prompts, then after each new token."""
    ids_RT, lengths_B = _ids(case), torch.tensor(case.lengths)
    prompts_BT = ids_RT[:: case.samples, : max(case.lengths)].clone()
    prompts_BT[torch.arange(prompts_BT.shape[1]) >= lengths_B[:, None]] = 0
    lengths_R, rows = lengths_B.repeat_interleave(case.samples), torch.arange(len(ids_RT))
    device = decoder.device
    with torch.inference_mode():
        state = DecodeState(decoder, prompts_BT.to(device), lengths_B.to(device), case.new, case.samples)
        found = [(rows, state.logits_BV.clone().cpu())]
        for step in range(case.new):
            if step == case.dropped_at:
                rows = rows[::2]
                state.keep(rows.to(device))
            state.run(ids_RT[rows, lengths_R[rows] + step].to(device))
            found.append((rows, state.logits_BV.clone().cpu()))
    return found


def broken(decoder: Decoder, model: Transformer, case: Case, dtype: torch.dtype) -> list[str]:
    """How decoding differs from the full forward pass in float64 more than training in that precision does."""
    ids_RT = _ids(case)
    lengths_R = torch.tensor(case.lengths).repeat_interleave(case.samples)
    exact_RTV = logits(copy.deepcopy(model).to("cpu", FP64), ids_RT)
    torchs_RTV = logits(copy.deepcopy(model).to("cpu"), ids_RT, dtype)
    found, exact, torchs = [], [], []
    for step, (rows, logits_BV) in enumerate(steps(decoder, case)):
        position_B = lengths_R[rows] - 1 + step
        found.append(logits_BV)
        exact.append(exact_RTV[rows, position_B])
        torchs.append(torchs_RTV[rows, position_B])
    together = [{"logits": torch.cat(parts).double()} for parts in (found, torchs, exact)]
    return failures(*together, 2 * FLOOR[dtype])
