"""Flat binary files with a checksum per block of 1 MiB, verified at the first read of the block.

Training reads a token file in random order. Verifying the complete file at the start would take minutes, and without
verification a flipped bit would reach the model. So each process verifies a block at its first access, and the file's
size when it opens the file.
"""

import hashlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from ingot.core.errors import UserError

BLOCK = 1 << 20
_DIGEST = 8


def _checksum(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


class BlockWriter:
    """Appends to an open file and records a checksum per block. Implements the file methods that pyarrow needs."""

    closed = False

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._state = hashlib.blake2b(digest_size=_DIGEST)
        self._digests: list[bytes] = []
        self.bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self._file.write(view)
        start = 0
        while start < len(view):
            stop = min(len(view), start + BLOCK - self.bytes % BLOCK)
            self._state.update(view[start:stop])
            self.bytes += stop - start
            if self.bytes % BLOCK == 0:
                self._next_block()
            start = stop
        return len(view)

    def finish(self) -> dict[str, Any]:
        """The file's entry in a manifest. No writes are allowed afterwards."""
        if self.bytes % BLOCK:
            self._next_block()
        return {"bytes": self.bytes, "blocks": b"".join(self._digests).hex()}

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def _next_block(self) -> None:
        self._digests.append(self._state.digest())
        self._state = hashlib.blake2b(digest_size=_DIGEST)


class BlockFile:
    """A memory-mapped file whose blocks are verified at first access.

    Args:
        path: the file.
        recorded: its entry in the manifest.

    Raises:
        UserError: the file is missing, or has another size than recorded.
    """

    def __init__(self, path: Path, recorded: dict[str, Any]):
        self.path = path
        size = path.stat().st_size if path.exists() else None
        if size is None:
            raise UserError(
                f"{path}: missing, expected {recorded['bytes']:,} bytes; delete that directory and run again"
            )
        if size != recorded["bytes"]:
            raise UserError(
                f"{path}: found {size:,} bytes, expected {recorded['bytes']:,} (cut or overwritten); "
                "delete that directory and run again"
            )
        self.data = np.memmap(path, np.uint8, mode="r").view(np.ndarray) if size else np.empty(0, np.uint8)
        self._recorded = bytes.fromhex(recorded["blocks"])
        count = -(-size // BLOCK)
        if len(self._recorded) != count * _DIGEST:
            checksums = len(self._recorded) // _DIGEST
            raise UserError(f"{path}: the manifest has {checksums} checksums, expected {count}; run its stage again")
        self._pending = np.ones(count, dtype=bool)
        self.verified = count == 0

    def verify_bytes(self, start: int, stop: int) -> None:
        """Verify the blocks of a range of bytes."""
        if not self.verified and stop > start:
            self.verify_blocks(np.arange(start // BLOCK, (stop - 1) // BLOCK + 1))

    def verify_blocks(self, blocks: np.ndarray) -> None:
        """Verify the given blocks that are not verified yet.

        Args:
            blocks: numbers of blocks, any shape, repeats allowed.

        Raises:
            UserError: a block's content does not match its checksum.
        """
        for block in np.unique(blocks[self._pending[blocks]]).tolist():
            checksum = _checksum(self.data[block * BLOCK : (block + 1) * BLOCK])
            expected = self._recorded[block * _DIGEST : (block + 1) * _DIGEST]
            if checksum != expected:
                raise UserError(
                    f"{self.path}: block {block} (from byte {block * BLOCK:,}) has checksum {checksum.hex()}, "
                    f"expected {expected.hex()}; the file is damaged: delete that directory and run again"
                )
            self._pending[block] = False
        self.verified = not self._pending.any()

    def verify(self) -> None:
        """Verify every block that is not verified yet."""
        self.verify_bytes(0, len(self.data))
