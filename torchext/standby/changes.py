"""The vocabulary of what changed: entries as a whole, or ranges of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

# Beyond this share of an entry, ranges cost more than they save.
_WHOLE_SHARE = 0.5


@dataclass(frozen=True)
class Rows:
    """Some rows of an entry: ``indices`` (num_rows,), sorted, each once; row ``i`` starts at ``i * row_bytes``.

    The last row of an entry may be cut off by its end.
    """

    row_bytes: int
    indices: Int64Array

    def ranges(self, entry_bytes: int) -> tuple[Int64Array, Int64Array]:
        """Offsets and sizes in bytes, neighbours joined: each (num_ranges,)."""
        offsets, sizes = self._runs
        return offsets, np.minimum(sizes, entry_bytes - offsets)

    @functools.cached_property
    def _runs(self) -> tuple[Int64Array, Int64Array]:
        """The ranges of an entry that has no end."""
        if not len(self.indices):
            return self.indices, self.indices
        starts = np.flatnonzero(np.diff(self.indices, prepend=self.indices[0] - 2) != 1)
        counts = np.diff(starts, append=len(self.indices))
        return self.indices[starts] * self.row_bytes, counts * self.row_bytes

    def size_bytes(self, entry_bytes: int) -> int:
        """How many bytes of the entry these are."""
        return int(self.ranges(entry_bytes)[1].sum())


class Changes:
    """What changed in a set of entries; each entry is there as a whole or with `Rows`."""

    def __init__(self) -> None:
        self.whole: set[int] = set()
        self.rows: dict[int, list[Rows]] = {}

    def __bool__(self) -> bool:
        return bool(self.whole or self.rows)

    def __contains__(self, entry: int) -> bool:
        return entry in self.whole or entry in self.rows

    def add_whole(self, entries: Iterable[int]) -> None:
        """Marks entries as changed everywhere."""
        for entry in entries:
            self.whole.add(entry)
            self.rows.pop(entry, None)

    def add_rows(self, entry: int, rows: Rows, entry_bytes: int) -> None:
        """Marks rows, in addition to what is marked; becomes the whole entry where that is cheaper."""
        if entry in self.whole or not len(rows.indices):
            return
        kept = self.rows.setdefault(entry, [])
        if kept and kept[-1].row_bytes == rows.row_bytes:
            rows = Rows(rows.row_bytes, np.union1d(kept.pop().indices, rows.indices))
        kept.append(rows)
        if sum(each.size_bytes(entry_bytes) for each in kept) > _WHOLE_SHARE * entry_bytes:
            self.add_whole([entry])

    def merge(self, other: Changes, sizes: dict[int, int]) -> None:
        """Adds all of ``other``; ``sizes`` gives the bytes of each entry."""
        self.add_whole(other.whole)
        for entry, rows in other.rows.items():
            for each in rows:
                self.add_rows(entry, each, sizes[entry])

    def forget(self, entries: Iterable[int]) -> None:
        """Takes entries out, as when they are no more."""
        for entry in entries:
            self.whole.discard(entry)
            self.rows.pop(entry, None)

    def each_rows(self) -> Iterator[tuple[int, Rows]]:
        """All rows with their entry."""
        for entry, rows in self.rows.items():
            for each in rows:
                yield entry, each

    def to_wire(self) -> tuple[dict[str, Any], bytes]:
        """As JSON and bytes. Entries that share their rows, as a weight and its moments do, send the indices once."""
        groups: dict[tuple[int, bytes], list[int]] = {}
        for entry, rows in self.each_rows():
            groups.setdefault((rows.row_bytes, _shrunk(rows.indices).tobytes()), []).append(entry)
        words = [
            {"entries": entries, "row_bytes": row_bytes, "bytes": len(data)}
            for (row_bytes, data), entries in groups.items()
        ]
        return {"whole": sorted(self.whole), "rows": words}, b"".join(data for _, data in groups)

    @classmethod
    def from_wire(cls, words: dict[str, Any], data: memoryview) -> Changes:
        """The reverse of `to_wire`."""
        changes = cls()
        changes.whole.update(words["whole"])
        at = 0
        for group in words["rows"]:
            indices = np.frombuffer(data[at : at + group["bytes"]], dtype=np.uint32).astype(np.int64)
            at += group["bytes"]
            rows = Rows(group["row_bytes"], indices)
            for entry in group["entries"]:
                changes.rows.setdefault(entry, []).append(rows)
        return changes


def _shrunk(indices: Int64Array) -> npt.NDArray[np.uint32]:
    if len(indices) and (indices[0] < 0 or indices[-1] > np.iinfo(np.uint32).max):
        raise ValueError(f"row numbers have to fit 32 bits, got {indices[0]} to {indices[-1]}")
    return indices.astype(np.uint32)
