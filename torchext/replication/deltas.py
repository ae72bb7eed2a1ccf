"""A file told as what it has in common with an earlier one, and the rest.

Blocks are found wherever they lie, so a checkpoint whose first record grew by a byte still has its tensors in common
with the one before. Those of a checkpoint (a zip file, as ``torch.save`` writes it) begin where its tensors do.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchext.replication.errors import ReplicationError

_BLOCK_BYTES = 64 << 10
_COPY_BYTES = 1 << 20
_HEAD = struct.Struct("<I")  # length of the list of pieces that follows
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a record in a zip file: lengths of its name and of its extra field


@dataclass(frozen=True)
class Blocks:
    """Where a file's blocks lie, by their digests, and the digest of all of it."""

    places: dict[bytes, tuple[int, int]]
    digest: str


def scan(path: Path) -> tuple[Blocks, list[tuple[bytes, int, int]]]:
    """Goes over a file; returns its blocks by digest, and in order as (digest, offset, length)."""
    whole = hashlib.blake2b(digest_size=32)
    ordered = []
    with open(path, "rb") as file:
        size = path.stat().st_size
        bounds = [*(begin for begin in _records(file) if begin < size), size]
        file.seek(0)
        at = 0
        for bound in bounds:
            while at < bound:
                data = file.read(min(_BLOCK_BYTES, bound - at))
                if not data:
                    raise ReplicationError(f"{path} became shorter while it was read")
                whole.update(data)
                ordered.append((hashlib.blake2b(data, digest_size=16).digest(), at, len(data)))
                at += len(data)
    places = {digest: (offset, length) for digest, offset, length in reversed(ordered)}
    return Blocks(places, whole.hexdigest()), ordered


class Pieces:
    """The pieces of a file, in order: of its base, or of its own."""

    def __init__(self) -> None:
        self._pieces: list[list[int]] = []  # [1, offset, length] of the base, [0, offset, length] of what follows them
        self._data: list[bytes | memoryview] = []
        self._num_bytes = 0

    def copy(self, offset: int, length: int) -> None:
        """Goes on with a part of the base."""
        self._add([1, offset, length])

    def put(self, data: bytes | memoryview) -> None:
        """Goes on with these bytes, which must stay as they are until `delta`."""
        self._add([0, self._num_bytes, len(data)])
        self._data.append(data)
        self._num_bytes += len(data)

    def _add(self, piece: list[int]) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last[0] == piece[0] and last[1] + last[2] == piece[1]:
            last[2] += piece[2]
        else:
            self._pieces.append(piece)

    def delta(self) -> bytes:
        """What `decode` makes the file of."""
        words = json.dumps(self._pieces).encode()
        return b"".join([_HEAD.pack(len(words)), words, *self._data])


def encode(path: Path, ordered: list[tuple[bytes, int, int]], base: Blocks) -> bytes:
    """A file, told by the blocks that it has in common with its base."""
    pieces = Pieces()
    with open(path, "rb") as file:
        for digest, offset, length in ordered:
            found = base.places.get(digest)
            if found is None:
                file.seek(offset)
                pieces.put(file.read(length))
            else:
                pieces.copy(*found)
    return pieces.delta()


def decode(delta: bytes, base: BinaryIO, to: BinaryIO) -> None:
    """Writes the file that a delta and its base make."""
    (length,) = _HEAD.unpack_from(delta)
    begin = _HEAD.size + length
    data = memoryview(delta)[begin:]
    for from_base, offset, size in json.loads(delta[_HEAD.size : begin]):
        if not from_base:
            to.write(data[offset : offset + size])
            continue
        base.seek(offset)
        for at in range(0, size, _COPY_BYTES):
            to.write(base.read(min(_COPY_BYTES, size - at)))


def digest_of(path: Path) -> str:
    """That of `Blocks`."""
    whole = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            whole.update(data)
    return whole.hexdigest()


def _records(file: BinaryIO) -> list[int]:
    """Where the records of a zip file begin; nothing if it is none, or only looks like one."""
    if not zipfile.is_zipfile(file):
        return []
    begins = []
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                file.seek(info.header_offset)
                name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                begins.append(info.header_offset + _LOCAL_HEADER.size + name + extra)
    except (zipfile.BadZipFile, struct.error, ValueError):
        return []
    return sorted(begins)
