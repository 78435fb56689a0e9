"""Token files of other tools: nanoGPT's, llm.c's, Megatron's and datatrove's. Little-endian, all of one type.

    nanogpt     X.bin    ids (u2), nothing else
    llm.c       X.bin    256 x i4: magic, version, number of ids; then ids (u2 for GPT-2's, u4 for Llama 3's)
    megatron    X.bin    ids; X.idx: their type, the lengths and positions of sequences, the sequences of documents
    datatrove   X.ds     ids (u2 or u4); X.ds.index: u8 per document, the position after its last id; X.ds.metadata

The first two record no documents: one ends after each end-of-text id. Every reader compares sizes with what the files
record, so that a file that is cut off is refused; nanoGPT's has nothing to compare with.

Sources: karpathy/nanoGPT `data/*/prepare.py`, karpathy/llm.c `dev/data/data_common.py`, NVIDIA/Megatron-LM
`core/datasets/indexed_dataset.py`, huggingface/datatrove `pipeline/tokens/tokenizer.py`.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ingot.core.artifact import regular
from ingot.core.errors import MissingFile, UserError
from ingot.store.reader import Store
from ingot.store.token_formats import TokenFormat, files_beside

CHUNK = 4 << 20
"""Ids that are read, checked or written at once."""
_LLM_C = {"<u2": (20240520, 1), "<u4": (20240801, 7)}
"""Type of the ids -> magic number and version of llm.c's header."""
_LLM_C_HEADER = 1024
_MEGATRON = b"MMIDIDX\0\0" + struct.pack("<Q", 1)
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MEGATRON_U2_VOCAB = 65_500
"""Megatron stores ids of a smaller vocabulary as u2, others as i4."""
_OWN = "ingot-"
"""Begins the name of a tokenizer in datatrove's metadata; the digest of its vocabulary, or its fingerprint, follows."""
_NUMPY = b"\x93NUMPY"
_WIDE_SAMPLE, _WIDE_IDS, _WIDE_UPPER = 1 << 20, 16, 4
"""Values of 16 bits that are looked at for wider ids, the fewest that tell, and the bound of upper halves: vocabularies
of up to 262,144."""
_COPY = "the file is cut off or damaged: copy it again"


class Tokens(NamedTuple):
    """The ids of a file [n], memory-mapped, and the end of each document [documents] (u8)."""

    ids: np.ndarray
    ends: np.ndarray


def read_tokens(file: Path, format: TokenFormat, eot: int | None, *tokenizer: str) -> Tokens:
    """The tokens of a file.

    Args:
        file: the file with the ids.
        format: its format.
        eot: id of the end of text, after which a document ends where the format records none.
        tokenizer: digests by which a file may name its tokenizer: that of the vocabulary, and the fingerprint.

    Raises:
        UserError: a file is missing, cut off, of another format, or made by another tokenizer.
    """
    if not regular(file).exists():
        raise MissingFile(f"{file}: no such file (relative to {Path.cwd()}), expected token ids; check the path")
    tokens = _READERS[format](file, eot, tokenizer)
    if not len(tokens.ids):
        raise UserError(f"{file}: found no token, expected some; {_COPY}")
    if len(tokens.ends) and (np.diff(tokens.ends.astype(np.int64), prepend=0) < 0).any():
        raise UserError(f"{file}: found a document that ends before it starts; {_COPY}")
    return tokens


def check_ids(file: Path, tokens: Tokens, vocab: int) -> None:
    """Raise UserError for the first id outside a vocabulary."""
    for start, ids in _chunks(tokens.ids):
        outside = np.flatnonzero((ids < 0) | (ids >= vocab))
        if len(outside):
            at = start + int(outside[0])
            document = int(np.searchsorted(tokens.ends, at, side="right"))
            raise UserError(
                f"{file}: token {at:,} (document {document:,}, both from 0) is id {int(tokens.ids[at]):,}, expected "
                f"ids below {vocab:,}, the size of the vocabulary; name the tokenizer that made the file"
            )


