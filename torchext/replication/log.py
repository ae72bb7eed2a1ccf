"""The log of one stream: messages in segment files, in the form in which they travel.

A segment is a file of fixed size, reserved on the disk before anything is written, so that a full disk is met where it
can be said and never in the middle of a message. Frames (csrc/replication/frames.hpp) are received straight into the
mapped file and sent straight out of it. After a crash, whatever does not continue the chain of checksums is cut off.

A page that is written to for the first time costs several times what the copy into it does. So files that were dropped
are used again, mapped as they are, and what was just written is sent and verified through the mapping that wrote it.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torchext._optional import require_native
from torchext.replication.errors import StoreError, StoreFullError

Buffer = bytes | bytearray | memoryview | mmap.mmap

LAST = 1  # flags of frames, as in frames.hpp
ABORTED = 2
HEADER = struct.Struct("<IIQQHHI")  # magic, length, seq, offset, flags, kind, checksum
MAX_PAYLOAD = 1 << 20

_SEGMENT = struct.Struct("<8sQQI")  # magic, then the place at which the segment begins
_SEGMENT_MAGIC = b"TXSEGM01"
BEGIN = 64  # where the frames of a segment begin
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})\.seg")
_MIN_SPARES = 4  # dropped files that are kept for use again
_MAX_MAPPED = 8  # of the newest files: what was just written is about to be sent and verified
MIN_SEGMENT_BYTES = BEGIN + HEADER.size + MAX_PAYLOAD

_INCOMPLETE, _BLANK = 0, 1
_VERDICTS = {2: "no frame where one is due", 3: "a length beyond bounds", 4: "a frame out of place", 5: "a checksum"}

_logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """A place in a stream: after ``seq`` whole messages and ``offset`` bytes of the next.

    Attributes:
        checksum: Of the frame before; it stands for all that came before.
    """

    seq: int
    offset: int
    checksum: int


class FrameError(StoreError):
    """What came is not what has to follow; nothing of it was taken."""


@dataclass(eq=False)
class Segment:
    """A file of a log; all of it but the path and the base is guarded by the log's `changed`."""

    path: Path
    base: Place
    tail: Place  # where its frames end
    end: int = BEGIN  # ... in the file
    map: mmap.mmap | None = None  # the one that it was written through, while it is among the newest
    num_users: int = 0  # cursors that read through it
    lent: weakref.WeakSet[mmap.mmap] = field(default_factory=weakref.WeakSet)  # those that messages lie in


@dataclass(eq=False)
class _Writable:
    segment: Segment
    fd: int
    map: mmap.mmap
    filled: int  # bytes up to here came in; from segment.end on they are not yet whole frames


