"""The weights of a Hugging Face model directory as ours, and ours as one: renaming, two turns of a matrix, no network.

Only safetensors are read: a pickled `.bin` runs code when it is loaded. Tensors come one at a time from memory-mapped
files, after all names and shapes were checked against the shape, so nothing is half filled and no more memory is needed
than the weights. Whatever the file's float type, they come as fp32: bf16 and fp16 are subsets of it.

One table (`_layout`) tells both directions what a tensor of theirs is made of: parts of ours, one below the other, and
turned around in GPT-2, which stores its matrices inputs first.

Our checkpoints are safetensors under our own names (`distributed/checkpoint.py`); this is for everybody else's.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ingot.convert.hf_config import CONFIG, Dtype, config_to_hf, read_config
from ingot.core.artifact import atomic_json
from ingot.core.errors import UserError
from ingot.model.adapter_config import linear_layers
from ingot.model.config import ModelConfig
from ingot.model.transformer import Transformer, empty

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Size above which weights are split into several files, the customary one."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Constants that older versions of transformers saved beside the weights."""


@dataclass(frozen=True)
class _Entry:
    """What one tensor of theirs holds."""

    parts: tuple[str, ...]
    """Our parameters, one below the other."""
    turned: bool = False
    """Inputs first: the transpose of ours."""


def load(directory: Path, device: torch.device | str = "cpu") -> Transformer:
    """The model of a Hugging Face directory, in fp32.

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
    """Our names and fp32 tensors, each parameter of `Transformer(config)` exactly once, in the order of the files.

    Raises:
        UserError: no safetensors, a damaged file, a tensor too many, too few, of another shape or not a float; all of
            it before the first tensor is given out, but for a tied head that is not the embedding.
    """
    shapes = _shapes(config)
    layout = _layout(config, shapes)
    base = "transformer." if config.positions == "learned" else "model."
    places: dict[str, tuple[Path, str]] = {}
    for file in _files(directory):
        with opened(file) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (not a mapping)
                name = stored if stored.startswith((base, "lm_head.")) else base + stored
                if name.endswith(_BUFFERS):
                    continue
                if name in places:
                    raise UserError(f"{file}: holds {stored}, as {places[name][0].name} does, expected it once")
                if name not in layout:
                    raise UserError(f"{file}: found tensor {stored}, expected only those of the model in its {CONFIG}")
                places[name] = (file, stored)
                _check(file, stored, tensors.get_slice(stored), layout[name], shapes)
    if missing := [name for name in layout if name not in places and not _is_copy(name, config)]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{directory}: no tensor {missing[0]}{more}, expected all weights of its {CONFIG}")
    return _stream(places, layout, shapes, config)


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
    """Write config.json and weights that transformers, and whoever reads its format, can load.

    Several files and an index are written where one would be larger than `shard_bytes`. Not atomic: write into a
    directory that is not published yet (`core.artifact.atomic_directory`).

    Args:
        tensors: our names to tensors, as of `named_parameters`; others are left out.
        bos, eos, pad: special ids, for config.json.
        dtype: type of the written weights; fp32 changes no bit of fp32 weights, bf16 rounds them.

    Raises:
        UserError: transformers has no such model, or the directory holds one already.
    """
    table = config_to_hf(config, bos=bos, eos=eos, pad=pad, dtype=dtype)
    directory.mkdir(parents=True, exist_ok=True)
    if found := sorted(p.name for p in (*directory.glob("*.safetensors*"), *directory.glob(CONFIG))):
        raise UserError(f"{directory}: holds {found[0]} already; choose another directory")
    shapes = _shapes(config)
    layout = {name: e for name, e in _layout(config, shapes).items() if not _is_copy(name, config)}
    kind = getattr(torch, dtype)
    sizes = {name: sum(shapes[p].numel() for p in entry.parts) * kind.itemsize for name, entry in layout.items()}
    shards = _shards(sizes, shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        atomic_json(directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    for name, shard in zip(names, shards, strict=True):
        merged = {
            theirs: _merge([tensors[p] for p in layout[theirs].parts], layout[theirs].turned, kind) for theirs in shard
        }
        write_tensors(merged, directory / name)
        del merged
    atomic_json(directory / CONFIG, table)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file that others may read as they may any new file: the library writes for its owner alone."""
    save_file(tensors, path, metadata={"format": "pt"})
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def resize_embeddings(
    tensors: Mapping[str, Tensor], config: ModelConfig, vocab: int
) -> tuple[dict[str, Tensor], ModelConfig]:
    """Another vocabulary: rows are cut off at the end, or added as the mean of those there are.

    With the mean a new token begins about as probable as the average one, so the others' probabilities hardly change; a
    random row can take all of them (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").

    Args:
        tensors: our names to tensors; all but the embedding (and an untied head) are passed on as they are.
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


def matrices(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Their modules inside blocks -> our matrices that each holds, one below the other: what can have an adapter."""
    layers = linear_layers(config)
    layout = _layout(config, _shapes(config))
    found = {theirs: tuple(p.removesuffix(".weight") for p in entry.parts) for theirs, entry in layout.items()}
    return {theirs.removesuffix(".weight"): parts for theirs, parts in found.items() if parts[0] in layers}


