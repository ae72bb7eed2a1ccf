"""The two images of a rank: memory of the standby, and how one becomes the next step."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchext._native import standby as native
from torchext.standby.arena import Arena, Slot
from torchext.standby.changes import Changes, Rows
from torchext.standby.errors import StandbyError

if TYPE_CHECKING:
    from torchext.standby.source import Source


class Budget:
    """Bytes that all images of a standby may take together. Thread-safe."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0  # guarded by _lock
        self._lock = threading.Lock()

    def take(self, size_bytes: int, *, spare_bytes: int = 0) -> None:
        """Reserves memory, if so much more than that would be left.

        Raises:
            StandbyError: It would be more than the limit.
        """
        with self._lock:
            if self.limit_bytes is not None and self.used_bytes + size_bytes + spare_bytes > self.limit_bytes:
                raise StandbyError(
                    f"the standby is out of memory: {size_bytes} bytes more are needed, {self.used_bytes} of "
                    f"{self.limit_bytes} are in use (--memory); a job takes twice the size of its state"
                )
            self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Returns what was taken."""
        with self._lock:
            self.used_bytes -= size_bytes


@dataclass
class Held:
    """An entry of an image: its memory and its checksum."""

    slot: Slot
    checksum: int = 0


@dataclass
class Image:
    """The state of one rank as of one step.

    Attributes:
        entries: By number.
        tree: The pickle that refers to them.
        record: Checksum over the step, the tree and the checksums of all entries; None while the image is not whole.
        missing: What the other image has and this one lacks.
    """

    entries: dict[int, Held] = field(default_factory=dict)
    tree: bytes = b""
    step: int = -1
    record: str | None = None
    missing: Changes = field(default_factory=Changes)

    def compute_record(self) -> str:
        """What `record` has to be."""
        return record_of(self.step, self.tree, self._described())

    def header(self, world_size: int) -> dict[str, Any]:
        """What goes before the entries, wherever they go: see `persist.head_of` and `fetching.receive_state`."""
        return {"step": self.step, "world_size": world_size, "entries": self._described(), "record": self.record}

    def places(self) -> list[tuple[int, int, str]]:
        """Of each of these entries, where another process finds it: descriptor, offset and nonce of its segment."""
        slots = [held.slot for _, held in sorted(self.entries.items())]
        return [(slot.segment.descriptor, slot.offset, slot.segment.nonce.hex()) for slot in slots]

    def _described(self) -> list[tuple[int, int, int]]:
        return [(number, held.slot.size_bytes, held.checksum) for number, held in sorted(self.entries.items())]


def record_of(step: int, tree: bytes, entries: Iterable[tuple[int, int, int]]) -> str:
    """The commit record of a state: a digest of its step, its pickle, and (number, size, checksum) of each entry."""
    digest = hashlib.blake2b(tree, digest_size=16)
    digest.update(struct.pack("<q", step))
    for number, size, checksum in entries:
        digest.update(struct.pack("<qqQ", number, size, checksum))
    return digest.hexdigest()


class Images:
    """Both images of one rank. One thread at a time; `Rank` in jobs.py sees to it."""

    def __init__(self, budget: Budget) -> None:
        self.images = [Image(), Image()]
        self._arena = Arena()
        self._budget = budget
        self._closed = False

    def write(
        self,
        index: int,
        step: int,
        tree: bytes,
        sizes: dict[int, int],
        changes: Changes,
        source: Source,
        ahead: Set[int] = frozenset(),
    ) -> int:
        """Makes an image the state of ``step``, all but its record.

        Args:
            index: Which image; it is not whole from now until `seal`.
            step: The step.
            tree: The pickle.
            sizes: Bytes of each entry that the state has now.
            changes: Entries that differ from the other image.
            source: Gives them.
            ahead: Those that `pull_ahead` has brought already.

        Returns:
            How many bytes came from the source.

        Raises:
            StandbyError: Out of memory.
            OSError: The source is gone.
        """
        self._check_open()
        image, other = self.images[index], self.images[1 - index]
        image.record = None
        self._free(image, [number for number in image.entries if number not in sizes])
        image.missing.forget([number for number in image.missing.whole if number not in sizes])
        image.missing.forget([number for number in image.missing.rows if number not in sizes])
        added = [number for number in sizes if number not in image.entries]
        if added:
            self._allocate(image, {number: sizes[number] for number in added})
        unknown = [n for n in added if n not in changes.whole and n not in image.missing.whole & other.entries.keys()]
        if unknown:
            raise StandbyError(f"entries {unknown} are new and have not been sent whole")
        try:
            self._catch_up(image, other, changes)
            pulled = Changes()
            pulled.whole, pulled.rows = changes.whole - ahead, changes.rows
            num_bytes = source.pull(pulled, image.entries)
        except BaseException:
            # Half written: none of it may be taken for the other image's contents.
            image.missing.add_whole([*changes.whole, *changes.rows, *image.missing.rows])
            raise
        image.missing = Changes()
        image.step, image.tree = step, tree
        image.record = image.compute_record()
        self._last_changes = changes
        return num_bytes

    def pull_ahead(self, index: int, numbers: Iterable[int], source: Source) -> tuple[set[int], int]:
        """Brings entries into an image that is to be written; they count once `write` is told that they are as then.

        Returns:
            Those of the entries that the image has, and how many bytes they are.
        """
        image = self.images[index]
        image.record = None
        changes = Changes()
        changes.add_whole(number for number in numbers if number in image.entries)
        image.missing.add_whole(changes.whole)  # unless they do come to count
        return changes.whole, source.pull(changes, image.entries)

    def seal(self, index: int) -> None:
        """The image is whole from now on; the other one lacks what changed, and what it lacked before.

        Before, there is something only where this image was written twice running.
        """
        self._check_open()
        image, other = self.images[index], self.images[1 - index]
        other.missing.forget([n for n in [*other.missing.whole, *other.missing.rows] if n not in image.entries])
        other.missing.merge(
            self._last_changes, {number: held.slot.size_bytes for number, held in image.entries.items()}
        )

    def drop(self, index: int) -> None:
        """The image does not count; it is brought back to the other one when it is written next."""
        self._check_open()
        image = self.images[index]
        image.record = None
        image.missing.add_whole([*self._last_changes.whole, *self._last_changes.rows])

    def size_bytes(self) -> int:
        """Of both images."""
        return sum(held.slot.size_bytes for image in self.images for held in image.entries.values())

    def close(self) -> None:
        """Frees all memory. Idempotent; nothing can be written afterwards."""
        self._closed = True
        for image in self.images:
            self._free(image, list(image.entries))
        self._arena.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StandbyError("the job was removed from the standby")

    def _allocate(self, image: Image, sizes: dict[int, int]) -> None:
        total = sum(sizes.values())
        self._budget.take(total)
        try:
            self._arena.reserve(total, len(sizes))
            for number, size in sizes.items():
                image.entries[number] = Held(self._arena.allocate(size))
        except OSError as error:
            taken = sum(image.entries[number].slot.size_bytes for number in sizes if number in image.entries)
            self._budget.give_back(total - taken)
            raise StandbyError(f"the standby is out of memory: {total} bytes more: {error}") from error

    def _free(self, image: Image, numbers: Iterable[int]) -> None:
        for number in numbers:
            slot = image.entries.pop(number).slot
            self._arena.free(slot)
            self._budget.give_back(slot.size_bytes)

    @staticmethod
    def _catch_up(image: Image, other: Image, changes: Changes) -> None:
        """Copies what this image lacks from the other one, but for what comes whole from the source."""
        for number in image.missing.whole - changes.whole:
            if number in other.entries:
                held, newer = image.entries[number], other.entries[number]
                held.checksum = native.copy(held.slot.address, newer.slot.address, held.slot.size_bytes)
        for number, rows in image.missing.each_rows():
            if number not in changes.whole:
                copy_rows(image.entries[number], other.entries[number].slot.address, rows, packed=False)


def copy_rows(held: Held, source: int, rows: Rows, *, packed: bool) -> int:
    """Copies rows from the address of an entry, or of the rows alone, into an entry; returns their bytes."""
    offsets, sizes = rows.ranges(held.slot.size_bytes)
    change = native.copy_ranges(
        held.slot.address,
        source,
        held.slot.size_bytes,
        offsets.ctypes.data,
        sizes.ctypes.data,
        len(offsets),
        packed,
    )
    held.checksum = (held.checksum + change) % (1 << 64)
    return int(sizes.sum())
