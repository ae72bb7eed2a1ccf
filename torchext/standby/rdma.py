"""Entries that the standby reads out of the training process's memory with RDMA READ, through pyverbs (extra: rdma).

The training process registers its segments and takes no further part in the reading. Its checksums of what is read come
over a TCP stream, as do all control messages.

Source: Phantasy's backup pulls pages with RDMA READ while the virtual machine runs; the same of segments of a process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import ipaddress
import logging
import os
import re
import resource
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from torchext._native import standby as native
from torchext.standby import wire
from torchext.standby.arena import Segment
from torchext.standby.changes import Changes
from torchext.standby.errors import StandbyError, StandbyLostError
from torchext.standby.images import Held, copy_rows
from torchext.standby.source import check, receive_header

logger = logging.getLogger(__name__)

_HALF_BYTES = 4 << 20  # of the staging buffer: one half is copied out while the other one is read into
_READ_BYTES = 1 << 20
_MAX_READS = 128  # in flight for each half
_TIMEOUT_S = 30.0  # between two completions; the device itself gives up a peer that does not answer after some seconds
_TICK_MS = 100
_ACK_TIMEOUT = 16  # 4.096 us << 16: 268 ms until a request is sent again
_RETRIES = 6  # seven means for ever to some devices
_CAP_IPC_LOCK = 14  # linux/capability.h

_VERBS = {
    "pyverbs.addr": ("GID", "AHAttr", "GlobalRoute"),
    "pyverbs.cq": ("CQ", "CompChannel"),
    "pyverbs.device": ("Context", "get_device_list"),
    "pyverbs.mr": ("MR",),
    "pyverbs.pd": ("PD",),
    "pyverbs.qp": ("QP", "QPAttr", "QPCap", "QPInitAttr"),
    "pyverbs.wr": ("SGE", "SendWR"),
}

# A completion channel's descriptor is found as the one that was not there before: one channel at a time.
_opening = threading.Lock()


class Read(NamedTuple):
    """Bytes of the peer's memory, and the address here that they are to be copied to."""

    key: int
    remote: int
    size: int
    local: int


def lacks(address: str | None) -> str | None:
    """What RDMA lacks on this host; None where there is a device.

    Args:
        address: The IP address that the device has to have; None: any device will do.
    """
    try:
        _, context, *_ = _open(address)
    except StandbyError as error:
        return str(error)
    context.close()
    return None


