"""Handles of collectives in flight, and the errors of those that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchext.collectives.deferral import Deferred, deferrals
from torchext.collectives.errors import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    PeerLostError,
)
from torchext.collectives.sites import CallSite, call_site

if TYPE_CHECKING:
    from torchext._native import collectives as native
    from torchext.collectives.world import World

# By the codes of csrc/collectives/op.hpp; 6: another member gave up.
_ERRORS: dict[int, type[CollectiveError]] = {
    1: CollectiveTimeoutError,
    2: PeerLostError,
    3: PeerLostError,
    4: CollectiveMismatchError,
    5: CollectiveAbortedError,
    6: CollectiveAbortedError,
    7: DeadlockError,
}

_DEFERRED = 2  # what a wait for a native call returns


def call_error(
    call: native.Call | native.Ordered, ranks: Sequence[int], where: str, timeout_s: float, site: CallSite | None
) -> CollectiveError:
    """Tells what failed, where, after what time and why.

    Args:
        call: The failed call.
        ranks: Global ranks that are the cause.
        where: Names the group and this rank in it.
        timeout_s: What the call was given.
        site: Where it was issued, if that is known.
    """
    kind = _ERRORS.get(call.code, CollectiveError)
    issued = f", issued at {site[0].co_filename}:{site[1]}" if site is not None else ""
    message = (
        f"{call.text} on {where} failed after {call.elapsed_s:.1f} s (timeout {timeout_s:g} s){issued}: {call.error}"
    )
    if kind is CollectiveTimeoutError:
        message += (
            "; check that every member makes this call, with equal shape and dtype, or give the call more time "
            "(timeout=... of the group)"
        )
    return kind(message, ranks)


class Promise:
    """Makes a future that C++ sees fail as well.

    `torch.futures.Future.set_exception` completes the future with the exception as its value, which only Python raises:
    DDP takes it for a list of tensors and dies. An exception in a callback fails the future that stands for it.
    """

    def __init__(self, devices: list[Any] | None = None) -> None:
        self._result: list[torch.Tensor] | Exception = []
        self._trigger: torch.futures.Future[None] = torch.futures.Future(devices=devices)
        self.future: torch.futures.Future[Any] = self._trigger.then(self._give)

    def keep(self, result: list[torch.Tensor] | Exception) -> None:
        """Completes the future, or has it fail: with a RuntimeError that gives the text of the exception."""
        self._result = result
        self._trigger.set_result(None)

    def _give(self, _: torch.futures.Future[None]) -> list[torch.Tensor]:
        result, self._result = self._result, []
        if isinstance(result, Exception):
            raise result
        return result


class CallWork(dist.Work):
    """One collective in flight. Thread-safe."""

    def __init__(
        self,
        world: World,
        call: native.Call,
        outputs: Sequence[torch.Tensor],
        where: str,
        timeout_s: float,
        copy_back: Callable[[], None] | None,
        inputs: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._world = world
        self._call = call
        self._inputs = inputs
        self._outputs = list(outputs)
        self._where = where
        self._timeout_s = timeout_s
        self._site = call_site(3)
        self._lock = threading.Lock()
        self._copy_back = copy_back  # guarded by _lock
        self._promise: Promise | None = None  # guarded by _lock

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the collective is done.

        Args:
            timeout: After this time the collective fails as well. Zero: only after the timeout it was issued with.

        Returns:
            True. With ``on_deadlock="defer"``, possibly before it is done; then the first use of the tensors waits.

        Raises:
            CollectiveError: It failed; the subclass says in what way.
        """
        if deferrals.active:
            deferrals.sweep()
        seconds = timeout.total_seconds()
        if seconds > 0:
            if not self._call.wait(seconds, False):
                self._world.engine.cancel(self._call, f"wait(timeout={seconds:g} s) was called for it and is over")
        else:
            while not (waited := self._call.wait(3600.0, True)):
                pass
            if waited == _DEFERRED:
                deferrals.add(Deferred(self._call, self._world, self._outputs, self._inputs, self._end))
                return True
        self._end()
        return True

    def _end(self) -> None:
        self._finish()
        error = self.exception()
        if error is None:
            return
        try:
            raise error
        finally:
            del error  # or its traceback and this frame would keep each other, and the world, alive

    def is_completed(self) -> bool:
        if not self._call.done():
            return False
        self._finish()
        return True

    def is_success(self) -> bool:
        return self._call.done() and self._call.code == 0

    def exception(self) -> CollectiveError | None:
        """The error, once it has failed; else None."""
        if not self._call.done() or self._call.code == 0:
            return None
        culprits = self._world.global_ranks(self._call.culprits)
        return call_error(self._call, culprits, self._where, self._timeout_s, self._site)

    def get_future(self) -> torch.futures.Future[Any]:
        """The future of the list of output tensors; it completes once they are there, whether or not anyone waits.

        If the collective fails, so does the future, with a RuntimeError that says what `wait` would.
        """
        with self._lock:
            first = self._promise is None
            promise = self._promise = self._promise or Promise()
        if first:
            self._world.watch(self._call, self)
        return promise.future

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """The sender's rank in the group; -1 while it is not known."""
        return self._call.root

    _source_rank = source_rank

    def on_finished(self) -> None:
        """For the world: completes the future."""
        assert self._promise is not None
        error: Exception | None
        try:
            self._finish()
            error = self.exception()
        except Exception as failure:  # of writing to the caller's tensor: told to who waits, and the thread goes on
            error = failure
        self._promise.keep(self._outputs if error is None else error)

    def _finish(self) -> None:
        with self._lock:
            copy_back, self._copy_back = self._copy_back, None
            if copy_back is not None and self._call.code == 0:
                copy_back()


class DoneWork(dist.Work):
    """What a blocking call returns: it is done already."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class JoinedWork(dist.Work):
    """Several collectives that are waited for as one."""

    def __init__(self, works: Sequence[CallWork], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._works = list(works)
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> CollectiveError | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        if not self._works:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(self._outputs)
            return future
        outputs = self._outputs

        def collect(futures: torch.futures.Future[list[torch.futures.Future[Any]]]) -> list[torch.Tensor]:
            futures.value()  # raises the first error
            return outputs

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(collect)

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()
