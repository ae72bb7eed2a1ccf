"""Calls that have returned before their tensors were there, to resolve a deadlock; the first use of a tensor waits.

With ``on_deadlock="defer"``, ranks that block in a circle all return from their blocking calls, so that each goes on to
the calls that the others wait for. From then on, and until the last of them is done, two modes of torch look at the
operations of the thread that was deferred: one that reads or writes what a deferred call writes, or writes what it
reads, waits first. No mode is installed before that; they stay until a later call that takes no tensor, as
`barrier` or ``work.wait()``, finds nothing left to look for.

Seen is every operation that goes through torch's dispatcher in that thread, views and autograd included (a function of
`torch.compile` runs uncompiled meanwhile), whatever reads the memory through a method of the tensor (``numpy``,
``tolist``, ``data_ptr``, DLPack, pickle), and further collectives. Not seen, and so free to read too early, are: other
threads; arrays, pointers and memory views that were taken before; and C++ code that goes past the dispatcher. That is
why "raise" is the default.

A barrier has no tensor and is never deferred.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import overrides
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from torchext.collectives.errors import CollectiveError

if TYPE_CHECKING:
    from torchext._native import collectives as native
    from torchext.collectives.world import World

logger = logging.getLogger(__name__)

Tensor = torch.Tensor

# Methods that hand out memory, or its content, without an operation that the dispatcher sees.
_RAW = frozenset(
    getattr(Tensor, name)
    for name in (
        "numpy",
        "tolist",
        "data_ptr",
        "untyped_storage",
        "storage",
        "share_memory_",
        "__array__",
        "__deepcopy__",
        "__dlpack__",
        "__reduce_ex__",
    )
)


class Deferred:
    """One deferred call."""

    def __init__(
        self,
        call: native.Call,
        world: World,
        written: Sequence[Tensor],
        read: Sequence[Tensor],
        finish: Callable[[], None],
    ) -> None:
        self.call = call
        self.world = world
        self.tensors = (*written, *read)  # kept alive
        self.written = {storage for t in written if (storage := _storage(t)) is not None}
        self.read = {storage for t in read if (storage := _storage(t)) is not None}
        self._finish = finish
        self._lock = threading.RLock()
        self._finished = False  # guarded by _lock

    def wait(self) -> None:
        """Waits for the call and finishes it; raises its error, each time."""
        while self.call.wait(3600.0, False) != 1:
            pass
        self.finish()

    def finish(self) -> None:
        """Once the call is done: has its results written where they belong, or raises its error."""
        with self._lock:
            if not self._finished:
                with _unseen():
                    self._finish()
                self._finished = True


class _Deferrals:
    """All deferred calls of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Deferred] = []  # guarded by _lock; replaced, never changed
        self._modes = threading.local()
        self._num_installed = 0  # guarded by _lock
        self.active = False  # guarded by _lock; whether there is anything to do before a call

    def add(self, deferred: Deferred) -> None:
        installed = getattr(self._modes, "installed", None)
        if installed is None:
            self._modes.installed = _install()
        with self._lock:
            self._pending = [*self._pending, deferred]
            self._num_installed += installed is None
            self.active = True

    def before(self, written: Sequence[Any], read: Sequence[Any]) -> None:
        """Waits for what must be over before tensors are written and read."""
        for deferred in self._pending:
            storages = deferred.written | deferred.read
            if any(_storage(t) in storages for t in written) or any(_storage(t) in deferred.written for t in read):
                deferred.wait()
                self._drop(deferred)

    def sweep(self) -> None:
        """Forgets calls that are done; removes the modes from this thread if nothing is left to look for."""
        for deferred in self._pending:
            if deferred.call.done() and deferred.call.code == 0:
                deferred.finish()
                self._drop(deferred)
        installed = getattr(self._modes, "installed", None) if not self._pending else None
        removed = installed is not None and _remove(*installed)
        if removed:
            self._modes.installed = None
        with self._lock:
            self._num_installed -= removed
            self.active = bool(self._pending) or self._num_installed > 0

    def end_world(self, world: World, wait: bool) -> None:
        """Forgets the calls of a world that is about to end, after they are done if ``wait``; failures are logged."""
        for deferred in self._pending if wait else []:
            if deferred.world is world:
                try:
                    deferred.wait()
                except CollectiveError as error:
                    logger.warning("a deferred call whose tensors nobody has used: %s", error)
        with self._lock:
            self._pending = [d for d in self._pending if d.world is not world]
        self.sweep()

    def _drop(self, deferred: Deferred) -> None:
        with self._lock:
            self._pending = [d for d in self._pending if d is not deferred]


deferrals = _Deferrals()


class _Operations(_python_dispatch.TorchDispatchMode):
    """Sees every operation of its thread, from Python or C++."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:  # a view reads nothing, and has the storage that is looked for
            written: list[Any] = []
            read: list[Any] = []
            for i, argument in enumerate(func._schema.arguments):
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                (written if writes else read).extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
            deferrals.before(written, read)
        return func(*args, **kwargs)


class _Methods(overrides.TorchFunctionMode):
    """Sees the methods that hand out memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RAW:
            with _unseen():
                deferrals.before([], [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)])
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int | None:
    """Names the memory of a tensor, which all its views share."""
    with torch._C.DisableTorchFunction():
        try:
            name: int = tensor.untyped_storage()._cdata
            return name
        except (NotImplementedError, RuntimeError):  # sparse and other tensors that have none
            return None


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Within it the modes of this thread see nothing."""
    with torch._C.DisableTorchFunction(), _python_dispatch._disable_current_modes():
        yield


def _install() -> tuple[_Operations, _Methods]:
    """Puts both modes under all others, so that those that are left by ``with`` still come off the top."""
    operations, methods = _Operations(), _Methods()
    operations.__enter__()
    _to_bottom(_python_dispatch, _python_dispatch._get_current_dispatch_mode_stack())
    methods.__enter__()
    _to_bottom(overrides, overrides._get_current_function_mode_stack())
    return operations, methods


def _to_bottom(stack: Any, modes: list[Any]) -> None:
    for _ in modes:
        stack._pop_mode()
    for mode in (modes[-1:], *([m] for m in modes[:-1])):
        stack._push_mode(mode[0])


def _remove(operations: _Operations, methods: _Methods) -> bool:
    """Takes both modes away; False if one cannot be, as this call comes from within what it sees."""
    layers: list[tuple[Any, Any, list[Any]]] = [
        (overrides, methods, overrides._get_current_function_mode_stack()),
        (_python_dispatch, operations, [*_python_dispatch._get_current_dispatch_mode_stack()]),
    ]
    if any(mode not in modes for _, mode, modes in layers):
        return False
    for stack, mode, modes in layers:
        above = modes[modes.index(mode) + 1 :]
        for _ in above:
            stack._pop_mode()
        mode.__exit__(None, None, None)
        for other in above:
            stack._push_mode(other)
    return True
