"""Launches collectives on other backends in one order, the same on all ranks."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from torchext.collectives.errors import CollectiveError
from torchext.collectives.sites import CallSite, told_place
from torchext.collectives.threads import OwnThread, only_waiting
from torchext.collectives.work import Promise

if TYPE_CHECKING:
    from torchext._native import collectives as native


class Fallible(Protocol):
    """A group, as the sequencer needs it."""

    def where(self) -> str:
        """The group and this rank in it, in words."""

    def on_fallen(self, rank: int) -> None:
        """A member has died or aborted. In the sequencer's own thread."""

    def leave(self, reason: str, *, aborted: bool) -> None: ...


class Sequencer:
    """Puts the collectives of all ordered groups of this process into the order that csrc/collectives/order.hpp finds.

    There is one in a process, from its first ordered group to its last: groups that share members need one order, and
    no group knows which others will overlap with it. Thread-safe.
    """

    def __init__(self) -> None:
        from torchext._native import collectives as native

        self.native = native.Orderer()
        self._launching = threading.RLock()  # held from taking a collective out of the order until it is launched
        self._lock = threading.Lock()
        self._groups: dict[int, tuple[native.OrderGroup, Fallible]] = {}  # guarded by _lock
        self._num_ending = 0  # guarded by _lock; launched works whose futures have not called back yet
        self.rank = -1  # of this process, as its groups have it
        self.forked = False  # whether this process is a child of the one whose sequencer it is
        self._thread = OwnThread(target=self._serve, name="dfccl-order", daemon=True)
        self._thread.start()
        _forget_after_fork(weakref.ref(self))

    def add(self, links: native.OrderGroup, group: Fallible, rank: int) -> None:
        """Takes a group; ``rank`` is the global one of this process."""
        self.native.add(links)
        with self._lock:
            self.rank = rank
            self._groups[links.id] = links, group

    def leave(self, links: native.OrderGroup, reason: str, aborted: bool) -> None:
        """Fails what is in flight on the group and tells its members. Nothing in a forked child, which is not known."""
        if self.forked:
            return
        with self._lock:
            self._groups.pop(links.id, None)
        self.native.leave(links, reason, aborted)
        self.launch_ready()

    def stop(self) -> None:
        self.native.stop_background()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def groups(self) -> list[Fallible]:
        with self._lock:
            return [group for _, group in self._groups.values()]

    def launch_ready(self) -> None:
        """Launches what is next in the order, as far as it is known; one thread at a time."""
        # A signal may be handled after any call, and its handler may raise (KeyboardInterrupt). Going through an
        # iterator, there is no such place between taking a collective out and the `try`.
        with self._launching:
            for work, ordered in iter(self.native.pop, None):
                try:
                    work.launch(ordered)
                except BaseException as error:
                    work.launch_failed(ordered, error)
                    raise

    def wait(self, work: OrderedWork, timeout_s: float) -> None:
        """Blocks until the work is launched or has failed; fails it after ``timeout_s``, if that is not zero."""
        end = time.monotonic() + timeout_s
        while not work.launched:
            left_s = end - time.monotonic() if timeout_s else 3600.0
            if (
                not self.native.wait(work.handle, max(left_s, 0.0), self._look)
                and timeout_s
                and time.monotonic() >= end
            ):
                self.native.cancel(work.handle, f"wait(timeout={timeout_s:g} s) was called for it and is over")
            self.launch_ready()

    def future_begins(self) -> None:
        """A work is launched whose future may have callbacks, which may issue collectives."""
        with self._lock:
            self._num_ending += 1

    def future_has_ended(self) -> None:
        with self._lock:
            self._num_ending -= 1

    def _look(self, group_id: int, blocked: Collection[int], issuers: Collection[tuple[int, int]]) -> tuple[str, bool]:
        """For the orderer: where the calling thread waits, and whether the process can issue a collective meanwhile."""
        with self._lock:
            _, group = self._groups.get(group_id, (None, None))
            ending = self._num_ending
        where = told_place(group.where() if group is not None else "")
        return where, ending == 0 and only_waiting(blocked, issuers)

    def _serve(self) -> None:
        while self.native.background():
            for group_id, rank in self.native.fallen():
                with self._lock:
                    _, group = self._groups.get(group_id, (None, None))
                if group is not None:
                    group.on_fallen(rank)
            self.launch_ready()


class _Process:
    """The sequencer of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sequencer: Sequencer | None = None  # guarded by lock, as is the next
        self.num_groups = 0  # that use it


_process = _Process()


def join_sequencer() -> Sequencer:
    """The sequencer of this process, for one more group; a forked child gets one of its own."""
    with _process.lock:
        if _process.sequencer is None or _process.sequencer.forked:
            _process.sequencer, _process.num_groups = Sequencer(), 0
            atexit.register(_leave_all)
        _process.num_groups += 1
        return _process.sequencer


def current_sequencer() -> Sequencer | None:
    """That of this process, if it has ordered groups."""
    sequencer = _process.sequencer
    return sequencer if sequencer is not None and not sequencer.forked else None


def leave_sequencer(sequencer: Sequencer) -> None:
    """A group needs it no more; with the last one it ends. Not in a forked child: it is the parent's."""
    with _process.lock:
        if sequencer.forked or _process.sequencer is not sequencer:
            return
        _process.num_groups -= 1
        if _process.num_groups:
            return
        _process.sequencer = None
        atexit.unregister(_leave_all)
    sequencer.stop()


def _leave_all() -> None:
    """At the end of a program that has not destroyed its groups: peers learn that this rank has left, threads end."""
    sequencer = _process.sequencer
    if sequencer is not None and not sequencer.forked:
        sequencer.native.park()  # the daemon threads that wait
        for group in sequencer.groups():
            group.leave("the process is about to end", aborted=False)


