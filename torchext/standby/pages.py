"""Which pages of the arena were written, as the kernel saw it: userfaultfd's asynchronous write protection."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from torchext._native import standby as native
from torchext.standby.arena import Segment, Slot
from torchext.standby.changes import Changes, Rows

PAGE_BYTES = 4096


class PageTracking:
    """Says what was written to, whoever did it and however: optimizers, ``.data``, numpy, C++ code.

    Not what a forked child writes: it has page tables of its own. Slots have to begin at page boundaries (see
    `Arena`). With 2 MiB pages a write counts for all that lies in those; with pages of 4 KiB the first write to each
    one after a scan costs a fault, which a dense optimizer notices.

    Raises:
        OSError: The kernel does not track pages (Linux 6.7 or later does), or not for this process.

    Source: the counterpart, for a process, of the page-modification logging that Phantasy uses for virtual machines.
    """

    def __init__(self) -> None:
        self._trackers: dict[Segment, native.PageTracker] = {}
        probe = Segment(1, huge_pages=False)
        try:
            native.PageTracker(probe.address, probe.size_bytes).close()
        finally:
            probe.close()

    def take(self, segments: Iterable[Segment], slots: Iterable[tuple[int, Slot]], changes: Changes) -> None:
        """Adds what was written since the last call to ``changes``, and starts anew.

        Args:
            segments: All of the arena. One that is new is tracked from now on: all in it has to be in ``changes``.
            slots: Those of interest, with the numbers of their entries.
            changes: Where to add.
        """
        written = self._scan(rearm=True)
        for segment in segments:
            if segment not in self._trackers:
                self._trackers[segment] = native.PageTracker(segment.address, segment.size_bytes)
        for number, slot in slots:
            pages = _pages_of(written, slot)
            if len(pages):
                changes.add_rows(number, Rows(PAGE_BYTES, pages), slot.size_bytes)

    def written(self, slots: Iterable[tuple[int, Slot]]) -> set[int]:
        """Numbers of the entries that were written to since the last `take`."""
        written = self._scan(rearm=False)
        return {number for number, slot in slots if len(_pages_of(written, slot))}

    def close(self) -> None:
        """Stops tracking. Idempotent."""
        for tracker in self._trackers.values():
            tracker.close()
        self._trackers.clear()

    def _scan(self, *, rearm: bool) -> dict[Segment, npt.NDArray[np.bool_]]:
        """For each segment with a written page: which ones are, (num_pages,)."""
        found = {}
        for segment, tracker in self._trackers.items():
            ranges = tracker.scan(rearm)
            if ranges:
                pages = found[segment] = np.zeros(segment.size_bytes // PAGE_BYTES, dtype=np.bool_)
                for offset, size in ranges:
                    pages[offset // PAGE_BYTES : (offset + size) // PAGE_BYTES] = True
        return found


def _pages_of(written: dict[Segment, npt.NDArray[np.bool_]], slot: Slot) -> npt.NDArray[np.int64]:
    """The pages of a slot that were written to, counted from its start."""
    pages = written.get(slot.segment)
    if pages is None:
        return np.zeros(0, dtype=np.int64)
    first = slot.offset // PAGE_BYTES
    return np.flatnonzero(pages[first : -(-(slot.offset + slot.size_bytes) // PAGE_BYTES)])
