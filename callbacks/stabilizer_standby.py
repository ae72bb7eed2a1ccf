"""What a trainer's standby is told of its steps, made into checkpoints for other sites: whole, or what changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from torchext._native import standby as native
from torchext.replication.deltas import Pieces
from torchext.standby.arena import Arena
from torchext.standby.changes import Changes, Rows
from torchext.standby.images import Held, copy_rows, record_of
from torchext.standby.ledger import Publication
from torchext.standby.persist import MAGIC, head_of, read_file
from torchext.standby.publisher import Publisher


@dataclass(frozen=True)
class Snapshot:
    """The state of one step, as a file of `torchext.standby.persist` would hold it. It changes with the next one.

    Attributes:
        step: Of which step.
        head: How the file begins.
        entries: What follows: by number, in order, each (size,) uint8.
        changes: What differs from the snapshot before.
    """

    step: int
    head: bytes
    entries: dict[int, torch.Tensor]
    changes: Changes

    def places(self) -> dict[int, int]:
        """Where in the file each entry begins."""
        places, at = {}, len(self.head)
        for number, data in self.entries.items():
            places[number] = at
            at += data.numel()
        return places

    def write(self, path: Path) -> None:
        """Writes the file."""
        with open(path, "wb") as file:
            file.write(self.head)
            for data in self.entries.values():
                file.write(data.numpy().data)

    def delta(self, base: dict[int, int]) -> bytes:
        """The file, told by the one of the snapshot before, whose `places` are given."""
        pieces = Pieces()
        pieces.put(self.head)
        for number, data in self.entries.items():
            if number in self.changes.whole:
                pieces.put(data.numpy().data)
                continue
            at = 0
            for begin, end in _joined(self.changes.rows.get(number, []), data.numel()):
                pieces.copy(base[number] + at, begin - at)
                pieces.put(data[begin:end].numpy().data)
                at = end
            pieces.copy(base[number] + at, data.numel() - at)
        return pieces.delta()


class StandbyFollower:
    """Keeps a copy of the state, as of the last snapshot, and what changed since. Used by the training's thread.

    Args:
        publisher: What tells the standby.
        is_wanted: Whether there is to be a snapshot of this step: if so, nobody uses the one before any more.
        take: Is given it, while the training waits.
    """

    def __init__(
        self, publisher: Publisher, is_wanted: Callable[[int], bool], take: Callable[[Snapshot], None]
    ) -> None:
        self._publisher = publisher
        self._is_wanted = is_wanted
        self._take = take
        self._arena = Arena(huge_pages=False)  # which the training wants itself
        self._held: dict[int, Held] = {}
        self._changes = Changes()
        publisher.on_sealed.append(self._sealed)

    @property
    def is_connected(self) -> bool:
        """Whether there is a standby, so that a snapshot of a later step will come."""
        return self._publisher.is_connected

    def close(self) -> None:
        """Follows no longer. Idempotent."""
        if self._sealed in self._publisher.on_sealed:
            self._publisher.on_sealed.remove(self._sealed)
        self._held.clear()
        self._arena.close()

    def _sealed(self, step: int, publication: Publication) -> None:
        sizes = self._publisher.ledger.sizes()
        self._changes.forget([n for n in (*self._changes.whole, *self._changes.rows) if n not in sizes])
        self._changes.merge(publication.changes, sizes)
        if self._is_wanted(step):
            self._take(self._snapshot(step, publication.tree, sizes))

    def _snapshot(self, step: int, tree: bytes, sizes: dict[int, int]) -> Snapshot:
        for number in self._held.keys() - sizes.keys():
            self._arena.free(self._held.pop(number).slot)
        added = [number for number in sizes if number not in self._held]
        if added:
            self._arena.reserve(sum(sizes[number] for number in added), len(added))
            self._held.update((number, Held(self._arena.allocate(sizes[number]))) for number in added)
        changes, self._changes = self._changes, Changes()
        changes.add_whole(added)  # whatever was told of them before this began to follow
        find = self._publisher.ledger.entry
        for number in changes.whole:
            held = self._held[number]
            held.checksum = native.copy(held.slot.address, find(number).data_ptr(), held.slot.size_bytes)
        for number, rows in changes.each_rows():
            copy_rows(self._held[number], find(number).data_ptr(), rows, packed=False)
        entries = [(number, held.slot.size_bytes, held.checksum) for number, held in sorted(self._held.items())]
        record = record_of(step, tree, entries)
        head = head_of({"step": step, "world_size": 1, "entries": entries, "record": record}, tree)
        return Snapshot(step, head, {number: self._held[number].slot.base for number, _, _ in entries}, changes)


def to_checkpoint(path: Path) -> None:
    """Makes the file of a snapshot an ordinary checkpoint; leaves any other file as it is. For trusted files.

    Raises:
        CorruptStateError: It is not as it was when it was sent.
    """
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
    made = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        torch.save(read_file(path).tree, made)
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)


def _joined(rows: list[Rows], entry_bytes: int) -> list[tuple[int, int]]:
    """The parts of an entry that these rows make up, in order and apart from each other: begins and ends."""
    joined: list[tuple[int, int]] = []
    ranges = [np.stack(each.ranges(entry_bytes), axis=1) for each in rows]
    for begin, size in sorted(tuple(map(int, pair)) for part in ranges for pair in part):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], begin + size)
        else:
            joined.append((begin, begin + size))
    return joined
