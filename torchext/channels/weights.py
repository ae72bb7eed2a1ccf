"""Weights from one process to many: numbered versions of a module's state in shared memory."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import util
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from torchext.channels import sharing
from torchext.channels.channel import _default_name
from torchext.channels.errors import ChannelClosed, ChannelError, ChannelTimeout, peer_died

if TYPE_CHECKING:
    from torchext._native import channels as native

_PUBLISHER, _READER = 0, 2  # roles: readers hear of dead publishers, not of each other
_OK, _DROPPED, _TIMEOUT, _CLOSED, _FULL, _INTERRUPTED, _PEER_DIED, _FORKED = range(8)
_ALIGNMENT = 64

_Layout = list[tuple[str, tuple[int, ...], torch.dtype]]


class WeightBroadcast:
    """Versions of a module's state that one process publishes and any number of others read.

    Passed to processes as a `Channel` is, and with a ``name`` found by `connect_weights`. Publishing never waits for
    readers, and readers copy without being disturbed by it: a version is loaded whole or not at all, and never an older
    one than was seen before.

        weights = WeightBroadcast(model)  # the learner
        weights.publish()
        ...
        version = weights.wait(newer_than=version)  # an explorer
        version = weights.load_into(model)

    Args:
        module: Its parameters and buffers, or a mapping from names to tensors, as `torch.nn.Module.state_dict` gives.
            This object keeps it for `publish`; only its layout travels to other processes.
        name: What `connect_weights` finds it by.

    Raises:
        ImportError: The native core is missing.
        ChannelError: The name is taken; or this is not Linux.
    """

    def __init__(self, module: torch.nn.Module | dict[str, torch.Tensor], *, name: str | None = None) -> None:
        sharing.require_core()
        from torchext._native import channels as native

        state = _state(module)
        layout: _Layout = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()]
        latest = native.Latest.create(_size(layout), pickle.dumps(layout), sharing.new_nonce())
        doorman = sharing.Doorman(name, "weights", latest.descriptor) if name is not None else None
        self._hold(latest, module)
        self._role = _PUBLISHER
        publisher = self._join()
        self._closer: util.Finalize | None = util.Finalize(
            self, _close, args=(latest, publisher, doorman, os.getpid()), exitpriority=20
        )

    def _hold(self, latest: native.Latest, module: torch.nn.Module | dict[str, torch.Tensor] | None) -> None:
        self._latest = latest
        self._layout: _Layout = pickle.loads(latest.meta)
        self._module = module
        self._role = _READER
        self._closer = None
        self._reader: native.Reader | None = None
        self._views: dict[int, list[torch.Tensor]] = {}  # of each slab; guarded by _lock
        self._lock = threading.Lock()  # one pin at a time for each process
        self._loaded = 0

    def __getstate__(self) -> dict[str, Any]:
        latest = self._own()
        return {"memory": sharing.pack(latest.descriptor, latest.nonce), "nonce": latest.nonce}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._attach(sharing.unpack(state["memory"]))
        if self._latest.nonce != state["nonce"]:
            raise ChannelError("the process that these weights were pickled in has closed them")

    def _attach(self, descriptor: int) -> None:
        sharing.require_core()
        from torchext._native import channels as native

        self._hold(native.Latest.attach(descriptor), None)

    def _own(self) -> native.Latest:
        """The memory as this process holds it; a fork copies its parent's."""
        if self._latest.forked:
            module, loaded = self._module, self._loaded
            self._attach(os.dup(self._latest.descriptor))
            self._module, self._loaded = module, loaded
        return self._latest

    def _join(self) -> native.Reader:
        from torchext._native import channels as native

        latest = self._own()
        if self._reader is None:
            self._reader = native.Reader(latest, _default_name(), self._role)
        return self._reader

    @property
    def version(self) -> int:
        """The latest version that was published, by whatever process; 0 before the first."""
        return self._latest.version

    @property
    def loaded(self) -> int:
        """The version that this process loaded last; 0 before the first. To be given to `Sender.send`."""
        return self._loaded

    def publish(self, module: torch.nn.Module | dict[str, torch.Tensor] | None = None) -> int:
        """Copies the state, makes it the latest version and wakes those who wait; returns its number.

        Args:
            module: What to publish, of the same layout; by default the module given at the beginning.

        Raises:
            ValueError: Its names, shapes or dtypes are others than those at the beginning.
        """
        module = module if module is not None else self._module
        if module is None:
            raise ValueError("publish in another process than the one that made this needs the module")
        tensors = self._tensors(module)
        self._own()  # which replaces the lock in a forked process: another thread may have held it
        with self._lock:
            if self._role != _PUBLISHER:  # from now on, those who wait are told if it dies
                if self._reader is not None:
                    self._reader.leave()
                self._role, self._reader = _PUBLISHER, None
            reader = self._join()
            slab = reader.begin()
            try:
                with torch.no_grad():
                    torch._foreach_copy_(self._views_of(slab), tensors)
            except BaseException:
                self._latest.abandon(slab)
                raise
            version = self._latest.commit(slab)
            self._loaded = max(self._loaded, version)
        return version

    def wait(self, newer_than: int = 0, timeout: float | timedelta | None = None) -> int:
        """Blocks until a version newer than that is there, and returns the latest.

        Raises:
            ChannelTimeout: None came in time.
            ChannelClosed: The publisher has ended it.
            PeerDied: The publisher died; once.
        """
        limit_s = sharing.seconds(timeout)
        reader = self._join()
        status = reader.wait(newer_than, limit_s)
        if status == _PEER_DIED:
            raise peer_died(reader.deaths())
        if status == _CLOSED:
            raise ChannelClosed("the weights were closed by the process that made them")
        if status == _TIMEOUT:
            raise ChannelTimeout(
                f"no version newer than {newer_than} was published within {limit_s:g} s; the latest is {self.version}"
            )
        return self.version

    def load_into(self, module: torch.nn.Module | dict[str, torch.Tensor]) -> int:
        """Copies the latest version into a module's parameters and buffers, in place; returns its number.

        Nothing is copied when that version was loaded into the same module before and is the latest still: check
        `version` against the returned number for that.

        Raises:
            ChannelError: Nothing has been published yet; `wait` first.
            ValueError: The module's names, shapes or dtypes are others than the published ones.
        """
        tensors = self._tensors(module)
        with self._pinned() as (version, slab), torch.no_grad():
            torch._foreach_copy_(tensors, self._views_of(slab))
            self._loaded = version
        return version

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the latest version.

        Raises:
            ChannelError: Nothing has been published yet.
        """
        with self._pinned() as (version, slab):
            self._loaded = version
            return {key: view.clone() for (key, *_), view in zip(self._layout, self._views_of(slab), strict=True)}

    @contextmanager
    def _pinned(self) -> Iterator[tuple[int, int]]:
        self._own()
        with self._lock:
            reader = self._join()
            version, slab = reader.pin()
            if version == 0:
                raise ChannelError("no version has been published yet; call wait() first")
            try:
                yield version, slab
            finally:
                reader.unpin()

    def close(self) -> None:
        """Leaves; in the process that made it, ends it for all. Idempotent."""
        with self._lock:
            reader, self._reader = self._reader, None
            self._views.clear()
        if reader is not None and self._closer is None:
            reader.leave()
        if self._closer is not None:
            self._closer()

    def __enter__(self) -> WeightBroadcast:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _tensors(self, module: torch.nn.Module | dict[str, torch.Tensor]) -> list[torch.Tensor]:
        state = _state(module)
        layout = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()]
        if layout != self._layout:
            ours, theirs = ({row[0]: row[1:] for row in rows} for rows in (self._layout, layout))
            differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
            key = differing[0] if differing else next(iter(ours))
            raise ValueError(
                f"the module does not have the layout of these weights: {key!r} is {theirs.get(key, 'missing')} there "
                f"and {ours.get(key, 'missing')} here ({len(differing)} differ)"
            )
        return list(state.values())

    def _views_of(self, slab: int) -> list[torch.Tensor]:
        if slab not in self._views:
            memory = torch.from_numpy(self._latest.view(slab))
            views, offset = [], 0
            for _, shape, dtype in self._layout:
                num_bytes = torch.Size(shape).numel() * dtype.itemsize
                views.append(memory[offset : offset + num_bytes].view(dtype).view(shape))
                offset += _aligned(num_bytes)
            self._views[slab] = views
        return self._views[slab]


def _close(latest: native.Latest, publisher: native.Reader, doorman: sharing.Doorman | None, pid: int) -> None:
    if os.getpid() != pid:  # a fork's copy
        return
    latest.close()
    publisher.leave()
    if doorman is not None:
        doorman.close()


def connect_weights(name: str, *, timeout: float | timedelta | None = 60.0) -> WeightBroadcast:
    """Opens the `WeightBroadcast` that another process of this user made with that name; waits until there is one.

    Raises:
        ChannelTimeout: There is none within the timeout.
    """
    weights = WeightBroadcast.__new__(WeightBroadcast)
    weights._attach(sharing.fetch(name, "weights", timeout))
    return weights


def _state(module: torch.nn.Module | dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = module.state_dict() if isinstance(module, torch.nn.Module) else module
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _size(layout: _Layout) -> int:
    return sum(_aligned(torch.Size(shape).numel() * dtype.itemsize) for _, shape, dtype in layout)
