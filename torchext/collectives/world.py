"""The engine of this process and how its ranks find each other."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import secrets
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from torchext._optional import require_native
from torchext.collectives.deferral import deferrals
from torchext.collectives.errors import CollectiveError, CollectiveTimeoutError
from torchext.collectives.options import Options
from torchext.collectives.sites import told_place
from torchext.collectives.threads import OwnThread, only_waiting

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from torchext._native import collectives as native

logger = logging.getLogger(__name__)

_ARENA = "torchext/arena"
_FAILED = "torchext/failed"


class Watched(Protocol):
    """What is told when its call has finished."""

    def on_finished(self) -> None:
        """Called once, in the world's own thread."""


class World:
    """Shared memory and progress engine of one set of ranks, which are processes on one host.

    Groups of these ranks share it. Made by `meet`. Thread-safe.
    """

    def __init__(self, engine: native.World, ranks: Sequence[int], options: Options) -> None:
        self.engine = engine
        self.ranks = tuple(ranks)  # global ranks, by rank in this world
        self.options = options
        self.where: dict[int, str] = {}  # by the identifier of a group: the group and this rank in it, in words
        self._lock = threading.Lock()
        self._num_groups: Counter[tuple[tuple[int, ...], str]] = Counter()  # guarded by _lock
        self._watched: dict[int, Watched] = {}  # guarded by _lock
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._pid = os.getpid()
        engine.set_look(functools.partial(_look, weakref.ref(self)))
        with _worlds_lock:
            _worlds.add(self)
        # A program that ends without destroy_process_group: peers learn that this rank has left, threads end.
        atexit.register(self.close, "the process is about to end", at_exit=True)

    def group(self, ranks: Sequence[int], desc: str) -> tuple[native.Group, int]:
        """Makes a group of global ranks, which must all be of this world; nothing is sent.

        Groups are told apart by their ranks, their description and a count, so members may make groups in different
        orders as long as those of equal ranks and description come in the same order.
        """
        key = tuple(ranks), desc
        with self._lock:
            self._num_groups[key] += 1
            count = self._num_groups[key]
        text = json.dumps([list(ranks), desc, count])
        uid = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1  # 0 means all groups
        return self.engine.group([self.ranks.index(rank) for rank in ranks], uid), uid

    def global_ranks(self, ranks: Collection[int]) -> list[int]:
        """Of ranks in this world."""
        return [self.ranks[rank] for rank in ranks]

    def reports(self) -> list[tuple[int, bool, list[tuple[float, list[int], str]]]]:
        """For each global rank: whether it is gone, and what it waits for: since when (s), for which ranks, what."""
        return [
            (self.ranks[p], gone, [(seconds, self.global_ranks(ranks), text) for seconds, ranks, text in calls])
            for p, (gone, _, calls) in enumerate(self.engine.reports())
        ]

    def pending(self) -> list[tuple[float, list[int], str]]:
        """This rank's calls in flight: since when (s), for which global ranks, what."""
        return [(seconds, self.global_ranks(ranks), text) for seconds, ranks, text in self.engine.pending()]

    def watch(self, call: native.Call, watched: Watched) -> None:
        """Has ``watched.on_finished()`` called once the call has finished; at once if it has already."""
        if self.forked:
            raise CollectiveError(
                "this process was forked from a member of the process group and is not a member itself"
            )
        with self._lock:
            self._watched[call.id] = watched
            if self._thread is None:
                self._thread = OwnThread(target=self._report, name="dfccl-futures", daemon=True)
                self._thread.start()
        if self.engine.watch(call):
            self._finish(call.id)

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the one whose world it is."""
        return os.getpid() != self._pid

    def close(
        self, reason: str = "the process group was destroyed", *, abort: bool = False, at_exit: bool = False
    ) -> None:
        """Fails what is in flight, leaves the world and ends its threads. Idempotent; not in a forked child.

        Calls that have returned before they were done, to resolve a deadlock, are waited for unless ``abort``. With
        ``at_exit``, threads that wait for a call go on waiting, for good: only daemon threads are left then.
        """
        atexit.unregister(self.close)
        if self.forked:
            return
        if not self.engine.closed():
            deferrals.end_world(self, wait=not abort)
            for rank, call in self.engine.unanswered():
                logger.warning("rank %d made a call that this rank has never made: %s", self.ranks[rank], call)
        self.engine.close(reason, at_exit)
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _finish(self, call_id: int) -> None:
        with self._lock:
            watched = self._watched.pop(call_id, None)
        if watched is not None:
            watched.on_finished()

    def _report(self) -> None:
        while True:
            closed = self.engine.closed()
            for call_id in self.engine.finished(3600.0):
                self._finish(call_id)
            if closed:
                return


_worlds_lock = threading.RLock()  # a signal handler may ask for them in the middle of anything
_worlds: weakref.WeakSet[World] = weakref.WeakSet()  # guarded by _worlds_lock


def worlds() -> list[World]:
    """The worlds that this process is in."""
    with _worlds_lock:
        found = list(_worlds)
    return [world for world in found if not world.engine.closed()]


def _look(
    ref: weakref.ref[World], group: int, blocked: Collection[int], issuers: Collection[tuple[int, int]]
) -> tuple[str, bool]:
    """For the engine: where the calling thread waits, and whether the process can issue a collective meanwhile."""
    world = ref()
    where = world.where.get(group, "a group") if world is not None else ""
    return told_place(where), only_waiting(blocked, issuers)


def meet(store: Store, rank: int, ranks: Sequence[int], timeout: timedelta, options: Options) -> World:
    """Makes a world together with the other ranks; each of them must call it with the same store.

    Blocks until all are there.

    Args:
        store: For this world alone, with a prefix.
        rank: Place in ``ranks``.
        ranks: The global ranks.
        timeout: How long to wait for the others.
        options: The same on all ranks.

    Raises:
        ImportError: The native core is missing.
        CollectiveTimeoutError: A rank did not come in time; the message says which.
        CollectiveError: A rank cannot take part, as when it is on another host.
    """
    if sys.platform != "linux":
        raise CollectiveError(
            f'the "dfccl" backend needs Linux (shared memory, futexes, pidfds); this is {sys.platform}'
        )
    require_native()
    from torchext._native import collectives as native

    try:
        arena = _make_arena(store, len(ranks), options) if rank == 0 else _attach_arena(store, timeout, options)
        engine = native.World(
            arena, rank, options.patience, options.on_deadlock == "defer", options.strict, list(ranks)
        )
    except Exception as error:
        store.set(_FAILED, f"rank {ranks[rank]}: {error}")  # or the others would wait until their timeout
        raise

    def failed() -> bool:
        return bool(store.check([_FAILED]))

    missing = engine.meet(timeout.total_seconds(), failed)
    if missing:
        engine.close("not all ranks came")
        absent = [ranks[p] for p in missing]
        if failed():
            reason = store.get(_FAILED).decode()
            raise CollectiveError(f'the "dfccl" process group cannot be made: {reason}', absent)
        raise CollectiveTimeoutError(
            f'of the ranks {list(ranks)} of the "dfccl" process group, {absent} did not come within '
            f"{timeout.total_seconds():g} s; check that they run and call init_process_group or new_group as well",
            absent,
        )
    arena.close_descriptor()  # all have mapped it: the memory goes with the last of them
    return World(engine, ranks, options)


def _make_arena(store: Store, world_size: int, options: Options) -> native.Arena:
    from torchext._native import collectives as native

    nonce = secrets.randbits(64)
    ring_bytes, pool_bytes = _sizes(world_size, options.arena_bytes)
    arena = native.Arena.create(world_size, ring_bytes, pool_bytes, options.chunk_bytes, nonce)
    place = {
        "host": _host(),
        "pid": os.getpid(),
        "descriptor": arena.descriptor,
        "nonce": nonce,
        "options": asdict(options),
    }
    store.set(_ARENA, json.dumps(place))
    return arena


def _attach_arena(store: Store, timeout: timedelta, options: Options) -> native.Arena:
    from torchext._native import collectives as native

    try:
        store.wait([_ARENA], timeout)
    except RuntimeError as error:
        if store.check([_FAILED]):
            raise CollectiveError(store.get(_FAILED).decode()) from error
        raise CollectiveTimeoutError(
            f"the first rank of the group did not come within {timeout.total_seconds():g} s", [0]
        ) from error
    place = json.loads(store.get(_ARENA))
    options.require_equal(place["options"], 0)
    if place["host"] != _host():
        raise CollectiveError(
            "it does not share a host (or container) with the first rank of the group, and this engine of the "
            '"dfccl" backend works through shared memory; use another backend for groups that span hosts'
        )
    return native.Arena.attach(place["pid"], place["descriptor"], place["nonce"])


def _sizes(world_size: int, arena_bytes: int | None) -> tuple[int, int]:
    """Bytes of one ring and of one rank's staging pool. Only pages that are touched take memory."""
    ring = 512 << 10
    while ring > 16 << 10 and ring * world_size > 1 << 20:  # all that a rank receives through
        ring //= 2
    smallest = (world_size**2 + world_size) * 4 * 4096  # staging of one collective, with the smallest chunks
    pool = arena_bytes or 64 << 20
    ring += 8192  # for what goes with the payload: parts of a power of two are sent without staging
    return ring, max(pool // 4096 * 4096, 4 * smallest)


def _host() -> str:
    """Names the set of processes that can open each other's memory."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot} {namespace}"
