"""Reading the entries of a training process: out of its shared memory, or over TCP streams; see also rdma.py."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import torch

from torchext._native import standby as native
from torchext.standby import wire
from torchext.standby.arena import NONCE_BYTES, Slot
from torchext.standby.changes import Changes, Rows
from torchext.standby.errors import CorruptStateError, StandbyError
from torchext.standby.images import Held, copy_rows
from torchext.transport import receive_exactly, receive_into

_CHUNK_BYTES = 8 << 20
PIECE = struct.Struct("<QQQ")  # entry, bytes, checksum of the bytes that follow


class Source(Protocol):
    """Where the entries of one training process can be read; made when it claims its rank."""

    def declare(self, number: int, size_bytes: int, *place: Any) -> None:
        """Says where an entry lies, as the `Link` of the process has put it.

        Raises:
            OSError: It cannot be reached.
            StandbyError: It does not lie there.
        """

    def forget(self, numbers: Sequence[int]) -> None:
        """Entries that are no more."""

    def add(self, stream: socket.socket) -> None:
        """One more data stream of the process is there.

        Raises:
            StandbyError: None was to come.
        """

    @property
    def is_complete(self) -> bool:
        """Whether all streams are there."""

    def pull(self, changes: Changes, entries: dict[int, Held]) -> int:
        """Brings what changed into ``entries`` and sets their checksums; returns how many bytes that were."""

    def interrupt(self) -> None:
        """Makes a `pull` that waits for the process end soon; from any thread."""

    def close(self) -> None:
        """Gives up all that it holds."""


def open_segment(pid: int, descriptor: int, nonce: bytes) -> int:
    """A descriptor of this process for a segment (see arena.py) of another one of this host; the caller closes it.

    Raises:
        OSError: This process may not, or the other one is gone.
        StandbyError: It is not the segment that it is said to be.
    """
    if len(nonce) != NONCE_BYTES:
        raise StandbyError(f"the nonce of a segment has {NONCE_BYTES} bytes, got {len(nonce)}")
    file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(file, len(nonce), 0) != nonce:
            raise StandbyError(f"descriptor {descriptor} of process {pid} is another file than expected")
    except BaseException:  # of a pipe, pread fails
        os.close(file)
        raise
    return file


class SharedMemory:
    """Segments of another process of this host, mapped for reading. They stay readable when that process dies.

    Args:
        pid: The process, as this one sees it.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped: dict[int, tuple[mmap.mmap, int]] = {}  # by descriptor: memory, address

    def open(self, descriptor: int, nonce: bytes) -> tuple[int, int]:
        """Maps a segment, once; returns its address and its size in bytes.

        Raises:
            OSError: This process may not, or the other one is gone.
            StandbyError: It is not the segment that it is said to be.
        """
        if descriptor not in self._mapped:
            file = open_segment(self._pid, descriptor, nonce)
            try:
                memory = mmap.mmap(file, os.fstat(file).st_size)
            finally:
                os.close(file)
            self._mapped[descriptor] = memory, torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        memory, address = self._mapped[descriptor]
        return address, len(memory)

    def close(self) -> None:
        """Unmaps all."""
        for memory, _ in self._mapped.values():
            with contextlib.suppress(BufferError):  # then it goes with the last tensor over it
                memory.close()
        self._mapped.clear()


class LocalSource:
    """Entries in the shared memory of a process of this host."""

    def __init__(self, pid: int) -> None:
        self._memory = SharedMemory(pid)
        self._places: dict[int, tuple[int, int]] = {}  # address and size of each entry

    def declare(self, number: int, size_bytes: int, *place: Any) -> None:
        """See `Source`."""
        descriptor, offset, nonce = place
        address, segment_bytes = self._memory.open(descriptor, bytes.fromhex(nonce))
        if offset < 0 or size_bytes < 0 or offset + size_bytes > segment_bytes:
            raise StandbyError(
                f"entry {number}, {size_bytes} bytes at {offset}, is not within its segment of {segment_bytes} bytes"
            )
        self._places[number] = address + offset, size_bytes

    def forget(self, numbers: Sequence[int]) -> None:
        """Entries that are no more."""
        for number in numbers:
            self._places.pop(number, None)

    def add(self, stream: socket.socket) -> None:
        """See `Source`."""
        raise StandbyError("a data stream came for a process whose memory is read")

    @property
    def is_complete(self) -> bool:
        """See `Source`."""
        return True

    def pull(self, changes: Changes, entries: dict[int, Held]) -> int:
        """See `Source`."""
        num_bytes = 0
        for number in changes.whole:
            slot = entries[number].slot
            entries[number].checksum = native.copy(slot.address, self._address(number, slot), slot.size_bytes)
            num_bytes += slot.size_bytes
        for number, rows in changes.each_rows():
            num_bytes += copy_rows(entries[number], self._address(number, entries[number].slot), rows, packed=False)
        return num_bytes

    def _address(self, number: int, slot: Slot) -> int:
        address, size_bytes = self._places[number]
        if size_bytes != slot.size_bytes:
            raise StandbyError(f"entry {number} has {slot.size_bytes} bytes, and was said to have {size_bytes}")
        return address

    def interrupt(self) -> None:
        """See `Source`; nothing here waits."""

    def close(self) -> None:
        """Unmaps the memory."""
        self._memory.close()