def _chunks(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    return ((start, ids[start : start + CHUNK]) for start in range(0, len(ids), CHUNK))


def _mapped(file: Path, dtype: str, offset: int = 0) -> np.ndarray:
    size = file.stat().st_size - offset
    if size % (width := np.dtype(dtype).itemsize):
        raise UserError(f"{file}: found {size:,} bytes of ids, expected a multiple of {width}; {_COPY}")
    return np.memmap(file, dtype, "r", offset).view(np.ndarray) if size > 0 else np.empty(0, dtype)


def _ends_by_eot(ids: np.ndarray, eot: int | None) -> np.ndarray:
    """The position after each end of text, and that after the last id."""
    found = [start + 1 + np.flatnonzero(part == eot) for start, part in _chunks(ids)] if eot is not None else []
    ends = np.concatenate([*found, np.array([], np.int64)]).astype(np.uint64)
    return ends if len(ends) and ends[-1] == len(ids) else np.append(ends, np.uint64(len(ids)))


def _written(store: Store, file: Path, dtype: str, header: bytes = b"") -> None:
    with file.open("wb") as out:
        out.write(header)
        for start in range(0, store.tokens, CHUNK):
            out.write(store.ids.read(start, min(store.tokens, start + CHUNK)).astype(dtype, copy=False).tobytes())


def _read_nanogpt(file: Path, eot: int | None, tokenizer: Sequence[str]) -> Tokens:
    with file.open("rb") as start:
        header = start.read(8)
    if header in [struct.pack("<2i", *pair) for pair in _LLM_C.values()]:
        raise UserError(f'{file}: found the header of llm.c, expected ids alone; set format = "llm.c"')
    if header.startswith(_NUMPY):
        raise UserError(
            f"{file}: found the header of NumPy's .npy, expected ids alone; write them with "
            "numpy.load(FILE).astype(numpy.uint16).tofile(NEW)"
        )
    if file.with_suffix(".idx").exists():
        raise UserError(f'{file}: found Megatron\'s .idx beside it, expected ids alone; set format = "megatron"')
    ids = _mapped(file, "<u2")
    if _has_wider_ids(ids):
        raise UserError(
            f"{file}: found ids of 32 bits or more (every second value of 16 bits is 0, or nearly), expected ids of 16 "
            "bits; write them as numpy.uint16, or choose a format with larger ids, such as megatron"
        )
    return Tokens(ids, _ends_by_eot(ids, eot))


def _has_wider_ids(ids: np.ndarray) -> bool:
    """Whether values of 16 bits look like the halves of wider ids, lower half first."""
    sample = ids[:_WIDE_SAMPLE]
    if len(ids) % 2 or len(sample) < 2 * _WIDE_IDS:
        return False
    lower, upper = int(sample[::2].max()), int(sample[1::2].max())
    return upper < _WIDE_UPPER and lower > upper << 8  # ids of 16 bits from a tiny vocabulary have equal halves


def _write_nanogpt(store: Store, path: Path, tokenizer: str) -> None:
    if store.vocab > 1 << 16:
        raise UserError(
            f"{store.path}: found a vocabulary of {store.vocab:,}, expected at most 65,536, since nanoGPT's ids have "
            "16 bits; choose another format"
        )
    _written(store, path.with_suffix(".bin"), "<u2")


def _read_llm_c(file: Path, eot: int | None, tokenizer: Sequence[str]) -> Tokens:
    with file.open("rb") as start:
        header = start.read(12)
    magic, version, count = struct.unpack("<3i", header.ljust(12, b"\0"))
    dtype = next((dtype for dtype, pair in _LLM_C.items() if pair == (magic, version)), None)
    if dtype is None or file.stat().st_size < _LLM_C_HEADER:
        raise UserError(f"{file}: found {magic} and version {version}, expected the header of llm.c; check the format")
    ids = _mapped(file, dtype, _LLM_C_HEADER)
    if len(ids) != count:
        raise UserError(f"{file}: found {len(ids):,} ids, expected {count:,} by its header; {_COPY}")
    return Tokens(ids, _ends_by_eot(ids, eot))


def _write_llm_c(store: Store, path: Path, tokenizer: str) -> None:
    if store.tokens >= 1 << 31:
        raise UserError(
            f"{store.path}: found {store.tokens:,} ids, expected fewer than 2^31, the most in llm.c's header"
        )
    dtype = "<u2" if store.vocab <= 1 << 16 else "<u4"
    header = struct.pack("<3i", *_LLM_C[dtype], store.tokens).ljust(_LLM_C_HEADER, b"\0")
    _written(store, path.with_suffix(".bin"), dtype, header)


def _read_megatron(file: Path, eot: int | None, tokenizer: Sequence[str]) -> Tokens:
    index = file.with_suffix(".idx")
    if not regular(index).exists():
        raise MissingFile(f"{file}: found no {index.name} beside it, expected Megatron's index; copy it too")
    data = index.read_bytes()
    start = len(_MEGATRON)
    if data[:start] != _MEGATRON or len(data) < start + 17 or data[start] not in _MEGATRON_TYPES:
        raise UserError(f"{index}: not an index of Megatron (version 1, integers), expected one; check the format")
    sequences, documents = struct.unpack_from("<2Q", data, start + 1)
    sizes = (4 * sequences, 8 * sequences, 8 * documents)
    if len(data) - start - 17 != sum(sizes):
        raise UserError(
            f"{index}: found {len(data):,} bytes, expected {start + 17 + sum(sizes):,}; {_COPY} (or it has modes of "
            "images, which are not read)"
        )
    at = start + 17
    lengths = np.frombuffer(data, "<i4", sequences, at).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, at + sizes[0])
    first_sequences = np.frombuffer(data, "<i8", documents, at + sizes[0] + sizes[1])
    ids = _mapped(file, _MEGATRON_TYPES[data[start]])
    ends = np.concatenate(([0], np.cumsum(lengths)))
    if not np.array_equal(pointers, ends[:-1] * ids.itemsize):
        raise UserError(
            f"{index}: found sequences that do not follow each other, expected them in order; merge it anew"
        )
    if len(ids) != ends[-1]:
        raise UserError(f"{file}: found {len(ids):,} ids, expected {ends[-1]:,} by its index; {_COPY}")
    if not documents or first_sequences[0] != 0 or first_sequences[-1] != sequences:
        raise UserError(f"{index}: found documents that do not cover its sequences, expected all of them; {_COPY}")
    return Tokens(ids, ends[first_sequences[1:]].astype(np.uint64))