def tables(config: ModelConfig) -> dict[str, str]:
    """Their embedding and their head -> our module that each is: the same one where the head is tied."""
    layout = _layout(config, _shapes(config))
    found = {theirs.removesuffix(".weight"): e.parts[0].removesuffix(".weight") for theirs, e in layout.items()}
    return {theirs: ours for theirs, ours in found.items() if ours in ("embedding", "head")}


def _layout(config: ModelConfig, shapes: Mapping[str, torch.Size]) -> dict[str, _Entry]:
    """Their names -> what of ours they hold. A tied head is listed too: some write the copy."""
    gpt2 = config.positions == "learned"
    theirs = _GPT2 if gpt2 else _LLAMA
    layout: dict[str, _Entry] = {}
    for ours in shapes:
        *path, module, role = ours.split(".")
        layer = path[1] if path else None
        name = theirs[".".join([*path[2:], module])].format(layer=layer) + "." + role
        turned = gpt2 and role == "weight" and layer is not None and not module.endswith("norm")
        before = layout[name].parts if name in layout else ()
        layout[name] = _Entry((*before, ours), turned)
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
"""Our modules, the layer's number left out -> theirs."""


def _shapes(config: ModelConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: p.shape for name, p in Transformer(config).named_parameters()}


def _is_copy(name: str, config: ModelConfig) -> bool:
    return config.tied and name == "lm_head.weight"


def _files(directory: Path) -> list[Path]:
    """The safetensors files of a directory, by its index where it has one."""
    index = directory / INDEX
    if not index.exists():
        if (directory / SINGLE).is_file():
            return [directory / SINGLE]
        if pickled := sorted(p.name for p in directory.glob("*.bin")):
            raise UserError(
                f"{directory}: found {pickled[0]}, expected {SINGLE}: pickled weights run code when they are loaded, "
                "so safetensors only; convert them, or take a revision of the model that has them"
            )
        raise UserError(f"{directory}: no {SINGLE} and no {INDEX}, expected the weights of a Hugging Face model")
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: found no weight_map of names to files; download it again") from None
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise UserError(f"{index}: names the file {name}, which is not in {directory}; download it again")
    return [directory / name for name in names]


@contextlib.contextmanager
def opened(file: Path) -> Iterator[safe_open]:
    """A safetensors file; UserError where it is not one."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise UserError(f"{file}: not a readable safetensors file ({error}); download it again") from None


def _check(file: Path, stored: str, tensor: object, entry: _Entry, shapes: Mapping[str, torch.Size]) -> None:
    """Type and shape of a tensor, from the header of its file."""
    expected = torch.Size((sum(shapes[p][0] for p in entry.parts), *shapes[entry.parts[0]][1:]))
    if entry.turned:
        expected = torch.Size(reversed(expected))
    found = list(tensor.get_shape())  # type: ignore[attr-defined]
    if found != list(expected):
        raise UserError(f"{file}: tensor {stored} has shape {found}, expected {list(expected)} by its {CONFIG}")
    if (dtype := tensor.get_dtype()) not in _FLOATS:  # type: ignore[attr-defined]
        raise UserError(f"{file}: tensor {stored} is of type {dtype}, expected one of {', '.join(_FLOATS)}")


def _stream(
    places: Mapping[str, tuple[Path, str]],
    layout: Mapping[str, _Entry],
    shapes: Mapping[str, torch.Size],
    config: ModelConfig,
) -> Iterator[tuple[str, Tensor]]:
    for file, group in itertools.groupby(places.items(), key=lambda place: place[1][0]):
        with opened(file) as tensors:
            for name, (_, stored) in group:
                entry, tensor = layout[name], tensors.get_tensor(stored)
                if _is_copy(name, config):
                    _check_copy(file, stored, tensor, *places[next(n for n, e in layout.items() if e == entry)])
                    continue
                rows = (tensor.T if entry.turned else tensor).split([shapes[p][0] for p in entry.parts])
                for part, row in zip(entry.parts, rows, strict=True):
                    yield part, row.to(torch.float32, copy=len(rows) > 1).contiguous()


def _check_copy(file: Path, stored: str, head: Tensor, other: Path, embedding: str) -> None:
    """A tied head that is stored is the embedding once more."""
    with opened(other) as beside:
        if not torch.equal(head, beside.get_tensor(embedding)):
            raise UserError(
                f"{file}: {stored} is not {embedding}, expected a copy of it, since tie_word_embeddings is true; set "
                f"that to false in {CONFIG}"
            )


def _merge(parts: list[Tensor], turned: bool, dtype: torch.dtype) -> Tensor:
    whole = torch.cat([p.detach().to("cpu", dtype) for p in parts])
    return (whole.T if turned else whole).contiguous()


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Consecutive names whose sizes add up to at most `limit`; a larger one stands alone."""
    shards: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if shards[-1] and total + size > limit:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    return shards
