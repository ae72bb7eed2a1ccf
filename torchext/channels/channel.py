"""Queues of pytrees between processes, which senders write and receivers read in place."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import util
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from torchext.channels import sharing
from torchext.channels.errors import ChannelClosed, ChannelError, ChannelFull, ChannelTimeout, peer_died

if TYPE_CHECKING:
    from torchext._native import channels as native

Policy = Literal["block", "drop_oldest", "drop_newest", "error"]
_POLICIES = ("block", "drop_oldest", "drop_newest", "error")
_ROLES = ("creator", "receiver", "sender", "broker")
_PRESENCES = ("absent", "here", "left", "dead")
_CREATOR, _RECEIVER, _SENDER, _CARRIER = range(4)
# Status codes of csrc/transport/segment.hpp
_OK, _DROPPED, _TIMEOUT, _CLOSED, _FULL, _INTERRUPTED, _PEER_DIED, _FORKED = range(8)
_FOREVER = float("inf")


class Channel:
    """A queue of messages between any number of senders and receivers on this machine.

    A message is a pytree of tensors, arrays, numbers, strings, bytes, dataclasses, TensorDicts and what else can be
    pickled. Its bytes lie in shared memory that is used again and again; received tensors are writable views of it, on
    the CPU, without gradients. Messages of one sender arrive in the order they were sent, each at most once.

    Pass a channel to processes as an argument (spawned and forked ones, also through queues and pipes while this
    process runs), or give it a name and `connect` to it from unrelated processes of this user. Threads may share it.

    Iterating gives messages until the channel has ended: the process that made it closed it, or at least
    ``num_senders`` senders came and all have left. What was sent before is still delivered.

        channel = Channel()
        with channel.sender() as sender:
            sender.send({"observation": torch.zeros(4), "reward": 1.0})
        for message in channel:
            ...

    Args:
        slots: How many messages (in batches, see `ChannelLoader`: how many batches) may wait at a time.
        slot_bytes: What memory a slot keeps when it is free, in bytes. Larger messages work; their memory is given back
            once they were read. "auto" follows the sizes of the latest messages.
        policy: What happens to a message when all slots are taken: "block" waits, "drop_oldest" drops the one that has
            waited longest, "drop_newest" drops this one, "error" raises `ChannelFull`. Drops are counted in `stats`.
        num_senders: How many senders must have come before the channel can end by all of them leaving.
        views: How long received tensors stay as they are: "held", as long as any of them is referenced (messages are
            copied once receivers hold as many as there are slots); or "iteration", until this process receives the
            next message, whoever still looks at them.
        on_peer_death: "raise" has `PeerDied` raised once by each sender, for receivers, and by each receiver, for all;
            "continue" goes on with the rest. A half-written message is dropped either way.
        poison: Fill what is given back with bytes 0xFF (NaN), so that tests see a use after that.
        name: What `connect` finds it by.

    Raises:
        ImportError: The native core is missing.
        ChannelError: The name is taken; or this is not Linux.
    """

    def __init__(
        self,
        slots: int = 8,
        slot_bytes: int | Literal["auto"] = "auto",
        policy: Policy = "block",
        *,
        num_senders: int = 1,
        views: Literal["held", "iteration"] = "held",
        on_peer_death: Literal["raise", "continue"] = "raise",
        poison: bool = False,
        name: str | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        if slot_bytes != "auto" and (not isinstance(slot_bytes, int) or slot_bytes < 1):
            raise ValueError(f'slot_bytes must be "auto" or at least 1, got {slot_bytes!r}')
        if policy not in _POLICIES:
            raise ValueError(f"policy must be one of {_POLICIES}, got {policy!r}")
        if num_senders < 1:
            raise ValueError(f"num_senders must be at least 1, got {num_senders}")
        if views not in ("held", "iteration"):
            raise ValueError(f'views must be "held" or "iteration", got {views!r}')
        if on_peer_death not in ("raise", "continue"):
            raise ValueError(f'on_peer_death must be "raise" or "continue", got {on_peer_death!r}')
        sharing.require_core()
        from torchext._native import channels as native

        code = _POLICIES.index(policy)
        kept = 0 if slot_bytes == "auto" else slot_bytes
        queue = native.Queue.create(slots, kept, code, num_senders, poison, sharing.new_nonce())
        creator = native.Endpoint(queue, _default_name(), _CREATOR, False)
        doorman = sharing.Doorman(name, "channel", queue.descriptor) if name is not None else None
        self._hold(queue, views == "iteration", on_peer_death == "raise")
        # At exit, before multiprocessing waits for child processes, which may wait for this channel.
        self._closer: util.Finalize | None = util.Finalize(
            self, _close, args=(queue, creator, doorman, os.getpid()), exitpriority=20
        )

    def _hold(self, queue: native.Queue, ends_views: bool, heeds_deaths: bool) -> None:
        self._queue = queue
        self._ends_views = ends_views
        self._heeds_deaths = heeds_deaths
        self._closer = None
        self._lock = threading.Lock()
        self._receiver: native.Endpoint | None = None  # guarded by _lock
        self._rows: deque[Any] = deque()  # of a batch that is being received one by one
        self._lease: Any = None  # of the latest message, where the next one ends its views

    def __getstate__(self) -> dict[str, Any]:
        queue = self._own_queue()
        return {
            "memory": sharing.pack(queue.descriptor, queue.nonce),
            "nonce": queue.nonce,
            "ends_views": self._ends_views,
            "heeds_deaths": self._heeds_deaths,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._attach(sharing.unpack(state["memory"]), state["ends_views"], state["heeds_deaths"])
        if self._queue.nonce != state["nonce"]:
            raise ChannelError("the process that this channel was pickled in has closed it")

    def _attach(self, descriptor: int, ends_views: bool, heeds_deaths: bool) -> None:
        sharing.require_core()
        from torchext._native import channels as native

        self._hold(native.Queue.attach(descriptor), ends_views, heeds_deaths)

    def _own_queue(self) -> native.Queue:
        """The queue as this process holds it; a fork copies its parent's, which knows the parent as its user."""
        if self._queue.forked:
            self._attach(os.dup(self._queue.descriptor), self._ends_views, self._heeds_deaths)
        return self._queue

    # --- Sending ------------------------------------------------------------------------------------------------------

    def sender(self, name: str | None = None) -> Sender:
        """Makes a sender for this process; the others learn its name when it dies.

        Make it in the process that uses it. It is there from now on: close it when it is done.
        """
        return Sender(self, name if name is not None else _default_name())

    # --- Receiving ----------------------------------------------------------------------------------------------------

    def receive(self, timeout: float | timedelta | None = None) -> Any:
        """Blocks until there is a message and returns it.

        Args:
            timeout: Seconds, a timedelta, or None for ever.

        Raises:
            ChannelTimeout: None came in time.
            ChannelClosed: None will come.
            PeerDied: A sender or receiver died; once for each. The next call goes on.
        """
        if not self._rows:
            got = self._next(timeout)
            if got[1] == 0:
                return got[0]
            self._keep_rows(got)
        return self._take_row(timeout)[0]

    def receive_versioned(self, timeout: float | timedelta | None = None) -> tuple[Any, int]:
        """As `receive`, together with the version that was given to `Sender.send` (-1: none)."""
        if not self._rows:
            got = self._next(timeout)
            if got[1] == 0:
                return got[0], got[2]
            self._keep_rows(got)
        return self._take_row(timeout)

    def _keep_rows(self, batch: tuple[Any, int, Any, list[int] | None, Any]) -> None:
        _, _, versions, there, lease = batch
        indices = there if there is not None else range(len(versions))
        self._rows.extend((lease, index, version) for index, version in zip(indices, versions, strict=True))

    def _take_row(self, timeout: float | timedelta | None) -> tuple[Any, int]:
        from torchext._native import channels as native

        try:
            lease, index, version = self._rows.popleft()
        except IndexError:  # another thread took the last
            return self.receive_versioned(timeout)
        return native.row(lease, index), version

    def _next(self, timeout: float | timedelta | None) -> tuple[Any, int, Any, list[int] | None, Any]:
        """The next message or batch, as csrc/channels/bindings.cpp gives it."""
        limit_s = _FOREVER if timeout is None else sharing.seconds(timeout)
        if self._lease is not None:
            self._end_views()
        receiver = self._receiver
        if receiver is None:
            receiver = self._join()
        got = receiver.receive(limit_s)
        if isinstance(got, int):
            if got == _FORKED:  # found out only here, as to ask before each message costs
                self._join()
                return self._next(limit_s)
            raise self._failure(got, limit_s, receiver)
        if self._ends_views:
            self._lease = got[4]
        return got

    def _end_views(self) -> None:
        """Of the message before, which another thread may be doing as well."""
        from torchext._native import channels as native  # here alone: an import costs as much as half a message

        lease, self._lease = self._lease, None
        if lease is not None:
            native.release(lease)

    def _join(self) -> native.Endpoint:
        from torchext._native import channels as native

        queue = self._own_queue()
        with self._lock:
            if self._receiver is None:
                self._receiver = native.Endpoint(queue, _default_name(), _RECEIVER, self._heeds_deaths)
            return self._receiver

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                message = self.receive()
            except ChannelClosed:
                return
            yield message
            del message  # or it would be held while waiting for the next

    # --- Both ---------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts of all processes together, since the channel was made.

        ``depth`` (messages that wait), ``held`` (slots that receivers look at), ``sent``, ``received``,
        ``dropped_oldest``, ``dropped_newest``, ``refused`` (policy "error"), ``torn`` (half-written when their sender
        died), ``copied`` (because receivers held too much), ``stale`` and ``staleness_max``, ``staleness_mean`` (see
        `ChannelLoader`), ``send_wait_s``, ``receive_wait_s``, ``bytes_sent``, ``retained_bytes`` (memory of all slots),
        and ``peers``: name, pid, role and presence of each.
        """
        queue = self._own_queue()
        counts = queue.stats()
        total = counts.pop("staleness_sum")
        peers = [
            {"name": name, "pid": pid, "role": _ROLES[role], "presence": _PRESENCES[presence]}
            for name, pid, role, presence, *_ in queue.peers()
        ]
        return {**counts, "staleness_mean": total / max(1, counts["received"]), "peers": peers}

    def close(self) -> None:
        """Leaves; in the process that made the channel, ends it for all, who may still receive what was sent.

        Idempotent. Whoever waits to send gets `ChannelClosed`. Tensors that were received stay valid.
        """
        lease, self._lease = self._lease, None
        self._rows.clear()
        del lease
        with self._lock:
            receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.leave()
        if self._closer is not None:
            self._closer()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _failure(self, status: int, limit_s: float, endpoint: native.Endpoint, *, sends: bool = False) -> ChannelError:
        """The exception for what a call of the native core ended with."""
        queue = self._queue
        if status == _PEER_DIED:
            return peer_died(endpoint.deaths())
        if status == _CLOSED:
            if queue.closed:
                return ChannelClosed("the channel was closed by the process that made it")
            other = "the process that made the channel and all receivers have" if sends else "all senders have"
            return ChannelClosed(f"{other} left")
        if status == _FORKED:
            return ChannelError("this belongs to the process that this one was forked from; make one here")
        if not sends:
            return ChannelTimeout(f"no message came within {limit_s:g} s; {self._who(_SENDER)}")
        full = f"all {queue.slots} slots hold messages that no receiver has taken; {self._who(_RECEIVER)}"
        if status == _FULL:
            return ChannelFull(f'{full} (policy "error")')
        return ChannelTimeout(f"no room within {limit_s:g} s: {full}")

    def _who(self, role: int) -> str:
        peers = self._queue.peers()
        there = [f"{name} (process {pid})" for name, pid, r, presence, *_ in peers if r == role and presence == 1]
        return f"{_ROLES[role]}s: {', '.join(there) if there else 'none'}"


def _close(queue: native.Queue, creator: native.Endpoint, doorman: sharing.Doorman | None, pid: int) -> None:
    if os.getpid() != pid:  # a fork's copy
        return
    queue.close()
    creator.leave()
    if doorman is not None:
        doorman.close()


def _default_name() -> str:
    return f"{multiprocessing.current_process().name}-{os.getpid()}"


def connect(
    name: str,
    *,
    views: Literal["held", "iteration"] = "held",
    on_peer_death: Literal["raise", "continue"] = "raise",
    timeout: float | timedelta | None = 60.0,
) -> Channel:
    """Opens the channel that another process of this user made with that name; waits until there is one.

    Raises:
        ChannelTimeout: There is none within the timeout.
    """
    channel = Channel.__new__(Channel)
    channel._attach(sharing.fetch(name, "channel", timeout), views == "iteration", on_peer_death == "raise")
    return channel


class Sender:
    """One sender of a channel; see `Channel.sender`.

    Until it is closed it counts as there, and its process is watched: when that dies, or ends with an exit code other
    than 0, receivers get `PeerDied`. Used as a context manager it is closed unless an exception leaves the block.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        self.name = name
        self._channel = channel
        self._endpoint: native.Endpoint | None = None
        self._join()

    def __getstate__(self) -> dict[str, Any]:
        return {"channel": self._channel, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["channel"], state["name"])  # type: ignore[misc]

    def _join(self) -> native.Endpoint:
        from torchext._native import channels as native

        queue = self._channel._own_queue()
        self._queue = queue
        self._endpoint = native.Endpoint(queue, self.name, _SENDER, self._channel._heeds_deaths)
        return self._endpoint

    def _ready(self) -> native.Endpoint:
        if self._endpoint is None:
            raise ChannelClosed(f"the sender {self.name} was closed")
        return self._join() if self._queue.forked else self._endpoint

    def send(self, tree: Any, timeout: float | timedelta | None = None, *, version: int = -1) -> bool:
        """Copies a message into the channel.

        Args:
            tree: The message; see `Channel`. Tensors may be on any device and need not be contiguous.
            timeout: How long to wait for room: seconds, a timedelta, or None for ever.
            version: Of the weights that it was made with, for `ChannelLoader`'s ``max_staleness``; -1 for none.

        Returns:
            False if the policy "drop_newest" has dropped it.

        Raises:
            ChannelTimeout: No room in time; the message says why.
            ChannelFull: No room, with the policy "error".
            ChannelClosed: Nobody can receive it any more.
            PeerDied: A receiver, or the process that made the channel, died; once for each. This message was not sent.
            TypeError: Something in it cannot be pickled.
            ValueError: It is too large, or nested too deep.
        """
        endpoint = self._endpoint
        if endpoint is None:
            endpoint = self._ready()
        limit_s = _FOREVER if timeout is None else sharing.seconds(timeout)
        status = endpoint.send(tree, limit_s, version)
        if status == _OK:
            return True
        if status == _DROPPED:
            return False
        if status == _FORKED:  # found out only here, as to ask before each message costs
            self._join()
            return self.send(tree, limit_s, version=version)
        raise self._channel._failure(status, limit_s, endpoint, sends=True)

    @contextlib.contextmanager
    def reserve(self, spec: Any, timeout: float | timedelta | None = None, *, version: int = -1) -> Iterator[Any]:
        """Lets a message be written in place, with no copy: ``with sender.reserve(spec) as tree: ...``.

        The message is sent when the block ends, and dropped when an exception leaves it. The views must not be used
        after that. A slot is taken only then, so that many may be written at a time.

        Args:
            spec: A tree like the message. Of its tensors (also on the device "meta") and arrays only shape and dtype
                matter: the views hold what was there before, as with `torch.empty`. Numbers and strings are sent as
                they are.
            timeout: As for `send`; also for the wait at the end.
            version: As for `send`.

        Yields:
            The tree of views.

        Raises:
            As for `send`.
        """
        from torchext._native import channels as native

        endpoint = self._ready()
        limit_s = sharing.seconds(timeout)
        status, views, reservation = endpoint.reserve(spec, limit_s, version)
        if status != _OK:
            raise self._channel._failure(status, limit_s, endpoint, sends=True)
        try:
            yield views
        except BaseException:
            del views
            native.abandon(reservation)
            raise
        status = endpoint.commit(reservation, limit_s)
        if status not in (_OK, _DROPPED):
            raise self._channel._failure(status, limit_s, endpoint, sends=True)

    def close(self) -> None:
        """Leaves the channel; what was sent is still delivered. Idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None and not self._queue.forked:
            endpoint.leave()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None or issubclass(kind, ChannelError):
            self.close()
