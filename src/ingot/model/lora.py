"""Adapters as modules: a linear layer that adds a correction of low rank to a frozen matrix.

    lora, rslora    y = W x + b + s B A drop(x)                                   Hu et al. 2021, arXiv:2106.09685
    dora            y = m / |W + s B A| * (W + s B A) x + b, the norm detached    Liu et al. 2024, arXiv:2402.09353

A (r x in) starts uniform in +-1 / sqrt(in), which is Kaiming's with a = sqrt(5), and B at zero, so the first output is
the frozen model's to the bit, the first gradient of A is zero, and that of B is not. DoRA's |.| is the length of each
row, and m starts as that of W; by the paper's section 4.3 no gradient goes through the length. With dropout its whole
correction reads the dropped input, so the frozen product is a path of its own.

An adapted layer is still an `nn.Linear` under its old name, holding the same parameters and a few more (`lora_A`,
`lora_B`, `lora_magnitude`): names in checkpoints, the mapping to other layouts and the rest of the model do not know
adapters. The new ones are fp32 even where the frozen matrix is not (`hold`).

An embedding or a head that is trained whole is a copy under the name of the original, which stays beside it as
`frozen`. So whatever reads `embedding.weight` (losses that call the head in chunks, decoding, checkpoints, groups of an
optimizer) reads what is trained, and without adapters the original takes its place.

Merging keeps a copy of what it overwrites, and undoing it puts the copy back. Rejected: subtracting what was added,
which leaves rounding behind.

Shapes: R rank, I inputs, O outputs.
"""

import contextlib
import copy
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.adapter_config import AdapterSettings, adapted_layers, linear_layers, whole_modules
from ingot.model.dropout import dropout
from ingot.model.transformer import Transformer


