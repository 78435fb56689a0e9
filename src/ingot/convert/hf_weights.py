"""Converts the weights of a Hugging Face model directory to ingot's parameters, and back. No network.

Only safetensors are read, because loading a pickled `.bin` runs code. All names and shapes are checked against the
configuration before the first tensor is read from the memory-mapped files. Any float type is converted to fp32, of
which bf16 and fp16 are subsets.

`_layout` describes both directions: a Hugging Face tensor is a concatenation of ingot's parameters along the rows, and
in GPT-2, which stores matrices as [inputs, outputs], its transpose.

Ingot's own checkpoints have another format (`distributed/checkpoint.py`).
"""

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ingot.convert.directories import INDEX, SINGLE, model_weights
from ingot.convert.hf_config import CONFIG, Dtype, config_to_hf, read_config
from ingot.core.artifact import atomic_json
from ingot.core.errors import UserError, name_file
from ingot.model.adapter_config import linear_layers
from ingot.model.config import ModelConfig
from ingot.model.transformer import Transformer, empty

SHARD_BYTES = 5 * 10**9
"""Maximum size of a weight file, as in transformers."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Constants that older versions of transformers saved with the weights."""


@dataclass(frozen=True)
class _Entry:
    """The content of a Hugging Face tensor."""

    parameters: tuple[str, ...]
    """Names of ingot's parameters, concatenated along the rows."""
    transposed: bool = False
    """Whether the tensor is the transpose of the concatenation."""


def load(directory: Path, device: torch.device | str = "cpu") -> Transformer:
    """Load the model of a Hugging Face directory in fp32.

    Raises:
        UserError: as `read_config` and `read_weights`.
    """
    config = read_config(directory)
    model = empty(config, device, torch.float32)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in read_weights(directory, config):
            parameters[name].copy_(tensor)
    return model