class StreamLog:
    """Messages of one origin, as far as this site has them.

    One thread at a time may write (hold `writing`); any number may read, each with a `Cursor` (cursor.py) of its own.

    Args:
        folder: For this log alone; made if missing.
        segment_bytes: Size of a file.
        max_message_bytes: Longer messages are refused.
        spare_bytes: Files that were dropped are kept for use again as long as the log takes no more than this with
            them, and a few in any case.

    Attributes:
        changed: Guards `tail` and the list of segments; notified whenever the log grows.
        writing: Held by who writes.

    Raises:
        StoreError: What is in the folder is no log, or is damaged elsewhere than at its end.
        OSError: As the file system says.
    """

    def __init__(self, folder: Path, *, segment_bytes: int, max_message_bytes: int, spare_bytes: int = 0) -> None:
        require_native()
        from torchext._native import replication as native

        self._native = native
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._max_message = max_message_bytes
        self._max_files = spare_bytes // segment_bytes  # with the spares
        self.changed = threading.Condition()
        self.writing = threading.Lock()
        self._segments: list[Segment] = []
        self._spares: list[tuple[int, Path, mmap.mmap | None]] = []
        self._num_spares = 0
        self._writable: _Writable | None = None
        self._closed = False
        self.tail = Place(0, 0, 0)
        folder.mkdir(parents=True, exist_ok=True)
        self._recover()

    # What is there.

    @property
    def first(self) -> Place:
        """Where the log begins: what came before was dropped."""
        with self.changed:
            return self._segments[0].base if self._segments else self.tail

    @property
    def size_bytes(self) -> int:
        """What the log takes on the disk."""
        with self.changed:
            return len(self._segments) * self._segment_bytes

    def size_with(self, size: int) -> int:
        """What it would take with a message of so many bytes more."""
        with self.changed:
            return self.size_bytes + self._num_files_for(size) * self._segment_bytes

    def wait_beyond(self, place: Place, timeout_s: float) -> bool:
        """Waits until there is something after this place; whether there is."""
        with self.changed:
            return self.changed.wait_for(lambda: self._closed or self.tail[:2] > place[:2], timeout_s) and (
                self.tail[:2] > place[:2]
            )

    # Writing: the caller holds `writing`.

    def append(self, source: Buffer | int, size: int, kind: int) -> int:
        """Adds a message.

        Args:
            source: The bytes, or the descriptor of a file to read them from.
            size: How many.
            kind: Is handed to the readers.

        Returns:
            Its sequence number.

        Raises:
            StoreFullError: There is no room; nothing was taken.
            StoreError: The file turned out shorter than ``size``; the message exists as one that was given up.
        """
        if size > self._max_message:
            raise StoreError(f"a message of {size} bytes is longer than max_message_bytes = {self._max_message}")
        self._reserve(size)
        if self.tail.offset:
            raise AssertionError("append in the middle of a message")
        sent = 0
        while True:
            writable = self._room_for(HEADER.size + min(size - sent, 1))
            at = writable.segment.end
            length = min(size - sent, MAX_PAYLOAD, self._segment_bytes - at - HEADER.size)
            flags = LAST if sent + length == size else 0
            begin, data = sent, source
            if isinstance(data, int):
                begin, data = at + HEADER.size, writable.map
                with memoryview(writable.map) as view:
                    length_read = _read_all(source, view[begin : begin + length], sent)  # type: ignore[arg-type]
                if length_read < length:
                    length, flags = length_read, LAST | ABORTED
            seq = self._put(writable, data, begin, length, flags, kind)
            sent += length
            if flags & ABORTED:
                raise StoreError(f"the file ended after {sent} of {size} bytes; message {seq} was given up")
            if flags & LAST:
                return seq

    def abort_partial(self) -> bool:
        """Gives up a message that was begun before a crash; whether there was one."""
        if not self.tail.offset:
            return False
        self._reserve(0)
        self._put(self._room_for(HEADER.size), b"", 0, 0, LAST | ABORTED, 0)
        return True

    def receive(self, read: Callable[[memoryview], int]) -> int:
        """Reads once, straight into the log, and takes what whole frames there are.

        Args:
            read: Fills a part of the memory that it is given and says how much, as ``socket.recv_into``.

        Returns:
            What ``read`` returned.

        Raises:
            FrameError: What came does not continue this log.
            StoreFullError: There is no room for more; call again once there is.
        """
        writable = self._writable
        if writable is None or writable.filled == self._segment_bytes:
            writable = self._roll(carry=True)
        with memoryview(writable.map) as view:
            count = read(view[writable.filled : writable.filled + (4 << 20)])
        writable.filled += count
        verdict, end, *place = self._native.scan_frames(
            writable.map, writable.segment.end, writable.filled, *self.tail, self._max_message
        )
        if end > writable.segment.end:
            self._commit(writable, end, Place(*place))
        if verdict not in (_INCOMPLETE,):
            raise FrameError(_VERDICTS.get(verdict, "no frame where one is due"))
        return count

    def begin_receiving(self) -> None:
        """Forgets bytes of a frame whose rest will not come: the connection that brought them is gone."""
        if self._writable is not None:
            self._writable.filled = self._writable.segment.end

    def begin_at(self, place: Place) -> None:
        """Has an empty log begin later in its stream, where the origin's own begins by now."""
        with self.changed:
            if self._segments or self.tail.seq:
                raise StoreError(f"{self._folder}: only an empty log can begin at message {place.seq + 1}")
            self.tail = place

    # Durability: one thread.

    def sync(self) -> Place:
        """Brings everything to the disk that was there at the call; returns up to where."""
        with self.changed:
            place = self.tail
            if self._writable is None:
                return place
            fd = os.dup(self._writable.fd)  # the files before it are on the disk: see _roll
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        return place

    def follow(self, data: Buffer, begin: int, end: int, place: Place) -> tuple[int, Place]:
        """Goes over frames as far as they are whole and right; returns where that is, in the bytes and the stream."""
        _, at, *reached = self._native.scan_frames(data, begin, end, *place, self._max_message)
        return at, Place(*reached)

    def truncate(self, before: int) -> int:
        """Drops files that hold only messages before this one; returns how many."""
        count = 0
        with self.changed:
            while len(self._segments) > 1:
                following = self._segments[1].base
                if following.seq + (following.offset > 0) >= before:
                    break
                self._drop(self._segments.pop(0))
                count += 1
            self.changed.notify_all()
        return count

    def _drop(self, segment: Segment) -> None:
        """Removes a file, or keeps it for use again, as its place on the disk and in memory is costly to make."""
        is_enough = len(self._spares) >= max(_MIN_SPARES, self._max_files - len(self._segments))
        if is_enough or segment.num_users or segment.lent:
            segment.path.unlink()  # who reads it keeps it
            return
        path = self._spare_path()
        os.rename(segment.path, path)
        self._spares.append((os.open(path, os.O_RDWR | os.O_CLOEXEC), path, segment.map))

    def end_waits(self) -> None:
        """Has nobody wait for more any longer."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def close(self) -> None:
        """Closes the files, which are not synced by this."""
        self.end_waits()
        with self.changed:
            if self._writable is not None:
                os.close(self._writable.fd)
                self._writable = None
            for segment in self._segments:
                segment.map = None
        for fd, path, _ in self._spares:
            os.close(fd)
            path.unlink(missing_ok=True)
        self._spares = []

    def _put(self, writable: _Writable, data: Buffer, begin: int, length: int, flags: int, kind: int) -> int:
        seq, offset, before = self.tail
        end = writable.segment.end
        checksum = self._native.put_frame(writable.map, end, data, begin, length, seq + 1, offset, flags, kind, before)
        last = bool(flags & LAST)
        place = Place(seq + last, 0 if last else offset + length, checksum)
        writable.filled = end + HEADER.size + length
        self._commit(writable, writable.filled, place)
        return seq + 1

    def _commit(self, writable: _Writable, end: int, place: Place) -> None:
        with self.changed:
            writable.segment.end = end
            writable.segment.tail = self.tail = place
            self.changed.notify_all()

    def _room_for(self, size: int) -> _Writable:
        writable = self._writable
        if writable is None or self._segment_bytes - writable.segment.end < size:
            writable = self._roll(carry=False)
        return writable

    def _reserve(self, size: int) -> None:
        """Makes files for all of a message before its first byte is written."""
        count = self._num_files_for(size)
        while len(self._spares) < count:
            self._make_spare()

    def _num_files_for(self, size: int) -> int:
        """How many files more a message takes."""
        left = 0 if self._writable is None else self._segment_bytes - self._writable.segment.end
        per_segment = self._segment_bytes - BEGIN
        frames = size // MAX_PAYLOAD + 1
        needed = size + HEADER.size * frames - max(0, left - HEADER.size)
        count = 0
        while needed > 0:
            count += 1
            needed -= per_segment - 2 * HEADER.size
        return count

    def _make_spare(self) -> None:
        path = self._spare_path()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._segment_bytes)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StoreFullError(
                    f"{self._folder}: no room for {self._segment_bytes} bytes more ({error.strerror})"
                ) from None
            raise
        with self.changed:
            self._spares.append((fd, path, None))

    def _spare_path(self) -> Path:
        with self.changed:
            self._num_spares += 1
            return self._folder / f"spare-{self._num_spares}"

    def _roll(self, *, carry: bool) -> _Writable:
        """Goes on in a new file; with ``carry``, takes along what came in of a frame that is not whole yet."""
        if not self._spares:
            self._make_spare()
        former = self._writable
        if former is not None:
            # All of it must be on the disk before a file that goes on from its end: after a loss of power, a gap
            # between two files could not be told from damage.
            os.fdatasync(former.fd)
        with self.changed:
            fd, spare, mapped = self._spares.pop()
        base = self.tail
        path = self._folder / f"{base.seq:016x}-{base.offset:016x}.seg"
        os.pwrite(fd, _SEGMENT.pack(_SEGMENT_MAGIC, *base), 0)
        os.fsync(fd)
        os.rename(spare, path)
        sync_folder(self._folder)
        if mapped is None:
            mapped = _mapped(fd, self._segment_bytes)
        writable = _Writable(Segment(path, base, base, map=mapped), fd, mapped, BEGIN)
        if former is not None and carry:
            begun = former.map[former.segment.end : former.filled]
            writable.map[BEGIN : BEGIN + len(begun)] = begun
            writable.filled += len(begun)
        with self.changed:
            self._segments.append(writable.segment)
            self._writable = writable
            for segment in self._segments[-2 * _MAX_MAPPED : -_MAX_MAPPED]:
                segment.map = None
        if former is not None:
            os.close(former.fd)
        return writable

    def _recover(self) -> None:
        found: list[Segment] = []
        for path in sorted(self._folder.iterdir()):
            if path.name.startswith("spare-"):
                path.unlink()
                continue
            if not _NAME.fullmatch(path.name):
                raise StoreError(f"{path}: not a file of this log; give each site a store of its own")
            base = _base_of(path)
            found.append(Segment(path, base, base))
        for number, segment in enumerate(found):
            if number == 0:
                self.tail = segment.base
            elif segment.base != self.tail:
                raise StoreError(
                    f"{found[number - 1].path}: damaged after message {self.tail.seq}, offset {self.tail.offset}, for "
                    f"the next file begins at message {segment.base.seq + 1}; restore it, or remove the folder to "
                    "have the other sites send the stream again"
                )
            self._scan(segment, is_last=number == len(found) - 1)
            self._segments.append(segment)

    def _scan(self, segment: Segment, *, is_last: bool) -> None:
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        size = os.fstat(fd).st_size
        os.fdatasync(fd)  # of a process that was killed before it did so
        mapped = mmap.mmap(fd, size)
        verdict, segment.end, *place = self._native.scan_frames(mapped, BEGIN, size, *self.tail, self._max_message)
        segment.tail = self.tail = Place(*place)
        if not is_last or size != self._segment_bytes:
            mapped.close()
            os.close(fd)
            return
        if verdict not in (_INCOMPLETE, _BLANK):
            _logger.info(
                "%s: cut off after message %d, offset %d: what follows was not written whole, or is older (%s)",
                segment.path,
                *self.tail[:2],
                _VERDICTS[verdict],
            )
        segment.map = mapped
        self._writable = _Writable(segment, fd, mapped, segment.end)


def _mapped(fd: int, size: int) -> mmap.mmap:
    # All pages at once: one by one, as they are first written to, takes several times as long.
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _base_of(path: Path) -> Place:
    with open(path, "rb") as file:
        head = file.read(_SEGMENT.size)
    if len(head) < _SEGMENT.size or not head.startswith(_SEGMENT_MAGIC):
        raise StoreError(f"{path}: not a segment of a log: its header is missing")
    _, *place = _SEGMENT.unpack(head)
    return Place(*place)


def _read_all(fd: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