class Held(nn.Linear):
    """A frozen linear layer whose matrix may be kept in fewer bits than what it is multiplied with."""

    def __init__(self, frozen: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = frozen.in_features, frozen.out_features
        self.weight, self.bias = frozen.weight, frozen.bias

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """... x I to ... x O."""
        return F.linear(x, self.matrix(x), self.bias)

    def matrix(self, x: Tensor) -> Tensor:
        """The matrix as a product with x wants it: autocast casts both sides itself."""
        return self.weight if torch.is_autocast_enabled(x.device.type) else self.weight.to(x.dtype)

    def effective(self) -> Tensor:
        """The matrix it multiplies with at present; in an adapted layer the frozen one, or that and the correction."""
        return self.weight


class Adapted(Held):
    """A frozen linear layer with its correction.

    Args:
        frozen: the layer; its parameters are taken over as they are, not copied.
        settings: kind, rank, strength, dropout.
        generator: draws A, on the CPU, so that every machine starts alike.
    """

    def __init__(self, frozen: nn.Linear, settings: AdapterSettings, generator: torch.Generator | None = None):
        super().__init__(frozen)
        self.scale, self.dropout, self.on = settings.scale, settings.dropout, True
        self._original: Tensor | None = None
        dtype, device = torch.promote_types(self.weight.dtype, torch.float32), self.weight.device
        a_RI = torch.empty(settings.rank, self.in_features, dtype=dtype)
        a_RI.uniform_(-1 / math.sqrt(self.in_features), 1 / math.sqrt(self.in_features), generator=generator)
        self.lora_A = nn.Parameter(a_RI.to(device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, settings.rank, dtype=dtype, device=device))
        dora = settings.kind == "dora"
        squares_O = self.weight.detach().to(dtype).square().sum(1) if dora else None
        self.register_buffer("squares_O", squares_O, persistent=False)
        self.lora_magnitude = None if squares_O is None else nn.Parameter(squares_O.sqrt())

    def forward(self, x: Tensor) -> Tensor:
        """... x I to ... x O."""
        plain = super().forward(x)
        if not self.on or self._original is not None:
            return plain
        dropped = dropout(x, self.dropout, self.training)
        change = F.linear(F.linear(dropped, self.lora_A), self.lora_B) * self.scale
        if self.lora_magnitude is None:
            return plain + change
        factor_O = self.lora_magnitude / self._norm_O()
        if dropped is not x:
            product = F.linear(dropped, self.matrix(dropped))
        else:
            product = plain if self.bias is None else plain - self.bias
        return plain + (factor_O - 1).to(plain.dtype) * product + factor_O.to(plain.dtype) * change

    def merged(self) -> Tensor:
        """The matrix that does what the frozen one and its correction do, O x I in the adapter's precision."""
        return merged_weight(self.weight, self.lora_A, self.lora_B, self.scale, self.lora_magnitude)

    def effective(self) -> Tensor:
        return self.merged() if self.on and self._original is None else self.weight

    @torch.no_grad()
    def merge(self) -> None:
        """Write the merged matrix over the frozen one; the correction is not added any more."""
        if self._original is None:
            merged = self.merged()
            self._original = self.weight.detach().clone()
            self.weight.copy_(merged)

    @torch.no_grad()
    def unmerge(self) -> None:
        """The frozen matrix again, to the bit."""
        if self._original is not None:
            self.weight.copy_(self._original)
            self._original = None

    @torch.no_grad()
    def _norm_O(self) -> Tensor:
        """Length of each row of W + s B A, without making that matrix.

        |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b, which with b = 0 is |w|^2 to the bit.
        """
        assert isinstance(self.squares_O, Tensor)
        with torch.autocast(self.weight.device.type, enabled=False):
            a_RI, b_OR = self.lora_A, self.lora_B * self.scale
            cross_OR = self.weight.to(a_RI.dtype) @ a_RI.T
            return _lengths(self.squares_O + (b_OR * (2 * cross_OR + b_OR @ (a_RI @ a_RI.T))).sum(1))


def merged_weight(
    weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, magnitude_O: Tensor | None = None
) -> Tensor:
    """W + s B A; with a magnitude, its rows brought to that length. Computed in A's precision.

    Gradients go through the lengths: only the loss of a forward pass takes them as constants (Liu et al. 2024, section
    4.3), and a penalty on the merged weights is what it says.
    """
    with torch.autocast(weight_OI.device.type, enabled=False):
        whole_OI = weight_OI.to(a_RI.dtype) + scale * (b_OR @ a_RI)
    if magnitude_O is None:
        return whole_OI
    return whole_OI * (magnitude_O / _lengths(whole_OI.square().sum(1)))[:, None]


def _lengths(squares_O: Tensor) -> Tensor:
    """Of rows, from their squares. A row of zeros, as padded matrices have, is divided by its length and stays 0."""
    return squares_O.clamp_min(1e-12).sqrt()


def adapt(model: Transformer, settings: AdapterSettings, seed: int) -> None:
    """Freeze a model and give its matrices adapters, which alone are trained from then on, but for what the settings
    say is trained whole: a copy of it is.

    Raises:
        UserError: a pattern of `targets` matches nothing.
    """
    names = adapted_layers(settings, model.config)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        parent, _, child = name.rpartition(".")
        frozen = model.get_submodule(name)
        assert type(frozen) is nn.Linear, f"{name} is {type(frozen).__name__}, expected a linear layer without adapter"
        setattr(model.get_submodule(parent), child, Adapted(frozen, settings, generator))
    for name in whole_modules(settings, model.config):
        module, original = model.get_submodule(name), model.get_parameter(f"{name}.weight")
        module.weight, module.frozen = nn.Parameter(original.detach().clone()), original


def hold(model: Transformer, dtype: torch.dtype) -> None:
    """Keep the frozen matrices inside blocks in the precision that they are multiplied in: half the memory, and under
    autocast, which would round them to it anyway, the same numbers."""
    for name in linear_layers(model.config):
        parent, _, child = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if not isinstance(layer, Held):
            layer = Held(layer)
            setattr(model.get_submodule(parent), child, layer)
        layer.weight.data = layer.weight.data.to(dtype)


def adapters(model: nn.Module) -> list[Adapted]:
    """All adapted layers."""
    return [module for module in model.modules() if isinstance(module, Adapted)]


def whole(model: nn.Module) -> list[nn.Module]:
    """All modules that are trained whole."""
    return [module for module in model.modules() if hasattr(module, "frozen")]


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it the model is the frozen one, to the bit."""
    before = [(layer, layer.on) for layer in adapters(model)]
    trained = [(module, module.get_parameter("weight")) for module in whole(model)]
    try:
        _switch_off(model)
        yield
    finally:
        for layer, on in before:
            layer.on = on
        for module, weight in trained:
            module.weight = weight


def reference(model: Transformer) -> Transformer:
    """The frozen model beside the adapted one: modules of its own, in eval mode, over the very same parameters."""
    view = copy.deepcopy(model, {id(p): p for p in model.parameters()}).eval()
    _switch_off(view)
    return view


def _switch_off(model: nn.Module) -> None:
    for layer in adapters(model):
        layer.on = False
    for module in whole(model):
        module.weight = module.frozen


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What the model computes with, under the names of a model without adapters: parameters, or, where a matrix has a
    correction, both merged, a function of the correction that gradients go through."""
    own = ((n, p) for n, p in model.named_parameters() if "lora_" not in n and not n.endswith(".frozen"))
    found: dict[str, Tensor] = dict(own)
    merged = {f"{n}.weight": m.merged() for n, m in model.named_modules() if isinstance(m, Adapted)}
    return found | merged


def merge(model: nn.Module) -> None:
    """Write every correction into its matrix (for fast generation, say); `unmerge` undoes it. What is trained whole is
    in its place already, and stays there."""
    for layer in adapters(model):
        layer.merge()


def unmerge(model: nn.Module) -> None:
    """The frozen matrices again, to the bit, and the corrections beside them."""
    for layer in adapters(model):
        layer.unmerge()


@torch.no_grad()
def fold(model: nn.Module) -> None:
    """Merge for good: the model is as one that never had adapters, all of it trainable."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Adapted):
                with torch.device("meta"):
                    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
                layer.weight.copy_(layer.merged())
                plain.weight, plain.bias = layer.weight, layer.bias
                setattr(parent, name, plain)
    for module in whole(model):
        del module.frozen
    model.requires_grad_(True)
