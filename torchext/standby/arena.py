"""Memory that a standby on the same host can read: memfd segments, in huge pages where the system gives them."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
from dataclasses import dataclass, field

import torch

_HUGE_PAGE = 1 << 21
_ALIGNMENT = 64
NONCE_BYTES = 16  # at the start of a segment: they say which segment it is
_MFD_HUGE_2MB = 21 << 26

logger = logging.getLogger(__name__)


class Segment:
    """One mapping. It lives as long as any tensor in it; the file behind it has no name."""

    def __init__(self, size_bytes: int, *, huge_pages: bool) -> None:
        self.size_bytes = -(-size_bytes // _HUGE_PAGE) * _HUGE_PAGE
        self.huge_pages = huge_pages
        flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB | _MFD_HUGE_2MB if huge_pages else 0)
        self.descriptor = os.memfd_create("torchext-standby", flags)
        try:
            os.ftruncate(self.descriptor, self.size_bytes)
            self._memory = mmap.mmap(self.descriptor, self.size_bytes)  # reserves huge pages: none can lack later
        except BaseException:
            os.close(self.descriptor)
            raise
        if not huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._memory[: len(self.nonce)] = self.nonce
        self.address = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()

    def tensor(self, offset: int, size_bytes: int) -> torch.Tensor:
        """A byte tensor over part of the segment, with a storage of its own."""
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size_bytes, offset=offset)

    def close(self) -> None:
        """Gives up the file; tensors keep the memory."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(eq=False)
class Slot:
    """A piece of a segment that holds the bytes of one entry of the state."""

    segment: Segment
    offset: int
    size_bytes: int
    base: torch.Tensor = field(repr=False)  # (size_bytes,) uint8
    address: int

    def is_shared(self) -> bool:
        """Whether a tensor other than `base` uses the memory."""
        storage = self.base.untyped_storage()
        # Two: `base` itself and the Python object `storage`.
        return int(torch._C._storage_Use_Count(storage._cdata)) > 2


class Arena:
    """Slots in one or more segments.

    Args:
        huge_pages: None tries 2 MiB pages of hugetlb and takes ordinary ones where there are none.
        alignment: Of slots within their segment, in bytes; a power of two, at least 64.
    """

    def __init__(self, *, huge_pages: bool | None = None, alignment: int = _ALIGNMENT) -> None:
        self.segments: list[Segment] = []
        self._huge_pages = huge_pages
        self._alignment = alignment
        self._free: dict[Segment, list[tuple[int, int]]] = {}  # (offset, size) in order of offset
        self._zombies: list[Slot] = []  # freed while tensors of the user still looked at them

    def reserve(self, size_bytes: int, num_slots: int = 1) -> None:
        """Makes sure that so much more can be allocated without another segment."""
        needed = size_bytes + num_slots * self._alignment
        if not any(size >= needed for holes in self._free.values() for _, size in holes):
            self._add_segment(needed)

    def allocate(self, size_bytes: int) -> Slot:
        """Takes memory for one entry; its contents are undefined."""
        size = self._rounded(size_bytes)
        self._reclaim()
        for segment, holes in self._free.items():
            for i, (offset, hole) in enumerate(holes):
                if hole >= size:
                    holes[i : i + 1] = [(offset + size, hole - size)] if hole > size else []
                    return self._slot(segment, offset, size_bytes)
        self._add_segment(size)
        return self.allocate(size_bytes)

    def free(self, slot: Slot) -> None:
        """Gives memory back, once no tensor uses it any more."""
        self._zombies.append(slot)

    @property
    def size_bytes(self) -> int:
        """Of all segments."""
        return sum(segment.size_bytes for segment in self.segments)

    def close(self) -> None:
        """Closes the files; tensors keep their memory. Idempotent."""
        for segment in self.segments:
            segment.close()

    def _slot(self, segment: Segment, offset: int, size_bytes: int) -> Slot:
        return Slot(segment, offset, size_bytes, segment.tensor(offset, size_bytes), segment.address + offset)

    def _rounded(self, size_bytes: int) -> int:
        return max(self._alignment, -(-size_bytes // self._alignment) * self._alignment)

    def _add_segment(self, size_bytes: int) -> None:
        size_bytes += self._alignment  # the nonce lies there
        segment = None
        if self._huge_pages is not False:
            try:
                segment = Segment(size_bytes, huge_pages=True)
            except OSError as error:
                if self._huge_pages:
                    raise OSError(
                        error.errno,
                        f"{size_bytes} bytes in huge pages of 2 MiB: {error.strerror}; reserve them "
                        "(vm.nr_hugepages) or leave huge_pages=None",
                    ) from error
                logger.debug("no hugetlb pages (%s); using ordinary ones", error.strerror)
        if segment is None:
            segment = Segment(size_bytes, huge_pages=False)
        self.segments.append(segment)
        self._free[segment] = [(self._alignment, segment.size_bytes - self._alignment)]

    def _reclaim(self) -> None:
        kept = []
        for slot in self._zombies:
            if slot.is_shared():
                kept.append(slot)
            else:
                self._put_back(slot)
        self._zombies = kept

    def _put_back(self, slot: Slot) -> None:
        size = self._rounded(slot.size_bytes)
        holes = sorted([*self._free[slot.segment], (slot.offset, size)])
        merged: list[tuple[int, int]] = []
        for offset, hole in holes:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole)
            else:
                merged.append((offset, hole))
        self._free[slot.segment] = merged
