"""Files cut where their content says so: what is inserted changes the chunks around it only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

MIN_BYTES, MAX_BYTES = 16 << 10, 256 << 10
_MASK = np.uint32((1 << 16) - 1)  # a cut each 64 KiB, on average
_WINDOW = 32  # bytes that decide on a cut: the bits of the hash
_READ_BYTES = 4 << 20
# Gear hashing: a random number for each byte; the same at all sites and for ever.
_GEAR = np.array([random.Random(f"torchext {byte}").getrandbits(32) for byte in range(256)], dtype=np.uint32)


def split(file: BinaryIO) -> Iterator[bytes]:
    """The chunks of a file, of `MIN_BYTES` to `MAX_BYTES` (the last may be shorter)."""
    data, is_end = b"", False
    while data or not is_end:
        while not is_end and len(data) < _READ_BYTES:
            piece = file.read(_READ_BYTES)
            is_end = not piece
            data += piece
        begin = 0
        for cut in _cuts(data):
            if cut - begin < MIN_BYTES:
                continue
            while cut - begin > MAX_BYTES:
                yield data[begin : begin + MAX_BYTES]
                begin += MAX_BYTES
            if cut - begin >= MIN_BYTES:
                yield data[begin:cut]
                begin = cut
        while len(data) - begin > MAX_BYTES:
            yield data[begin : begin + MAX_BYTES]
            begin += MAX_BYTES
        data = data[begin:]
        if is_end and data:
            yield data
            return


def _cuts(data: bytes) -> list[int]:
    """Where the hash of the bytes before is one of few: hash(i) = sum of gear(data[i - j]) * 2**j, modulo 2**32."""
    hashes = _GEAR[np.frombuffer(data, np.uint8)]
    done = 1
    while done < _WINDOW:  # sums over twice as many bytes each time
        longer = hashes.copy()
        longer[done:] += hashes[:-done] << np.uint32(done) if len(hashes) > done else hashes[:0]
        hashes, done = longer, 2 * done
    return [int(cut) + 1 for cut in np.flatnonzero((hashes & _MASK) == 0)]
