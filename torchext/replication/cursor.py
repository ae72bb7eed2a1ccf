"""Reading a log: a place that moves on through its files, as links, verification and receivers do."""

from __future__ import annotations

import mmap
import os

from torchext.replication.errors import StoreError
from torchext.replication.log import ABORTED, BEGIN, HEADER, LAST, Place, Segment, StreamLog


class Cursor:
    """A reader's place in a log, with the file that it reads.

    Args:
        log: The log.
        place: Where to begin: the end of a message or a frame.
        lends: Whether what is cut out of `map` may outlive the cursor, as the messages that `message` gives do.

    Attributes:
        log: The log.
        place: Where it is. Its checksum holds if `advance` was told so.
        map: The file that holds what comes next.
        fd: The same, as a descriptor; -1 if the log's own mapping is read, which costs no page faults.

    Raises:
        StoreError: There is no such place in the log: it was dropped, is not there yet, or never was.
    """

    def __init__(self, log: StreamLog, place: Place | tuple[int, int], *, lends: bool = False) -> None:
        self.log = log
        self._lends = lends
        self.fd = -1
        self.map: mmap.mmap | None = None
        self._segment: Segment | None = None
        self._at = BEGIN
        seq, offset = place[:2]
        with log.changed:
            segments, tail = list(log._segments), log.tail
            holder = next((s for s in reversed(segments) if s.base[:2] <= (seq, offset)), None)
            end = holder.end if holder is not None else BEGIN
        if (seq, offset) > tail[:2]:
            raise StoreError(f"message {seq}, offset {offset} is beyond the log's end, message {tail.seq}")
        if (seq, offset) == tail[:2] and not segments:
            self.place = tail
            return
        if holder is None:
            begin = segments[0].base.seq if segments else tail.seq
            raise StoreError(f"the log begins after message {begin}, so what follows message {seq} is not there")
        mapped = self._open(holder)
        if (seq, offset) == tail[:2]:
            self._at, self.place = end, tail
            return
        found = log._native.find_frame(mapped, BEGIN, end, seq + 1, offset, holder.base.checksum)
        if found is None:
            self.close()
            raise StoreError(f"no frame begins after message {seq}, offset {offset}")
        self._at, checksum = found
        self.place = Place(seq, offset, checksum)

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file."""
        if self.fd >= 0:
            os.close(self.fd)
        elif self._segment is not None:
            with self.log.changed:
                self._segment.num_users -= 1
        self.fd, self.map, self._segment = -1, None, None

    def region(self) -> tuple[int, int] | None:
        """The part of the file that follows; None if there is nothing yet, and then `place` is where the log ends."""
        while True:
            with self.log.changed:
                if self._segment is not None:
                    if self._at < self._segment.end:
                        return self._at, self._segment.end
                    self.place = self._segment.tail
                if self.place[:2] == self.log.tail[:2]:
                    return None
                segments = self.log._segments
                following = next((s for s in segments if s is not self._segment and s.base == self.place), None)
            if following is None:
                raise StoreError(f"what follows message {self.place.seq} was dropped from the log")
            self._open(following)

    def skip(self, at: int) -> None:
        """Moves on within the region."""
        self._at = at

    def advance(self, at: int, place: Place) -> None:
        """Moves on to a place in the same file."""
        self._at, self.place = at, place

    def message(self) -> tuple[int, int, bool, list[memoryview]] | None:
        """The next whole message: sequence number, kind, whether it was given up, and its parts; None if not there."""
        assert self._lends  # the parts outlive this cursor
        parts: list[memoryview] = []
        start = self._segment, self._at, self.place
        while True:
            region = self.region()
            if region is None:
                if self._segment is not start[0] and start[0] is not None:
                    self._open(start[0])
                _, self._at, self.place = start
                return None
            assert self.map is not None
            at, end = region
            view = memoryview(self.map)
            while at < end:
                _, length, seq, offset, flags, kind, checksum = HEADER.unpack_from(self.map, at)
                begin = at + HEADER.size
                if length:
                    parts.append(view[begin : begin + length])
                at = begin + length
                if flags & LAST:
                    self.advance(at, Place(seq, 0, checksum))
                    return seq, kind, bool(flags & ABORTED), parts
                self.advance(at, Place(seq - 1, offset + length, checksum))

    def _open(self, segment: Segment) -> mmap.mmap:
        self.close()
        with self.log.changed:  # so that it is not put to another use before it is known to be read
            if segment not in self.log._segments:
                raise StoreError(f"what follows message {segment.base.seq} was dropped from the log")
            if segment.map is not None and not self._lends:
                segment.num_users += 1
                self.map = segment.map
            else:
                self.fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
                self.map = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
                segment.lent.add(self.map)
        self._segment = segment
        self._at = BEGIN
        return self.map


def verify(log: StreamLog, begin: Place, end: Place) -> bool:
    """Reads back what lies between two places of a log and checks it against its checksums."""
    with Cursor(log, begin) as cursor:
        while cursor.place[:2] < end[:2]:
            region = cursor.region()
            if region is None or cursor.map is None:
                return False
            at, place = log.follow(cursor.map, *region, cursor.place)
            if at != region[1]:
                return False
            cursor.advance(at, place)
    return True