class TcpSource:
    """Entries that the training process sends over several streams, which it opened for the purpose."""

    def __init__(self, num_streams: int) -> None:
        self.num_streams = num_streams
        self._streams: list[socket.socket] = []

    def add(self, stream: socket.socket) -> None:
        """One more stream is there."""
        self._streams.append(stream)

    @property
    def is_complete(self) -> bool:
        """Whether all streams are there."""
        return len(self._streams) == self.num_streams

    def declare(self, number: int, size_bytes: int, *place: Any) -> None:
        """See `Source`; the sender knows where its entries lie."""

    def forget(self, numbers: Sequence[int]) -> None:
        """See `Source`."""

    def pull(self, changes: Changes, entries: dict[int, Held]) -> int:
        """See `Source`."""
        pieces: list[tuple[int, int, int]] = []  # entry, offset, size
        for number in sorted(changes.whole):
            size = entries[number].slot.size_bytes
            pieces += [(number, at, min(_CHUNK_BYTES, size - at)) for at in range(0, size, _CHUNK_BYTES)]
        rows = list(changes.each_rows())
        shares: list[tuple[list[tuple[int, int, int]], list[tuple[int, Rows]]]] = [([], []) for _ in self._streams]
        loads = [0] * len(shares)
        for piece in sorted(pieces, key=lambda piece: -piece[2]):
            lightest = loads.index(min(loads))
            shares[lightest][0].append(piece)
            loads[lightest] += piece[2]
        for number, each in rows:
            lightest = loads.index(min(loads))
            shares[lightest][1].append((number, each))
            loads[lightest] += each.size_bytes(entries[number].slot.size_bytes)
        in_parallel(
            [(_pull_share, (stream, *share, entries)) for stream, share in zip(self._streams, shares, strict=True)]
        )
        for number in changes.whole:
            slot = entries[number].slot
            entries[number].checksum = native.checksum(slot.address, slot.size_bytes)
        return sum(loads)

    def interrupt(self) -> None:
        """See `Source`."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the streams: their senders end."""
        self.interrupt()
        for stream in self._streams:
            stream.close()


def in_parallel(calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
    """Makes each call in a thread of its own; raises the first failure once all have ended."""
    results: list[Future[None]] = [Future() for _ in calls]

    def run(result: Future[None], call: Any, arguments: tuple[Any, ...]) -> None:
        try:
            result.set_result(call(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threads = [
        threading.Thread(target=run, args=(result, *call), name="torchext-standby-pull")
        for result, call in zip(results, calls, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        result.result()


def _pull_share(
    stream: socket.socket,
    pieces: list[tuple[int, int, int]],
    rows: list[tuple[int, Rows]],
    entries: dict[int, Held],
) -> None:
    changes = Changes()
    for number, each in rows:
        changes.rows.setdefault(number, []).append(each)
    words, data = changes.to_wire()
    wire.send(stream, {"pieces": pieces, "rows": words, "sums_only": False}, data)
    for number, offset, size in pieces:
        base = entries[number].slot.base[offset : offset + size]
        checksum = receive_header(stream, number, size)
        receive_into(stream, base.numpy().data)
        check(native.checksum(base.data_ptr(), size), checksum, number)
    # As the sender does it: entries that share their rows come together.
    for number, each in Changes.from_wire(words, memoryview(data)).each_rows():
        size = each.size_bytes(entries[number].slot.size_bytes)
        checksum = receive_header(stream, number, size)
        packed = np.empty(size, dtype=np.uint8)
        receive_into(stream, packed.data)
        check(native.checksum(packed.ctypes.data, size), checksum, number)
        copy_rows(entries[number], packed.ctypes.data, each, packed=True)


def receive_header(stream: socket.socket, number: int, size: int) -> int:
    """The checksum of the piece that comes next, which has to be so many bytes of that entry."""
    got_number, got_size, checksum = PIECE.unpack(receive_exactly(stream, PIECE.size))
    if (got_number, got_size) != (number, size):
        raise CorruptStateError(f"expected {size} bytes of entry {number}, got {got_size} of {got_number}")
    return int(checksum)


def check(got: int, expected: int, number: int) -> None:
    """Raises CorruptStateError unless both checksums of an entry, or of its rows, are equal."""
    if got != expected:
        raise CorruptStateError(f"entry {number} arrived with another checksum than it was sent with")


def serve(stream: socket.socket, find: Any) -> None:
    """The sending side of one stream: answers requests until the connection ends.

    Args:
        stream: Connected to the standby.
        find: Gives the bytes of an entry by its number: (size,) uint8.
    """
    while True:
        words, data = wire.receive(stream)
        for number, offset, size in words["pieces"]:
            _send_piece(stream, number, find(number)[offset : offset + size], words["sums_only"])
        for number, rows in Changes.from_wire(words["rows"], data).each_rows():
            base = find(number)
            offsets, sizes = rows.ranges(base.numel())
            rows_of_it = torch.cat([base[o : o + s] for o, s in zip(offsets, sizes, strict=True)])
            _send_piece(stream, number, rows_of_it, words["sums_only"])


def _send_piece(stream: socket.socket, number: int, piece: torch.Tensor, sums_only: bool) -> None:
    size = piece.numel()
    stream.sendall(PIECE.pack(number, size, native.checksum(piece.data_ptr(), size)))
    if not sums_only:  # they are read by RDMA
        stream.sendall(piece.numpy().data)
