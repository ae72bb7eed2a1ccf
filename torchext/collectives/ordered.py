"""Process groups that keep the collectives of another backend from deadlocking, by launching them in one order."""

# torch calls each method in one of several forms, which its stub gives as overloads; one signature here takes them all.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchext.collectives.compiling import run_as_written
from torchext.collectives.errors import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
)
from torchext.collectives.naming import NamedGroup
from torchext.collectives.order import InFlight, OrderedWork, Sequencer, leave_sequencer
from torchext.collectives.requests import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    DTYPES,
    GATHER,
    NO_REDUCE,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
    allreduce_options,
    first,
    flat,
    num_bytes,
    other_dtype,
    reduce_op_in,
    root_in,
)
from torchext.collectives.sites import call_site
from torchext.collectives.tags import tag_of
from torchext.collectives.work import JoinedWork, call_error

if TYPE_CHECKING:
    from torchext._native import collectives as native

Tensor = torch.Tensor


class OrderedProcessGroup(NamedGroup):
    """Collectives of another backend that cannot deadlock for the order in which ranks issue them.

    Users do not construct it: it is what `wrap` gives, and ``dist.init_process_group("dfccl",
    pg_options=Options(engine="ordered"))``, whose inner groups are gloo for CPU tensors and NCCL for CUDA tensors. It
    serves as any other group does in `torch.distributed`. Groups themselves are made as with any backend: by all
    members, in the same order.

    A collective is launched on the inner group once every member has issued it, in an order that is the same on all
    ranks, across all ordered groups that have members in common, and by one thread at a time. So asynchronous calls can
    be issued in any order on each rank, on overlapping groups and by several threads. A blocking call waits where it
    stands: if ranks wait in a circle, each in a call that another would issue only later, all of them get a
    `DeadlockError`, most within a second, or a `CollectiveMismatchError` if they wait on one group; such waits are not
    put off here, whatever ``on_deadlock`` says. Calls belong together if they agree in group, operation, reduction,
    dtype, shape, root and `torchext.tag`.

    The returned works are asynchronous. ``wait()`` blocks the host until the collective is launched and from then on
    does what the inner work's does: over NCCL, the caller's stream waits and the host does not. The collective itself
    waits for what was on the caller's stream when it was issued.

    A member that dies is named by `PeerLostError` within a second on one host or where its connection is closed, and
    within some fifteen seconds where its host is cut off. Sizes that do not fit together are told as
    `CollectiveMismatchError` before anything is launched, calls that do not match at the timeout as
    `CollectiveTimeoutError` with what was called instead.

    Ordering costs the other ranks' messages: on one host they go through shared memory. Nothing of the program's data
    goes through them. Thread-safe; a forked child cannot use it. Over NCCL it has not run yet.

    Source: DFCCL (EuroSys 2025) avoids the deadlock by preempting; where a backend cannot be preempted, ordering what
    is ready, as here, does. The order: Skeen's timestamps, see csrc/collectives/order.hpp.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        sequencer: Sequencer,
        links: native.OrderGroup,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        *,
        owns_inner: bool,
    ) -> None:
        super().__init__(rank, len(ranks), timeout)
        self._inner = inner
        self._rank = rank
        self._ranks = tuple(ranks)
        self._everyone = list(range(len(ranks)))
        self.owns_inner = owns_inner  # it was made for this group
        self._in_flight = InFlight()
        self._fallen: list[int] = []
        self._someone_fell = threading.Event()
        self._closing = threading.Lock()
        self._closed = ""  # guarded by _closing
        self._coalesced: list[OrderedWork] | None = None
        self._links = links
        self._sequencer = sequencer
        sequencer.add(links, self, ranks[rank])

    # --- What torch.distributed asks of a group ----------------------------------------------------------------------

    @property
    def inner(self) -> dist.ProcessGroup:
        """The group that does the work."""
        return self._inner

    @property
    def _device_types(self) -> list[torch.device]:
        return list(self._inner._device_types)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._inner.set_timeout(timeout)

    def shutdown(self) -> None:
        """Fails what has not been launched and leaves; `dist.destroy_process_group` calls it. Never waits for peers."""
        self.leave("the process group was destroyed", aborted=False)

    def abort(self) -> None:
        """Fails what is in flight, here and on the other members, and leaves. From any thread. Idempotent."""
        self.leave("the process group was aborted", aborted=True)

    def stats(self) -> dict[str, int]:
        """Counts of this rank, over all its ordered groups.

        Returns:
            ``issued``: collectives; ``queue_depth``: of them, those that are not launched yet; ``deadlocks``: circles
            in which this rank was found.
        """
        issued, active, deadlocks = self._sequencer.native.counts()
        return {"issued": issued, "queue_depth": active, "deadlocks": deadlocks}

    def leave(self, reason: str, *, aborted: bool) -> None:
        """For `shutdown`, `abort` and the sequencer."""
        with self._closing:
            if self._closed:
                return
            self._closed = reason
        self._sequencer.leave(self._links, reason, aborted)
        leave_sequencer(self._sequencer)
        if self._sequencer.forked:
            return
        if aborted:
            self._abort_inner()
        elif self.owns_inner:
            self._inner.shutdown()

    def on_fallen(self, rank: int) -> None:
        """A member has died or aborted: what runs on the inner group may never end by itself."""
        self._fallen.append(rank)
        self._someone_fell.set()
        if self._in_flight.any():
            self._abort_inner()

    def _abort_inner(self) -> None:
        # What runs on a backend that cannot be aborted ends by its timeout.
        with contextlib.suppress(RuntimeError, AttributeError):
            self._inner.abort()

    # --- Collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        like = first(tensors)
        return self._order(
            "allreduce", ALL_REDUCE, like, [like], (tensors, *args), kwargs, reduce_op=reduce_op_in(args, kwargs)
        )

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._join([self.allreduce([t], *allreduce_options(opts)) for t in tensors], list(tensors))

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        like = first(tensors)
        root, code = root_in(args, kwargs), reduce_op_in(args, kwargs)
        return self._order("reduce", REDUCE, like, [like], (tensors, *args), kwargs, root=root, reduce_op=code)

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        like = first(tensors)
        return self._order("broadcast", BROADCAST, like, [like], (tensors, *args), kwargs, root=root_in(args, kwargs))

    def allgather(self, output_tensors: Any, input_tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        like, outputs = first(input_tensors), flat(output_tensors)
        # Sizes may differ between members; all know all of them.
        identity = [d for t in outputs for d in (t.dim(), *t.shape)]
        arguments = (output_tensors, input_tensors, *args)
        return self._order("allgather", ALL_GATHER, like, outputs, arguments, kwargs, identity=identity)

    def all_gather_single(self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        return self._order(_ALL_GATHER_SINGLE, ALL_GATHER, input, [output], (output, input, *args), kwargs)

    _allgather_base = all_gather_single

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        works = [self.allgather([[of_rank[i] for of_rank in output_lists]], [x]) for i, x in enumerate(input_list)]
        return self._join(works, [t for outputs in output_lists for t in outputs])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        works = [self.all_gather_single(out, x) for out, x in zip(outputs, inputs, strict=True)]
        return self._join(works, list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_tensors: Any, input_tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        like, root = first(input_tensors), root_in(args, kwargs)
        arguments = (output_tensors, input_tensors, *args)
        return self._order("gather", GATHER, like, flat(output_tensors), arguments, kwargs, root=root)

    def scatter(self, output_tensors: Any, input_tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        like, root = first(output_tensors), root_in(args, kwargs)
        arguments = (output_tensors, input_tensors, *args)
        return self._order("scatter", SCATTER, like, [like], arguments, kwargs, root=root)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        like = first(output_tensors)
        # Parts may differ in size; all members know all of them.
        identity = [d for t in flat(input_tensors) for d in (t.dim(), *t.shape)]
        arguments, code = (output_tensors, input_tensors, *args), reduce_op_in(args, kwargs)
        return self._order(
            "reduce_scatter", REDUCE_SCATTER, like, [like], arguments, kwargs, reduce_op=code, identity=identity
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        arguments, code = (output, input, *args), reduce_op_in(args, kwargs)
        return self._order(_REDUCE_SCATTER_SINGLE, REDUCE_SCATTER, output, [output], arguments, kwargs, reduce_op=code)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        works = []
        for out, tensor in zip(outputs, inputs, strict=True):
            given = dist.ReduceScatterOptions()
            if opts is not None:
                given.reduceOp = opts.reduceOp
            works.append(self.reduce_scatter_single(out, tensor, given))
        return self._join(works, list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> dist.Work:
        like = input_tensors[self._rank]
        sizes = [num_bytes(t) for t in input_tensors], [num_bytes(t) for t in output_tensors]
        arguments = (output_tensors, input_tensors, *args)
        # Each two members may have their own sizes, and no member knows all: no shape can tell these calls apart.
        return self._order(
            "alltoall", ALL_TO_ALL, like, list(output_tensors), arguments, kwargs, identity=[], sizes=sizes
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> dist.Work:
        arguments = (output, input, list(output_split_sizes), list(input_split_sizes), *args)
        identity, sizes = None, None
        if len(output_split_sizes) or len(input_split_sizes):
            identity = list(input.shape[1:])  # rows may be of any number
            sizes = self._row_bytes(input, input_split_sizes), self._row_bytes(output, output_split_sizes)
        return self._order(
            _ALL_TO_ALL_SINGLE, ALL_TO_ALL, input, [output], arguments, kwargs, identity=identity, sizes=sizes
        )

    alltoall_base = all_to_all_single

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._order("barrier", BARRIER, None, [], args, kwargs)

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> dist.Work:
        return self._between("send", first(tensors), (tensors, dst_rank, tag), self._rank, dst_rank, tag)

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> dist.Work:
        return self._between("recv", first(tensors), (tensors, src_rank, tag), src_rank, self._rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receives from whichever member sends first; ``work._source_rank()`` says who it was."""
        self._require_open()
        tensor = first(tensors)
        sources = [rank for rank in self._everyone if rank != self._rank]
        if not sources:
            raise ValueError("there is no other rank in the group to receive from")

        def start() -> dist.Work:
            inner: dist.Work = self._inner.recv(tensors, work.handle.root, tag)
            return self._launched(inner)

        work = self._work(start, tensor, [tensor], self._timeout_s)
        work.handle = self._sequencer.native.issue_any(
            self._links,
            _dtype_of(tensor),
            tensor.shape,
            tag_of(tensor) + (f"#{tag}" if tag else ""),
            sources,
            num_bytes(tensor),
            self._timeout_s,
            work,
        )
        return self._issued(work)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return self._join(works, [])

    # --- Into the order ----------------------------------------------------------------------------------------------

    def _between(
        self, method: str, tensor: Tensor, arguments: tuple[Any, ...], sender: int, receiver: int, tag: int
    ) -> dist.Work:
        if sender == receiver:
            raise ValueError("a rank cannot send to itself, or receive from itself")
        size = num_bytes(tensor)
        sends = sender == self._rank
        # Of the two, the sender first.
        sizes = [-1, size if sends else -1], [-1 if sends else size, -1]
        return self._order(
            method,
            SEND,
            tensor,
            [] if sends else [tensor],
            arguments,
            {},
            root=sender,
            peer=receiver,
            members=[sender, receiver],
            sizes=sizes,
            tag=f"#{tag}" if tag else "",
        )

    def _order(
        self,
        method: str,
        kind: int,
        like: Tensor | None,
        outputs: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        reduce_op: int = NO_REDUCE,
        root: int = -1,
        peer: int = -1,
        identity: list[int] | None = None,
        sizes: tuple[list[int], list[int]] | None = None,
        members: list[int] | None = None,
        tag: str = "",
    ) -> OrderedWork:
        """Issues the call of an inner method.

        Args:
            method: Of the inner group.
            kind: What it is to the orderer.
            like: Whose dtype and shape tell calls apart.
            outputs: Tensors that it writes to.
            args: For the inner method.
            kwargs: For the inner method.
            reduce_op: By torch's number.
            root: Place in the group.
            peer: The receiver, for messages between two.
            identity: The numbers that tell calls apart, where that is not the shape.
            sizes: Bytes for, and wanted from, each member, where no other member can know them; -1 is not compared.
            members: Places of those who take part, if not all.
            tag: Added to the user's.
        """
        self._require_open()
        timeout_s = self._timeout_s
        will_wait = False
        opts: Any = kwargs.get("opts", args[-1] if args else None)
        if hasattr(opts, "asyncOp"):
            will_wait = not opts.asyncOp and self._coalesced is None
            opts.asyncOp = True  # the launching thread's stream is not the one that will wait
        given = kwargs.get("timeout") or getattr(opts, "timeout", opts)
        if isinstance(given, timedelta) and given.days >= 0 and given:
            timeout_s = given.total_seconds()
        launch = getattr(self._inner, method)

        def start() -> dist.Work:
            inner: dist.Work = launch(*args, **kwargs)
            return self._launched(inner)

        work = self._work(start, like, outputs, timeout_s)
        work.handle = self._sequencer.native.issue(
            self._links,
            kind,
            reduce_op,
            0 if like is None else _dtype_of(like),
            root,
            peer,
            () if like is None else like.shape,
            identity,
            tag_of(like) + tag,
            self._everyone if members is None else members,
            [] if sizes is None else sizes[0],
            [] if sizes is None else sizes[1],
            timeout_s,
            will_wait,
            work,
        )
        return self._issued(work, will_wait=will_wait)

    def _require_open(self) -> None:
        if self._closed:
            raise CollectiveAbortedError(f"{self._closed}; make a new one to go on")
        if self._sequencer.forked:
            raise CollectiveError(
                "this process was forked from a member of the process group and is not a member itself"
            )

    def _work(
        self, start: Callable[[], dist.Work], like: Tensor | None, outputs: list[Tensor], timeout_s: float
    ) -> OrderedWork:
        """A work that ``start`` launches."""
        return OrderedWork(
            self._sequencer,
            start if like is None or not like.is_cuda else _after_the_stream(like.device, start),
            outputs,
            call_site(3),
            lambda work, error: self._error_of(work, error, timeout_s),
        )

    def _launched(self, inner: dist.Work) -> dist.Work:
        self._in_flight.add(inner)
        if self._someone_fell.is_set():  # between its turn and now: `on_fallen` may not have seen it in flight
            self._abort_inner()
        return inner

    def _issued(self, work: OrderedWork, *, will_wait: bool = False) -> OrderedWork:
        if not will_wait:  # else the wait launches what is ready
            self._sequencer.launch_ready()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _join(self, works: Sequence[Any], outputs: list[Tensor]) -> dist.Work:
        return JoinedWork(works, outputs)

    def _row_bytes(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 0
        row = num_bytes(tensor) // rows if rows else 0
        return [split * row for split in splits] if len(splits) else [num_bytes(tensor) // self.size()] * self.size()

    def where(self) -> str:
        """The group and this rank in it, in words."""
        desc = f" ({self._desc})" if self._desc not in ("", "undefined") else ""
        ranks = self._ranks
        return f"group {self._name!r}{desc} of ranks {list(ranks)} at rank {ranks[self._rank]}"

    def _error_of(self, work: OrderedWork, error: Exception | None, timeout_s: float) -> CollectiveError:
        """What to raise for a call that was not launched, or that the inner group failed with ``error``."""
        failed = call_error(work.handle, work.handle.culprits, self.where(), timeout_s, work.site)
        if error is None:
            return failed
        kind: type[CollectiveError] = CollectiveError
        reason = f"the inner group said: {error}"
        if self._closed:
            kind, reason = CollectiveAbortedError, f"{self._closed} ({reason})"
        elif "timed out" in str(error).lower():
            kind = CollectiveTimeoutError
        # The inner group may notice before the sequencer does. What it refuses at once has another cause, and is told
        # under the lock of all launches.
        elif self._someone_fell.wait(1.0 if work.launched else 0.0):
            kind = PeerLostError
            fallen = ", ".join(map(str, self._fallen))
            reason = f"rank {fallen} died, or aborted the group, in the middle of it ({reason})"
        return kind(str(failed) + reason, self._fallen)


run_as_written(OrderedProcessGroup)

# What torch 2.13 renamed.
_ALL_GATHER_SINGLE, _REDUCE_SCATTER_SINGLE, _ALL_TO_ALL_SINGLE = (
    new if hasattr(dist.ProcessGroup, new) else old
    for new, old in (
        ("all_gather_single", "_allgather_base"),
        ("reduce_scatter_single", "_reduce_scatter_base"),
        ("all_to_all_single", "alltoall_base"),
    )
)


def _dtype_of(tensor: Tensor) -> int:
    return DTYPES[tensor.dtype] if tensor.dtype in DTYPES else other_dtype(tensor.dtype)


def _after_the_stream(device: torch.device, start: Callable[[], dist.Work]) -> Callable[[], dist.Work]:
    """Has what ``start`` launches wait for all that is on the caller's stream now; the host waits for nothing."""
    recorded = torch.cuda.current_stream(device).record_event()
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launch() -> dist.Work:
        with torch.cuda.stream(side):
            side.wait_event(recorded)
            return start()

    return launch