def read_weights(directory: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, fp32 tensor) of each parameter of `Transformer(config)`, in the order of the files.

    Raises:
        UserError: no safetensors or two sets of them, a damaged file, or an unexpected, missing, misshapen or non-float
            tensor. All checks precede the first tensor, except that a stored tied head equals the embedding.
    """
    shapes = _shapes(config)
    layout = _layout(config, shapes)
    base = "transformer." if config.positions == "learned" else "model."
    locations: dict[str, tuple[Path, str]] = {}
    for file in model_weights(directory):
        with open_safetensors(file) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (not a mapping)
                name = stored if stored.startswith((base, "lm_head.")) else base + stored
                if name.endswith(_BUFFERS):
                    continue
                if name in locations:
                    raise UserError(f"{file}: found tensor {stored}, which is also in {locations[name][0].name}")
                if name not in layout:
                    raise UserError(f"{file}: found tensor {stored}, expected only those of the model in its {CONFIG}")
                locations[name] = (file, stored)
                _check(file, stored, tensors.get_slice(stored), layout[name], shapes)
    if missing := [name for name in layout if name not in locations and not _is_tied_head(name, config)]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{directory}: no tensor {missing[0]}{more}, expected all weights of its {CONFIG}")
    return _stream(locations, layout, shapes, config)


def write(
    directory: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    bos: int | None = None,
    eos: int | list[int] | None = None,
    pad: int | None = None,
    dtype: Dtype = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json and weights that transformers can load.

    Weights larger than `shard_bytes` are split into several files with an index. Not atomic: write into a temporary
    directory (`core.artifact.atomic_directory`).

    Args:
        directory: the directory to write to.
        config: the model's configuration.
        tensors: parameter name -> tensor, as in `named_parameters`; other entries are ignored.
        bos, eos, pad: ids of the special tokens, for config.json.
        dtype: type of the written weights.
        shard_bytes: maximum size of a file.

    Raises:
        UserError: transformers has no architecture for the model, or the directory already contains a model.
    """
    table = config_to_hf(config, bos=bos, eos=eos, pad=pad, dtype=dtype)
    directory.mkdir(parents=True, exist_ok=True)
    if existing := sorted(p.name for p in (*directory.glob("*.safetensors*"), *directory.glob(CONFIG))):
        raise UserError(f"{directory}: already contains {existing[0]}; choose another directory")
    shapes = _shapes(config)
    layout = {name: e for name, e in _layout(config, shapes).items() if not _is_tied_head(name, config)}
    target = getattr(torch, dtype)
    sizes = {name: sum(shapes[p].numel() for p in e.parameters) * target.itemsize for name, e in layout.items()}
    shards = _shards(sizes, shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        atomic_json(directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    for name, shard in zip(names, shards, strict=True):
        converted = {hf_name: _to_hf(layout[hf_name], tensors, target) for hf_name in shard}
        write_tensors(converted, directory / name)
        del converted
    atomic_json(directory / CONFIG, table)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the permissions of the umask; the library would make it private to its owner."""
    with name_file(path):
        save_file(tensors, path, metadata={"format": "pt"})
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def resize_embeddings(
    tensors: Mapping[str, Tensor], config: ModelConfig, vocab: int
) -> tuple[dict[str, Tensor], ModelConfig]:
    """Change the vocabulary size: remove the last rows, or add rows with the mean of all rows.

    With the mean, a new token is initially about as probable as an average token. A random row can be far more probable
    (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").

    Args:
        tensors: parameter name -> tensor; only the embedding and an untied head change.
        config: the model's configuration.
        vocab: the new size.

    Returns:
        The tensors and the configuration with the new size.
    """
    if vocab < 1:
        raise UserError(f"vocab: found {vocab}, expected at least 1")
    resized = dict(tensors)
    for name in ("embedding.weight", "head.weight"):
        if name in tensors:
            old_VW = tensors[name]
            mean_1W = old_VW.mean(dim=0, keepdim=True, dtype=torch.float64).to(old_VW.dtype)
            resized[name] = torch.cat((old_VW[:vocab], mean_1W.expand(max(0, vocab - len(old_VW)), -1)))
    return resized, config.model_copy(update={"vocab": vocab})


def linear_modules(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Hugging Face name of each linear module in blocks -> ingot's modules that it concatenates along the rows."""
    layers = linear_layers(config)
    layout = _layout(config, _shapes(config))
    modules = {name: tuple(p.removesuffix(".weight") for p in entry.parameters) for name, entry in layout.items()}
    return {name.removesuffix(".weight"): names for name, names in modules.items() if names[0] in layers}


def embedding_modules(config: ModelConfig) -> dict[str, str]:
    """Hugging Face names of the embedding and the head -> ingot's module, the same one for a tied head."""
    layout = _layout(config, _shapes(config))
    modules = {name.removesuffix(".weight"): e.parameters[0].removesuffix(".weight") for name, e in layout.items()}
    return {name: module for name, module in modules.items() if module in ("embedding", "head")}


def _layout(config: ModelConfig, shapes: Mapping[str, torch.Size]) -> dict[str, _Entry]:
    """Hugging Face tensor name -> content. Includes a tied head, because some files contain the copy."""
    gpt2 = config.positions == "learned"
    hf_modules = _GPT2 if gpt2 else _LLAMA
    layout: dict[str, _Entry] = {}
    for parameter in shapes:
        *path, module, role = parameter.split(".")
        layer = path[1] if path else None
        name = hf_modules[".".join([*path[2:], module])].format(layer=layer) + "." + role
        transposed = gpt2 and role == "weight" and layer is not None and not module.endswith("norm")
        previous = layout[name].parameters if name in layout else ()
        layout[name] = _Entry((*previous, parameter), transposed)
    layout.setdefault("lm_head.weight", _Entry(("embedding.weight",)))
    return layout


_GPT2 = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "attention_norm": "transformer.h.{layer}.ln_1",
    "attention.q": "transformer.h.{layer}.attn.c_attn",
    "attention.k": "transformer.h.{layer}.attn.c_attn",
    "attention.v": "transformer.h.{layer}.attn.c_attn",
    "attention.o": "transformer.h.{layer}.attn.c_proj",
    "ffn_norm": "transformer.h.{layer}.ln_2",
    "ffn.up": "transformer.h.{layer}.mlp.c_fc",
    "ffn.down": "transformer.h.{layer}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_LLAMA = {
    "embedding": "model.embed_tokens",
    "attention_norm": "model.layers.{layer}.input_layernorm",
    **{f"attention.{part}": f"model.layers.{{layer}}.self_attn.{part}_proj" for part in "qkvo"},
    **{f"attention.{part}_norm": f"model.layers.{{layer}}.self_attn.{part}_norm" for part in "qk"},
    "ffn_norm": "model.layers.{layer}.post_attention_layernorm",
    **{f"ffn.{part}": f"model.layers.{{layer}}.mlp.{part}_proj" for part in ("gate", "up", "down")},
    "norm": "model.norm",
    "head": "lm_head",
}
"""Ingot's module without the layer's number -> Hugging Face's module."""


def _shapes(config: ModelConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: p.shape for name, p in Transformer(config).named_parameters()}


def _is_tied_head(name: str, config: ModelConfig) -> bool:
    return config.tied and name == "lm_head.weight"


@contextlib.contextmanager
def open_safetensors(file: Path) -> Iterator[safe_open]:
    """Open a safetensors file; raises UserError if it is invalid."""
    try:
        with name_file(file), safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise UserError(f"{file}: not a readable safetensors file ({error}); download it again") from None


def _check(file: Path, stored: str, tensor: object, entry: _Entry, shapes: Mapping[str, torch.Size]) -> None:
    """Check the shape and type of a tensor from the header of its file."""
    expected = torch.Size((sum(shapes[p][0] for p in entry.parameters), *shapes[entry.parameters[0]][1:]))
    if entry.transposed:
        expected = torch.Size(reversed(expected))
    shape = list(tensor.get_shape())  # type: ignore[attr-defined]
    if shape != list(expected):
        raise UserError(f"{file}: tensor {stored} has shape {shape}, expected {list(expected)} by its {CONFIG}")
    if (dtype := tensor.get_dtype()) not in _FLOATS:  # type: ignore[attr-defined]
        raise UserError(f"{file}: tensor {stored} is of type {dtype}, expected one of {', '.join(_FLOATS)}")


def _stream(
    locations: Mapping[str, tuple[Path, str]],
    layout: Mapping[str, _Entry],
    shapes: Mapping[str, torch.Size],
    config: ModelConfig,
) -> Iterator[tuple[str, Tensor]]:
    for file, group in itertools.groupby(locations.items(), key=lambda location: location[1][0]):
        with open_safetensors(file) as tensors:
            for name, (_, stored) in group:
                entry, tensor = layout[name], tensors.get_tensor(stored)
                if _is_tied_head(name, config):
                    embedding = next(n for n, e in layout.items() if e == entry)
                    _check_tied_head(file, stored, tensor, *locations[embedding])
                    continue
                split = (tensor.T if entry.transposed else tensor).split([shapes[p][0] for p in entry.parameters])
                for parameter, rows in zip(entry.parameters, split, strict=True):
                    yield parameter, rows.to(torch.float32, copy=len(split) > 1).contiguous()


def _check_tied_head(file: Path, stored: str, head: Tensor, embedding_file: Path, embedding: str) -> None:
    """Raise UserError if a stored tied head is not a copy of the embedding."""
    with open_safetensors(embedding_file) as tensors:
        if not torch.equal(head, tensors.get_tensor(embedding)):
            raise UserError(
                f"{file}: {stored} differs from {embedding}, expected a copy because tie_word_embeddings is true; set "
                f"that to false in {CONFIG}"
            )


def _to_hf(entry: _Entry, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    tensor = torch.cat([tensors[p].detach().to("cpu", dtype) for p in entry.parameters])
    return (tensor.T if entry.transposed else tensor).contiguous()


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Split the names into consecutive shards of at most `limit` bytes; a larger tensor is a shard of its own."""
    shards: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if shards[-1] and total + size > limit:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    return shards
