"""Adapters: linear layers that add a trained low-rank update to a frozen weight.

    lora, rslora    y = W x + b + s B A drop(x)                                   Hu et al. 2021, arXiv:2106.09685
    dora            y = m / |W + s B A| * (W + s B A) x + b, the norm detached    Liu et al. 2024, arXiv:2402.09353

A (r x in) starts uniform in +-1 / sqrt(in), which is Kaiming's with a = sqrt(5), and B at zero. So the first output
equals the frozen model's bit for bit, and the first gradient is zero for A and not for B. DoRA's |.| is the norm of
each row, and m starts as the row norms of W.

An adapted layer keeps its name and is still an `nn.Linear`, with the additional parameters `lora_A`, `lora_B` and
`lora_magnitude`, so checkpoints, conversion and the rest of the model need no special case for adapters. These
parameters are fp32 even if the frozen weight is not (`cast_frozen`).

An embedding or head that is trained in full (`modules_to_save`) is a copy under the original's name; the original stays
next to it as `frozen`, and `reference` uses it.

Shapes: R rank, I inputs, O outputs.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.adapter_config import AdapterSettings, adapted_layers, linear_layers, modules_to_save
from ingot.model.transformer import Transformer


class FrozenLinear(nn.Linear):
    """A frozen linear layer whose weight may be stored in a lower precision than its inputs have."""

    def __init__(self, layer: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """... x I to ... x O."""
        return F.linear(x, self.cast_weight(x), self.bias)

    def cast_weight(self, x: Tensor) -> Tensor:
        """The weight in the dtype of x; under autocast, which casts both operands itself, as stored."""
        return self.weight if torch.is_autocast_enabled(x.device.type) else self.weight.to(x.dtype)

    def effective_weight(self) -> Tensor:
        """The weight that the layer multiplies by, its adapter included."""
        return self.weight


class LoRALinear(FrozenLinear):
    """A frozen linear layer with a low-rank update.

    Args:
        layer: its parameters are shared, not copied.
        settings: kind, rank, scale, dropout.
        generator: of the initial A; on the CPU, so that every device starts with the same values.
    """

    def __init__(self, layer: nn.Linear, settings: AdapterSettings, generator: torch.Generator | None = None):
        super().__init__(layer)
        self.scale, self.dropout, self.enabled = settings.scale, settings.dropout, True
        dtype, device = torch.promote_types(self.weight.dtype, torch.float32), self.weight.device
        a_RI = torch.empty(settings.rank, self.in_features, dtype=dtype)
        a_RI.uniform_(-1 / math.sqrt(self.in_features), 1 / math.sqrt(self.in_features), generator=generator)
        self.lora_A = nn.Parameter(a_RI.to(device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, settings.rank, dtype=dtype, device=device))
        squares_O = self.weight.detach().to(dtype).square().sum(1) if settings.kind == "dora" else None
        self.register_buffer("squares_O", squares_O, persistent=False)
        self.lora_magnitude = None if squares_O is None else nn.Parameter(squares_O.sqrt())

    def forward(self, x: Tensor) -> Tensor:
        """... x I to ... x O."""
        frozen = super().forward(x)
        if not self.enabled:
            return frozen
        dropped = F.dropout(x, self.dropout, self.training)
        update = F.linear(F.linear(dropped, self.lora_A), self.lora_B) * self.scale
        if self.lora_magnitude is None:
            return frozen + update
        factor_O = self.lora_magnitude / self._row_norms()
        if dropped is not x:  # DoRA rescales W x as well, and dropout applies to everything the adapter adds
            product = F.linear(dropped, self.cast_weight(dropped))
        else:
            product = frozen if self.bias is None else frozen - self.bias
        return frozen + (factor_O - 1).to(frozen.dtype) * product + factor_O.to(frozen.dtype) * update

    def merged_weight(self) -> Tensor:
        """The frozen weight with its update merged, O x I in the adapter's dtype."""
        return merged_weight(self.weight, self.lora_A, self.lora_B, self.scale, self.lora_magnitude)

    def effective_weight(self) -> Tensor:
        return self.merged_weight() if self.enabled else self.weight

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        """The norm of each row of W + s B A, O, without computing that matrix.

        No gradient flows through it (Liu et al. 2024, section 4.3).
        |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b, which for b = 0 equals |w|^2 bit for bit.
        """
        assert isinstance(self.squares_O, Tensor)
        with torch.autocast(self.weight.device.type, enabled=False):
            a_RI, b_OR = self.lora_A, self.lora_B * self.scale
            cross_OR = self.weight.to(a_RI.dtype) @ a_RI.T
            return _norms(self.squares_O + (b_OR * (2 * cross_OR + b_OR @ (a_RI @ a_RI.T))).sum(1))