def may_pin_all() -> bool:
    """Whether this process may lock any amount of memory, as registering all of the state for RDMA needs."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        return True
    status = Path("/proc/self/status").read_text()
    return bool(int(re.findall(r"^CapEff:\s+(\w+)$", status, re.MULTILINE)[0], 16) & 1 << _CAP_IPC_LOCK)


class Endpoint:
    """One end of a reliable connection between two RDMA devices: registers memory, or reads the peer's.

    For one thread at a time, but for `interrupt`.

    Args:
        address: This host's IP address on the way to the peer. The device that has it is used.

    Raises:
        StandbyError: There is no such device; the message says what is missing.
    """

    def __init__(self, address: str) -> None:
        self._verbs, self._context, self._port, self._gid_index, gid = _open(address)
        self._regions: dict[Segment, Any] = {}
        self._staging: Segment | None = None
        self._peer = ""
        self._posted = self._done = 0  # batches of reads
        self._interrupted = threading.Event()
        v = self._verbs
        try:
            with _explained(f"setting up RDMA device {self._context.name}"):
                self._domain = v.PD(self._context)
                with _opening:
                    before = _event_descriptors()
                    self._channel = v.CompChannel(self._context)
                    added = _event_descriptors() - before
                if len(added) != 1:
                    raise StandbyError(
                        f"RDMA device {self._context.name}: this process has opened {len(added)} event channels at the "
                        "same time, expected one; try again"
                    )
                (self._descriptor,) = added
                # All requests of both halves at once, as a connection that breaks completes each of them.
                self._queue = v.CQ(self._context, 2 * _MAX_READS, None, self._channel)
                capacity = v.QPCap(max_send_wr=2 * _MAX_READS, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
                kind = v.QPInitAttr(qp_type=v.e.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=capacity)
                self._pair = v.QP(self._domain, kind)
                self.words: dict[str, Any] = {  # what the peer's `connect` needs
                    "qpn": self._pair.qp_num,
                    "psn": secrets.randbits(24),
                    "gid": gid,
                    "mtu": self._context.query_port(self._port).active_mtu,
                    "reads": min(16, self._context.query_device().max_qp_rd_atom),
                }
        except BaseException:
            self.close()
            raise

    def connect(self, peer: dict[str, Any]) -> None:
        """Gets ready for the peer, whose `words` these are. To be read by it, it is enough that both have done so.

        Raises:
            StandbyError: The device refuses.
        """
        v = self._verbs
        with _explained(f"connecting RDMA device {self._context.name} to {peer['gid']}"):
            attributes = v.QPAttr(port_num=self._port)
            attributes.qp_access_flags = v.e.IBV_ACCESS_REMOTE_READ
            self._pair.to_init(attributes)
            route = v.GlobalRoute(dgid=v.GID(peer["gid"]), sgid_index=self._gid_index, hop_limit=64)
            attributes.ah_attr = v.AHAttr(port_num=self._port, is_global=1, gr=route)
            attributes.path_mtu = min(self.words["mtu"], peer["mtu"])
            attributes.dest_qp_num, attributes.rq_psn = peer["qpn"], peer["psn"]
            attributes.max_dest_rd_atomic = attributes.max_rd_atomic = min(self.words["reads"], peer["reads"])
            attributes.min_rnr_timer = 12
            self._pair.to_rtr(attributes)
            attributes.sq_psn, attributes.timeout = self.words["psn"], _ACK_TIMEOUT
            attributes.retry_cnt = attributes.rnr_retry = _RETRIES
            self._pair.to_rts(attributes)
        self._peer = peer["gid"]

    def expose(self, segment: Segment) -> int:
        """Lets the peer read a segment, from now until `close`; returns the key that it needs.

        Raises:
            StandbyError: Its memory cannot be registered.
        """
        return int(self._region(segment, self._verbs.e.IBV_ACCESS_REMOTE_READ).rkey)

    def read(self, wanted: Sequence[Read]) -> None:
        """Reads the peer's memory; blocks until all is here.

        Raises:
            StandbyLostError: The peer does not answer, or has not registered what was asked for.
            ConnectionAbortedError: `interrupt` was called.
        """
        behind: list[tuple[Read, int]] = []
        with _explained(f"RDMA READ from {self._peer}"):
            if self._staging is None:
                self._staging = Segment(2 * _HALF_BYTES, huge_pages=False)  # shared, so that no fork moves it
            for batch in _batches(wanted, self._staging.address):
                self._post(batch)
                self._finish(behind, self._posted - 1)
                behind = batch
            self._finish(behind, self._posted)

    def interrupt(self) -> None:
        """Makes `read` end soon; from any thread."""
        self._interrupted.set()

    def close(self) -> None:
        """Gives the device back. Idempotent; raises nothing."""
        try:
            with _explained(f"closing RDMA device {self._context.name}"):
                self._context.close()  # and all that was made with it
        except StandbyError as error:
            logger.warning("%s", error)
        self._regions.clear()
        if self._staging is not None:
            self._staging.close()

    def _region(self, segment: Segment, access: int) -> Any:
        if segment not in self._regions:
            size = segment.size_bytes
            with _explained(f"registering {size} bytes for RDMA (does ulimit -l allow it?)"):
                self._regions[segment] = self._verbs.MR(self._domain, size, access, address=segment.address)
        return self._regions[segment]

    def _post(self, batch: list[tuple[Read, int]]) -> None:
        v = self._verbs
        assert self._staging is not None
        region = self._region(self._staging, v.e.IBV_ACCESS_LOCAL_WRITE)
        self._posted += 1
        for i, (read, place) in enumerate(batch):
            # They complete in order: the last one stands for all.
            flags = v.e.IBV_SEND_SIGNALED if i == len(batch) - 1 else 0
            piece = v.SGE(place, read.size, region.lkey)
            request = v.SendWR(wr_id=self._posted, opcode=v.e.IBV_WR_RDMA_READ, num_sge=1, sg=[piece], send_flags=flags)
            request.set_wr_rdma(read.key, read.remote)
            self._pair.post_send(request)

    def _finish(self, batch: list[tuple[Read, int]], number: int) -> None:
        self._await(number)
        for read, place in batch:
            native.copy(read.local, place, read.size)

    def _await(self, number: int) -> None:
        """Until a batch is complete."""
        end = time.monotonic() + _TIMEOUT_S
        is_armed = False
        events = select.poll()
        events.register(self._descriptor, select.POLLIN)
        while self._done < number:
            found, completions = self._queue.poll(2)
            for each in completions:
                if each.status != self._verbs.e.IBV_WC_SUCCESS:
                    raise StandbyLostError(
                        f"RDMA READ from {self._peer} failed with {self._meaning(each.status)}: the link is cut, the "
                        "other process is gone, or the memory is not registered there"
                    )
                self._done = each.wr_id
            if found:
                continue
            if not is_armed:
                self._queue.req_notify()  # and look once more: one may have come before
                is_armed = True
            elif events.poll(_TICK_MS):
                self._channel.get_cq_event(self._queue)
                self._queue.ack_events(1)
                is_armed = False
            elif self._interrupted.is_set():
                raise ConnectionAbortedError("the connection ended during an RDMA READ")
            elif time.monotonic() > end:
                raise StandbyLostError(f"RDMA READ from {self._peer} has not ended within {_TIMEOUT_S:g} s")

    def _meaning(self, status: int) -> str:
        """What libibverbs calls a completion's status."""
        e = self._verbs.e
        names = [name for name in dir(e) if name.startswith("IBV_WC_") and name.endswith("_ERR")]
        return " ".join([f"status {status}", *(name for name in names if getattr(e, name) == status)])