def _forget_after_fork(sequencer: weakref.ref[Sequencer]) -> None:
    def forget() -> None:
        if (found := sequencer()) is not None:
            found.forked = True
            found.native.forget()

    os.register_at_fork(after_in_child=forget)


class OrderedWork(dist.Work):
    """One collective that is launched once its turn has come. Thread-safe.

    Args:
        sequencer: Of this process.
        start: Launches it on the inner group.
        outputs: Tensors that it writes to.
        site: Where the user's program issued it.
        describe: Gives the error of a call that the orderer failed, or of one whose inner work failed.
    """

    def __init__(
        self,
        sequencer: Sequencer,
        start: Callable[[], dist.Work],
        outputs: Sequence[torch.Tensor],
        site: CallSite | None,
        describe: Callable[[OrderedWork, Exception | None], CollectiveError],
    ) -> None:
        super().__init__()
        self.launched = False
        self.handle: Any = None  # native.Ordered; the issuing thread sets it
        self.site = site
        self._sequencer = sequencer
        self._start: Callable[[], dist.Work] | None = start
        self._outputs = list(outputs)
        self._describe = describe
        self._inner: dist.Work | None = None
        self._error: CollectiveError | None = None
        self._lock = threading.Lock()
        self._promise: Promise | None = None  # guarded by _lock

    def launch(self, handle: native.Ordered) -> None:
        """For the sequencer: its turn has come, or it has failed before."""
        self.handle = handle
        start, self._start = self._start, None  # with what it keeps alive
        assert start is not None
        if handle.code:
            self._error = self._describe(self, None)
        else:
            try:
                self._inner = start()
            except Exception as error:  # whatever the inner group refuses: for whoever waits
                self._error = self._describe(self, error)
        self._is_launched()

    def launch_failed(self, handle: native.Ordered, error: BaseException) -> None:
        """For the sequencer: `launch` has raised, so whoever waits is told that."""
        if self.launched:
            return
        self.handle = handle
        self._start = None
        if self._inner is None and self._error is None:
            self._error = CollectiveError(f"{handle.text} was not launched: {error!r} came first")
        self._is_launched()

    def _is_launched(self) -> None:
        with self._lock:
            self.launched = True
            promise = self._promise
        if promise is not None:
            self._feed(promise)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the collective is launched and then waits for it as the inner backend does.

        Args:
            timeout: After this time it fails as well. Zero: only after the timeout it was issued with.

        Returns:
            True.

        Raises:
            CollectiveError: It failed; the subclass says in what way.
        """
        self.wait_for_turn(timeout)
        if self._error is None:
            assert self._inner is not None
            try:
                self._inner.wait(timeout) if timeout > timedelta(0) else self._inner.wait()
                return True
            except RuntimeError as error:
                self._error = self._describe(self, error)
        try:
            raise self._error.with_traceback(None)
        finally:
            del self  # or the error's traceback, this frame and the work would keep each other alive

    def wait_for_turn(self, timeout: timedelta = timedelta(0)) -> None:
        """Blocks until the collective is launched or has failed; a positive timeout fails it as well."""
        if not self.launched:
            self._sequencer.wait(self, max(timeout.total_seconds(), 0.0))

    def is_completed(self) -> bool:
        if not self.launched:
            return False
        promise = self._promise  # kept a moment before the inner work says so
        return self._inner is None or self._inner.is_completed() or (promise is not None and promise.future.done())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> CollectiveError | None:
        """The error, once it has failed; else None."""
        if self._error is None and self._inner is not None and self._inner.is_completed():
            try:
                self._inner.wait()
            except RuntimeError as error:
                self._error = self._describe(self, error)
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        """The future of the list of output tensors; it completes whether or not anyone waits."""
        with self._lock:
            if self._promise is not None:
                return self._promise.future
            devices: list[Any] = list({t.device for t in self._outputs if t.device.type != "cpu"})
            promise = self._promise = Promise(devices)
            launched = self.launched
        self._sequencer.native.watch(self.handle)
        if launched:
            self._feed(promise)
        return promise.future

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source_rank()

    def _source_rank(self) -> int:
        self.wait_for_turn()
        return int(self.handle.root)

    def _feed(self, promise: Promise) -> None:
        """Has the future complete as the inner work does."""
        self._sequencer.future_begins()
        if self._inner is None:
            assert self._error is not None
            self._keep(promise, self._error)
            return
        try:
            inner = self._inner.get_future()
        except RuntimeError:  # some works have none, as sends do over gloo
            OwnThread(target=self._complete, args=(promise,), name="dfccl-future", daemon=True).start()
            return

        def forward(done: torch.futures.Future[Any]) -> None:
            try:
                done.value()
            except Exception as error:
                self._keep(promise, self._describe(self, error))
            else:
                self._keep(promise, self._outputs)

        inner.add_done_callback(forward)

    def _complete(self, promise: Promise) -> None:
        try:
            self.wait()
        except CollectiveError as error:
            self._keep(promise, error)
        else:
            self._keep(promise, self._outputs)

    def _keep(self, promise: Promise, result: list[torch.Tensor] | Exception) -> None:
        promise.keep(result)  # runs its callbacks
        self._sequencer.future_has_ended()


class InFlight:
    """Works of one group that have been launched and may not have ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: deque[dist.Work] = deque()  # guarded by _lock

    def add(self, work: dist.Work) -> None:
        with self._lock:
            while self._works and self._works[0].is_completed():
                self._works.popleft()
            self._works.append(work)

    def any(self) -> bool:
        with self._lock:
            return any(not work.is_completed() for work in self._works)