def merged_weight(
    weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, magnitude_O: Tensor | None = None
) -> Tensor:
    """W + s B A in A's dtype; with a magnitude, its rows scaled to that norm.

    Here gradients flow through the row norms, unlike in the forward pass: a penalty on the merged weight depends on
    them.
    """
    with torch.autocast(weight_OI.device.type, enabled=False):
        merged_OI = weight_OI.to(a_RI.dtype) + scale * (b_OR @ a_RI)
    if magnitude_O is None:
        return merged_OI
    return merged_OI * (magnitude_O / _norms(merged_OI.square().sum(1)))[:, None]


def _norms(squares_O: Tensor) -> Tensor:
    """Row norms from squared norms; bounded below, so that rows of zeros, such as padding, stay zero."""
    return squares_O.clamp_min(1e-12).sqrt()


def add_adapters(model: Transformer, settings: AdapterSettings, seed: int) -> None:
    """Freeze a model and add adapters. Only these and copies of `modules_to_save` are trained.

    Raises:
        UserError: a pattern of `targets` matches no matrix.
    """
    names = adapted_layers(settings, model.config)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        parent, _, child = name.rpartition(".")
        layer = model.get_submodule(name)
        assert type(layer) is nn.Linear, f"{name} is {type(layer).__name__}, expected a linear layer without an adapter"
        setattr(model.get_submodule(parent), child, LoRALinear(layer, settings, generator))
    for name in modules_to_save(settings, model.config):
        module, original = model.get_submodule(name), model.get_parameter(f"{name}.weight")
        module.weight, module.frozen = nn.Parameter(original.detach().clone()), original


def cast_frozen(model: Transformer, dtype: torch.dtype) -> None:
    """Store the frozen weights of all blocks in `dtype`, in place.

    In autocast's dtype this halves their memory and changes no result, because autocast would round them anyway.
    """
    for name in linear_layers(model.config):
        parent, _, child = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if not isinstance(layer, FrozenLinear):
            layer = FrozenLinear(layer)
            setattr(model.get_submodule(parent), child, layer)
        layer.weight.data = layer.weight.data.to(dtype)


def adapters(model: nn.Module) -> list[LoRALinear]:
    """All layers that have an adapter."""
    return [module for module in model.modules() if isinstance(module, LoRALinear)]


def saved_modules(model: nn.Module) -> list[nn.Module]:
    """All modules that are trained in full next to the adapters (`modules_to_save`)."""
    return [module for module in model.modules() if hasattr(module, "frozen")]


def reference(model: Transformer) -> Transformer:
    """The frozen model without its adapters: a copy of the modules in eval mode that shares the parameters."""
    view = copy.deepcopy(model, {id(p): p for p in model.parameters()}).eval()
    for layer in adapters(view):
        layer.enabled = False
    for module in saved_modules(view):
        module.weight = module.frozen
    return view


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that a model computes with, under the names of a model without adapters.

    Weights with an adapter are merged; gradients flow to the adapter.
    """
    plain = {n: p for n, p in model.named_parameters() if "lora_" not in n and not n.endswith(".frozen")}
    return plain | {f"{n}.weight": m.merged_weight() for n, m in model.named_modules() if isinstance(m, LoRALinear)}


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Merge every adapter into its weight and remove it. Afterwards all parameters are trainable."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, LoRALinear):
                with torch.device("meta"):
                    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
                layer.weight.copy_(layer.merged_weight())
                plain.weight, plain.bias = layer.weight, layer.bias
                setattr(parent, name, plain)
    for module in saved_modules(model):
        del module.frozen
    model.requires_grad_(True)