class RdmaSource:
    """Entries in the registered memory of a process of another host; see `source.Source`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._stream: socket.socket | None = None  # brings the checksums
        self._places: dict[int, tuple[int, int, int]] = {}  # key, address and size of each entry

    def declare(self, number: int, size_bytes: int, key: int, address: int) -> None:
        """Says where an entry lies."""
        self._places[number] = key, address, size_bytes

    def forget(self, numbers: Sequence[int]) -> None:
        """Entries that are no more."""
        for number in numbers:
            self._places.pop(number, None)

    def add(self, stream: socket.socket) -> None:
        """The stream is there."""
        self._stream = stream

    @property
    def is_complete(self) -> bool:
        """Whether it is."""
        return self._stream is not None

    def pull(self, changes: Changes, entries: dict[int, Held]) -> int:
        """Brings what changed; the training process sums it up at the same time."""
        stream = self._stream
        assert stream is not None
        rows = Changes()
        rows.rows = changes.rows
        words, data = rows.to_wire()
        whole = [(number, entries[number]) for number in sorted(changes.whole)]
        pieces = [(number, 0, held.slot.size_bytes) for number, held in whole]
        wire.send(stream, {"pieces": pieces, "rows": words, "sums_only": True}, data)
        self._endpoint.read(
            [self._read(number, held, 0, held.slot.size_bytes, held.slot.address) for number, held in whole]
        )
        num_bytes = 0
        for number, held in whole:
            size = held.slot.size_bytes
            held.checksum = native.checksum(held.slot.address, size)
            check(held.checksum, receive_header(stream, number, size), number)
            num_bytes += size
        # As the other side does it: entries that share their rows come together.
        for number, each in Changes.from_wire(words, memoryview(data)).each_rows():
            held = entries[number]
            offsets, sizes = each.ranges(held.slot.size_bytes)
            packed = np.empty(sizes.sum(), dtype=np.uint8)
            places = packed.ctypes.data + np.cumsum(sizes) - sizes
            self._endpoint.read(
                [
                    self._read(number, held, int(offset), int(size), int(place))
                    for offset, size, place in zip(offsets, sizes, places, strict=True)
                ]
            )
            check(native.checksum(packed.ctypes.data, packed.size), receive_header(stream, number, packed.size), number)
            num_bytes += copy_rows(held, packed.ctypes.data, each, packed=True)
        return num_bytes

    def _read(self, number: int, held: Held, offset: int, size: int, local: int) -> Read:
        key, address, size_bytes = self._places[number]
        if size_bytes != held.slot.size_bytes:
            raise StandbyError(f"entry {number} has {held.slot.size_bytes} bytes, and was said to have {size_bytes}")
        return Read(key, address + offset, size, local)

    def interrupt(self) -> None:
        """Makes `pull` end soon; from any thread."""
        self._endpoint.interrupt()
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the stream and gives the device back."""
        self.interrupt()
        if self._stream is not None:
            self._stream.close()
        self._endpoint.close()


