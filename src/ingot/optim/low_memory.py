"""Adam whose moments are stored in 16 or 8 bits.

A moment is read, updated and rounded again in spans, by the kernel of full precision, so only a span of it is ever
fp32. Weights and gradients stay fp32.

`bf16` rounds stochastically. The second moment changes by 1 - beta2 of itself in a step, less than half the distance of
two bf16 numbers if beta2 > 0.996, so the nearest number would be the old one forever. The random bits are a hash of the
moment, its weight and the step: the same on every rank and device and in a resumed run, without a generator whose state
would have to be saved.

`8bit` is blockwise and dynamic (Dettmers et al. 2022, arXiv:2110.02861): 256 elements share a scale, and a code of 8
bits is an index of a table with dense small numbers. Table, scales and dequantisation are torchao's.
"""

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ingot.core.errors import UserError
from ingot.optim.adam import Adam
from ingot.optim.settings import BLOCK, has_codes

MOMENTS = ("exp_avg", "exp_avg_sq")
_SPAN = 1 << 20
"""Elements that are fp32 at a time; a multiple of BLOCK."""


class Codec(Protocol):
    """How a moment is stored."""

    def initial(self, parameter: Tensor, name: str) -> dict[str, Tensor]:
        """The tensors that store a moment of zeros, by name."""
        ...

    def read(self, state: dict[str, Tensor], name: str, span: slice) -> Tensor:
        """A span of a moment, fp32."""
        ...

    def rounded(self, moment_n: Tensor, state: dict[str, Tensor], name: str, weight_n: Tensor) -> dict[str, Tensor]:
        """What stores a span of a moment, by the names of `initial`; `weight_n` is that of the weights."""
        ...


class LowMemoryAdam(Adam):
    """Adam or AdamW with stored moments of a codec.

    Args:
        codec: "bf16" or "8bit"; the others as in `Adam`.

    Raises:
        UserError: the codec needs an extra that is not installed.
    """

    def __init__(self, codec: str, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._codec: Codec = BF16() if codec == "bf16" else EightBits()

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": super().initial_state(parameter[:0])["step"]}
        for name in MOMENTS:
            state |= self._codec.initial(parameter, name)
        return state

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        divisor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        for parameter, state in zip(parameters, states, strict=True):
            assert parameter.grad is not None
            flat_n, gradient_n, count = parameter.view(-1), parameter.grad.reshape(-1), state["step"]
            for span in _spans(len(flat_n)):
                weight_n, count = flat_n[span], state["step"].clone()
                first, second = (self._codec.read(state, name, span).to(flat_n.dtype) for name in MOMENTS)
                self._kernel(group, [weight_n], [gradient_n[span]], [first], [second], [count], divisor, found_inf)
                for name, moment_n in zip(MOMENTS, (first, second), strict=True):
                    for stored, new in self._codec.rounded(moment_n.float(), state, name, weight_n).items():
                        old = _part(state[stored], parameter, span)
                        old.copy_(new if found_inf is None else torch.where(found_inf > 0, old, new))
            state["step"].copy_(count)


class BF16:
    """Moments in bf16, rounded stochastically."""

    def initial(self, parameter: Tensor, name: str) -> dict[str, Tensor]:
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16)}

    def read(self, state: dict[str, Tensor], name: str, span: slice) -> Tensor:
        return state[name].view(-1)[span].float()

    def rounded(self, moment_n: Tensor, state: dict[str, Tensor], name: str, weight_n: Tensor) -> dict[str, Tensor]:
        return {name: round_stochastically(moment_n, state["step"], weight_n.float())}


class EightBits:
    """Moments as codes of 8 bits and an fp32 scale for every 256; those of small parameters are fp32."""

    def __init__(self) -> None:
        self._torchao = _torchao()

    def initial(self, parameter: Tensor, name: str) -> dict[str, Tensor]:
        if not has_codes(parameter.numel()):
            return {name: torch.zeros_like(parameter, dtype=torch.float32)}
        codes, scale = torch.zeros_like(parameter, dtype=torch.uint8), parameter.new_zeros(parameter.numel() // BLOCK)
        return {name: codes, _scale(name): scale.float()}

    def read(self, state: dict[str, Tensor], name: str, span: slice) -> Tensor:
        stored_n = state[name].view(-1)[span]
        if stored_n.dtype != torch.uint8:
            return stored_n.clone()
        table = _table(name == "exp_avg", stored_n.device)
        return self._torchao.dequant_with_qmap(stored_n, table, state[_scale(name)][_blocks(span)])

    def rounded(self, moment_n: Tensor, state: dict[str, Tensor], name: str, weight_n: Tensor) -> dict[str, Tensor]:
        if _scale(name) not in state:
            return {name: moment_n}
        scaled_n, scale = self._torchao.scale_tensor(moment_n, BLOCK)
        return {name: nearest_codes(scaled_n, _table(name == "exp_avg", moment_n.device)), _scale(name): scale}


def round_stochastically(x: Tensor, step: Tensor, salt: Tensor) -> Tensor:
    """fp32 numbers as one of the two nearest bf16 numbers each, the nearer one with the greater probability.

    Args:
        step: scalar; the random bits are a hash of it, the number and its salt (lowbias32, Wellons 2018).
        salt: fp32 numbers of the same shape, so that equal numbers are not rounded alike.
    """
    bits = x.view(torch.int32)
    hashed = bits + step.to(torch.int32) * -1640531535  # wraps around, as products do
    for more in (salt.view(torch.int32), 0):
        hashed = hashed ^ more
        for shift, factor in ((16, 2146121005), (15, -2073254261)):
            hashed = (hashed ^ _shifted(hashed, shift)) * factor
    return ((bits + _shifted(hashed, 16)) & -(1 << 16)).view(torch.float32).bfloat16()


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Unsigned shift to the right."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def nearest_codes(scaled: Tensor, table: Tensor) -> Tensor:
    """The index of the nearest number of a sorted table, uint8. (torchao's own search takes twice as long.)"""
    return torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, right=True).to(torch.uint8)


def _spans(size: int) -> Iterator[slice]:
    return (slice(first, min(first + _SPAN, size)) for first in range(0, size, _SPAN))


def _blocks(span: slice) -> slice:
    return slice(span.start // BLOCK, span.stop // BLOCK)


def _part(stored: Tensor, parameter: Tensor, span: slice) -> Tensor:
    """What stores the span: elements of codes and numbers, blocks of scales."""
    return stored.view(-1)[span if stored.numel() == parameter.numel() else _blocks(span)]


def _scale(name: str) -> str:
    return f"{name}_scale"


@cache
def _table(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(_torchao().create_dynamic_map(signed), device=device)


@cache
def _torchao() -> Any:
    """torchao's functions of quantised optimizer states.

    Raises:
        UserError: it is not installed.
    """
    logging.disable(logging.WARNING)  # it names every extension that was built for another machine
    try:
        from torchao.optim import quant_utils
    except ImportError:
        raise UserError(
            "optim.state = '8bit' needs the extra torchao; pip install 'ingot[torchao]', or use state = 'bf16'"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    return quant_utils