def _write_megatron(store: Store, path: Path, tokenizer: str) -> None:
    code = 8 if store.vocab < _MEGATRON_U2_VOCAB else 4
    dtype = np.dtype(_MEGATRON_TYPES[code])
    _written(store, path.with_suffix(".bin"), dtype.str)
    ends = store.ends.astype(np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    with path.with_suffix(".idx").open("wb") as out:
        out.write(_MEGATRON + struct.pack("<BQQ", code, len(ends), len(ends) + 1))
        out.write((ends - starts).astype("<i4").tobytes())
        out.write((starts * dtype.itemsize).astype("<i8").tobytes())
        out.write(np.arange(len(ends) + 1, dtype="<i8").tobytes())


def _read_datatrove(file: Path, eot: int | None, tokenizer: Sequence[str]) -> Tokens:
    index, metadata, loss = (Path(f"{file}.{name}") for name in ("index", "metadata", "loss"))
    if loss.exists():
        raise UserError(f"{loss}: marks ids that are not trained on, which is not read; tokenize without it")
    if not regular(index).exists():
        raise MissingFile(f"{file}: found no {index.name} beside it, expected the ends of documents; copy it too")
    ends = _mapped(index, "<u8")
    count = int(ends[-1]) if len(ends) else 0
    name, size = _datatrove_tokenizer(regular(metadata))
    size = size or (4 if count and file.stat().st_size == 4 * count else 2)
    ids = _mapped(file, f"<u{size}")
    if len(ids) != count:
        raise UserError(f"{file}: found {len(ids):,} ids of {size} bytes, expected {count:,} by its index; {_COPY}")
    if name.startswith(_OWN) and name.removeprefix(_OWN) not in tokenizer:
        raise UserError(
            f"{metadata}: found tokenizer {name.removeprefix(_OWN)}, expected {' or '.join(tokenizer)}; name the "
            "tokenizer that made the file"
        )
    return Tokens(ids, ends)


def _datatrove_tokenizer(metadata: Path) -> tuple[str, int | None]:
    """The name of the tokenizer and the bytes of an id, as far as `X.ds.metadata` says."""
    line = metadata.read_text(encoding="utf-8").split("\n")[0] if metadata.exists() else ""
    name, _, size = line.rpartition("|")
    return (name, int(size)) if size in ("2", "4") and name else (line, None)


def _write_datatrove(store: Store, path: Path, tokenizer: str) -> None:
    size = 2 if store.vocab <= 1 << 16 else 4
    _written(store, path.with_suffix(".ds"), f"<u{size}")
    path.with_suffix(".ds.index").write_bytes(store.ends.astype("<u8", copy=False).tobytes())
    path.with_suffix(".ds.metadata").write_text(f"{_OWN}{tokenizer}|{size}\n{store.tokens}\n{store.tokens:,} T")


_READERS: dict[TokenFormat, Callable[[Path, int | None, Sequence[str]], Tokens]] = {
    "nanogpt": _read_nanogpt,
    "llm.c": _read_llm_c,
    "megatron": _read_megatron,
    "datatrove": _read_datatrove,
}
"""(file, id of the end of text, digests of the tokenizer) -> its tokens."""
_WRITERS: dict[TokenFormat, Callable[[Store, Path, str], None]] = {
    "nanogpt": _write_nanogpt,
    "llm.c": _write_llm_c,
    "megatron": _write_megatron,
    "datatrove": _write_datatrove,
}
"""(store, path without suffix, digest of the tokenizer) writes the files."""


def write_store(store: Store, path: Path, format: TokenFormat, eot: int | None, vocabulary: str = "") -> list[str]:
    """Write a store of texts in another format.

    Args:
        store: the store.
        path: the files to write, without suffix.
        format: the format.
        eot: id of the end of text.
        vocabulary: digest of the tokenizer's vocabulary, which the exported tokenizer has too; "": its fingerprint is
            written instead.

    Returns:
        What the files do not say, as messages.

    Raises:
        UserError: a store that the format cannot hold.
    """
    if store.content != "text" or "mask" in store.columns:
        raise UserError(
            f"{store.path}: found documents of format {store.content}, expected text, because token files do not say "
            "which ids are trained on"
        )
    _WRITERS[format](store, path, vocabulary or store.tokenizer)
    if files_beside(path, format) or _has_borders(store, eot):
        return []
    return [f"{path.name}: the format records no documents, and not every one of them ends in the end of text"]


def _has_borders(store: Store, eot: int | None) -> bool:
    """Whether a reader that cuts after each end of text finds the documents."""
    return np.array_equal(_ends_by_eot(store.ids.read(0, store.tokens), eot), store.ends)