def _batches(wanted: Sequence[Read], staging: int) -> Iterator[list[tuple[Read, int]]]:
    """Cuts reads into what fits a half of the staging buffer, each with its place there; the halves in turn."""
    batch: list[tuple[Read, int]] = []
    half = used = 0
    for read in wanted:
        done = 0
        while done < read.size:
            if used == _HALF_BYTES or len(batch) == _MAX_READS:
                yield batch
                batch, half, used = [], 1 - half, 0
            size = min(read.size - done, _HALF_BYTES - used, _READ_BYTES)
            part = Read(read.key, read.remote + done, size, read.local + done)
            batch.append((part, staging + half * _HALF_BYTES + used))
            used += size
            done += size
    if batch:
        yield batch


def _open(address: str | None) -> tuple[Any, Any, int, int, str]:
    """The names of pyverbs; and of the device with an address its context, port, index of its GID, and that.

    A RoCE device's GIDs are its network interface's addresses.
    """
    if not any(Path("/sys/class/infiniband").glob("*")):
        raise StandbyError(
            "this host has no RDMA device (/sys/class/infiniband is empty); to try without a card, with the kernel "
            "module rdma_rxe: rdma link add rxe0 type rxe netdev eth0"
        )
    try:
        verbs = _import_verbs()
    except ImportError as error:
        raise StandbyError(
            f"pyverbs is not installed ({error}): pip install torchext[rdma] beside the libibverbs of its version, or "
            "Debian's python3-pyverbs"
        ) from error
    found: list[tuple[bool, Any, int, int, str]] = []
    names = []
    with _explained("looking for RDMA devices"):
        for device in verbs.get_device_list():
            context = verbs.Context(name=device.name.decode())
            names.append(context.name)
            ports = range(1, context.query_device().phys_port_cnt + 1)
            for each in context.query_gid_table(sum(context.query_port(port).gid_tbl_len for port in ports)):
                gid = each.gid_str()
                if address is None or ipaddress.IPv6Address(gid) == _gid_of(address):
                    is_routable = each.gid_type == verbs.e.IBV_GID_TYPE_ROCE_V2  # version 1 stays within a segment
                    found.append((is_routable, context, each.port_num, each.gid_index, gid))
            if not found or found[-1][1] is not context:
                context.close()
    if not found:
        raise StandbyError(f"no RDMA device of this host ({', '.join(names)}) has the address {address}")
    best = max(found, key=lambda each: each[0])
    for _, context, *_ in found:
        if context is not best[1]:
            context.close()
    return verbs, *best[1:]


def _gid_of(address: str) -> ipaddress.IPv6Address:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return ip if isinstance(ip, ipaddress.IPv6Address) else ipaddress.IPv6Address(f"::ffff:{ip}")


def _import_verbs() -> SimpleNamespace:
    """What is needed of pyverbs, whose modules differ between versions."""
    found = {"e": importlib.import_module(_first_of("pyverbs.enums", "pyverbs.libibverbs_enums"))}
    for module, names in _VERBS.items():
        loaded = importlib.import_module(module)
        found.update((name, getattr(loaded, name)) for name in names)
    return SimpleNamespace(**found)


def _first_of(*modules: str) -> str:
    return next((name for name in modules if importlib.util.find_spec(name) is not None), modules[0])


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns errors of pyverbs into this package's."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        raise StandbyError(f"{what}: {error}") from error


def _event_descriptors() -> set[int]:
    """The descriptors of this process that RDMA devices tell events by."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
    return found
