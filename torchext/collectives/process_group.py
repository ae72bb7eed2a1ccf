"""The process group that users get for the backend name "dfccl"."""

# torch calls each method in one of several forms, which its stub gives as overloads; one signature here takes them all.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchext.collectives.calls import DONE, EngineGroup
from torchext.collectives.compiling import run_as_written
from torchext.collectives.deferral import deferrals
from torchext.collectives.options import Options
from torchext.collectives.requests import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    DTYPES,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
    as_list,
    as_tensors,
    root_of,
    write_back,
)
from torchext.collectives.tags import tag_of
from torchext.collectives.work import CallWork, JoinedWork
from torchext.collectives.world import World, meet

Tensor = torch.Tensor


class ProcessGroup(EngineGroup):
    """Collectives on CPU tensors of one host that never deadlock for the order in which ranks issue them.

    Users do not construct it: `import torchext`, then ``dist.init_process_group("dfccl")`` or ``"cpu:dfccl"``, or
    ``dist.new_group(..., backend="dfccl")`` in a program whose default group is another backend. It serves as any other
    group does in `torch.distributed`.

    Every collective must be issued by every member. In which order among others, on this and other groups, and by which
    threads is free as long as nobody waits in between: asynchronous calls can be issued in any order on each rank. (A
    blocking call waits where it stands. If ranks block in a circle, each in a call that another would issue only later,
    all of them get a `DeadlockError` within a second, or go on, as `Options` say; if their calls on one group differ, a
    `CollectiveMismatchError`.) Calls belong together if they agree in group, operation, dtype, shape, root and `tag`;
    see there.

    If a member dies, the others get `PeerLostError` within a second from each collective that needs it, and so does
    everyone who waits for a member that has destroyed its group. At the timeout of the group a `CollectiveTimeoutError`
    tells who is missing and what they have called instead. After an error `dist.destroy_process_group()` and a new
    `init_process_group` work; no shared memory stays, whatever dies.

    ``bool`` is a logical value: sum and max mean "or", product and min "and". Half-precision values are added up in
    float32 and rounded once, with equal bits on each rank; no run depends on timing. Averages of integers are rounded
    towards zero, as over NCCL.

    Thread-safe. A forked child cannot use it.

    Source: DFCCL (EuroSys 2025) and OCCL (arXiv 2303.06324): collectives are preempted when a primitive cannot go on,
    their context is saved, and adaptive patience ("stickiness") makes ranks converge on one collective without a
    coordinator. We differ: there is no registration of collectives, as calls are matched by what they are; the engine
    runs on CPU cores, in the waiting thread where there is one; staging memory is assigned once all members have
    joined, all at once, so that it cannot run out into a deadlock.
    """

    def __init__(self, world: World, rank: int, ranks: Sequence[int], timeout: timedelta, owns_world: bool) -> None:
        super().__init__(world, rank, ranks, timeout)
        self._owns_world = owns_world

    # --- What torch.distributed asks of a group ----------------------------------------------------------------------

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        if self._native is not None:
            self._world.where[self._uid] = self._where()

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._group()

    def shutdown(self) -> None:
        """Fails what is in flight and leaves; `dist.destroy_process_group` calls it.

        It waits for peers only where a blocking call has returned early, to resolve a deadlock.
        """
        self._close("the process group was destroyed")

    def abort(self) -> None:
        """Fails what is in flight, here and on the other members, and leaves. From any thread. Idempotent."""
        self._close("the process group was aborted", abort=True)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """Makes a group of some members; nothing is sent. All of them call it, with equal ``ranks``.

        `torch.distributed.split_group` itself refuses groups of CPU tensors before it asks; `new_group` does not.

        Args:
            ranks: Their ranks in this group, in the order of the new one.
            timeout: As of this group if None.
            opts: Ignored; the options of this group hold.
            group_name: Of the new group; torch gives it.
            group_desc: Told to people; also part of its identity.
            device_types: Ignored.

        Returns:
            The group; None if this rank is not in it.
        """
        if self._rank not in ranks:
            return None
        seconds = timeout if timeout is not None else timedelta(seconds=self._timeout_s)
        members = [self._ranks[rank] for rank in ranks]
        group = ProcessGroup(self._world, list(ranks).index(self._rank), members, seconds, owns_world=False)
        group._set_group_name(group_name or f"{self._name}/{','.join(map(str, ranks))}")
        group._set_group_desc(group_desc or f"{self._desc}:split")
        return group

    def stats(self) -> dict[str, int]:
        """Counts of this rank's engine, which its groups share, since it was made.

        Returns:
            ``issued``, ``completed``, ``failed`` calls; ``staged``: of the completed, those through staging memory;
            ``primitives``: chunks sent, received or reduced; ``preemptions``: times that a call was left with its
            context saved because a peer was busy elsewhere; ``context_switches``: turns to another call; ``spins``
            and ``sleeps``: polls in vain, and waits after them; ``wakes``: of sleeping peers; ``grants_deferred``:
            waits for staging memory; ``deadlocks``: circles in which this rank was found, and ``deferred``: its waits
            that were put off to resolve them; ``queue_depth`` and ``max_queue_depth``: calls in flight now and at most;
            ``spin_limit``: polls in vain before it sleeps, many if each rank can have a core to itself.
        """
        return self._engine.stats()

    def _close(self, reason: str, abort: bool = False) -> None:
        if not abort and self._owns_world and not self._world.forked:
            deferrals.end_world(self._world, wait=True)  # while the group still works
        if not self._closed:
            self._closed = reason
            if self._uid:
                self._engine.abort(self._uid, reason)
        if self._owns_world:
            self._world.close(reason, abort=abort)

    # --- Collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        (tensor,) = as_tensors(tensors)
        if isinstance(opts, dist.AllreduceOptions):
            code = self._reduce_op(opts.reduceOp)
            if (
                not opts.asyncOp
                and self._coalesced is None
                and isinstance(code, int)
                and tensor.is_contiguous()
                and tensor.dtype in DTYPES
            ):
                given = opts.timeout
                timeout_s = self._timeout_s if given.days < 0 else given.total_seconds()
                self._require_cpu(tensor)
                if deferrals.active:
                    deferrals.before([tensor], [])
                    deferrals.sweep()
                stopped = self._engine.run_all_reduce(
                    self._group(),
                    code,
                    DTYPES[tensor.dtype],
                    size := tensor.element_size(),
                    tensor.shape,
                    tag_of(tensor),
                    tensor.data_ptr(),
                    tensor.numel() * size,
                    timeout_s,
                )
                if stopped is not None:
                    self._stop(stopped, [tensor], [tensor], [], timeout_s)
                return DONE
        else:
            code = self._reduce_op(opts)
        return self._call(ALL_REDUCE, opts, tensor, [tensor], [tensor], reduce_op=code, timeout=timeout)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        code = self._reduce_op(getattr(opts, "reduceOp", None))
        return self._join(
            [self._issue(ALL_REDUCE, opts, t, [t], [t], reduce_op=code) for t in tensors], list(tensors), opts
        )

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> dist.Work:
        (tensor,) = as_tensors(tensors)
        root, reduce_op = root_of(opts, root), getattr(opts, "reduceOp", op)
        outputs = [tensor] if root == self._rank else []
        code = self._reduce_op(reduce_op)
        return self._call(REDUCE, opts, tensor, [tensor], outputs, root=root, reduce_op=code, timeout=timeout)

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> dist.Work:
        (tensor,) = as_tensors(tensors)
        root = root_of(opts, root)
        inputs, outputs = ([tensor], []) if root == self._rank else ([], [tensor])
        return self._call(BROADCAST, opts, tensor, inputs, outputs, root=root, timeout=timeout, result=[tensor])

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        (tensor,) = as_tensors(input_tensors)
        outputs = as_list(output_tensors)
        if len(outputs) != self.size():
            raise ValueError(f"expected {self.size()} output tensors, one for each member, got {len(outputs)}")
        if all(t.numel() == tensor.numel() for t in outputs):
            return self._call(ALL_GATHER, opts, tensor, [tensor], outputs, timeout=timeout)
        identity = tuple(d for t in outputs for d in (len(t.shape), *t.shape))
        return self._call(ALL_GATHER, opts, tensor, [tensor], outputs, identity=identity, uneven=True, timeout=timeout)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        self._require_ratio(output, input, "output")
        return self._call(ALL_GATHER, opts, input, [input], [output])

    _allgather_base = all_gather_single

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        works = []
        for i, tensor in enumerate(input_list):
            outputs = [of_rank[i] for of_rank in output_lists]
            works.append(self._issue(ALL_GATHER, opts, tensor, [tensor], outputs))
        return self._join(works, [t for outputs in output_lists for t in outputs], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        works = []
        for out, tensor in zip(outputs, inputs, strict=True):
            self._require_ratio(out, tensor, "output")
            works.append(self._issue(ALL_GATHER, opts, tensor, [tensor], [out]))
        return self._join(works, list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> dist.Work:
        (tensor,) = as_tensors(input_tensors)
        root = root_of(opts, root)
        outputs = as_list(output_tensors) if root == self._rank else []
        return self._call(GATHER, opts, tensor, [tensor], outputs, root=root, timeout=timeout)

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> dist.Work:
        (tensor,) = as_tensors(output_tensors)
        root = root_of(opts, root)
        inputs = as_list(input_tensors) if root == self._rank else []
        return self._call(SCATTER, opts, tensor, inputs, [tensor], root=root, timeout=timeout)

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        (tensor,) = as_tensors(output_tensors)
        code = self._reduce_op(getattr(opts, "reduceOp", opts))
        return self._call(
            REDUCE_SCATTER, opts, tensor, as_list(input_tensors), [tensor], reduce_op=code, timeout=timeout
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        self._require_ratio(input, output, "input")
        code = self._reduce_op(getattr(opts, "reduceOp", None))
        return self._call(REDUCE_SCATTER, opts, output, [input], [output], reduce_op=code)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        code = self._reduce_op(getattr(opts, "reduceOp", None))
        works = []
        for out, tensor in zip(outputs, inputs, strict=True):
            self._require_ratio(tensor, out, "input")
            works.append(self._issue(REDUCE_SCATTER, opts, out, [tensor], [out], reduce_op=code))
        return self._join(works, list(outputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        inputs, outputs = list(input_tensors), list(output_tensors)
        if not len(inputs) == len(outputs) == self.size():
            raise ValueError(
                f"expected {self.size()} input and output tensors, one for each member, "
                f"got {len(inputs)} and {len(outputs)}"
            )
        # Each pair of members may have its own sizes, and no member knows all: no shape can tell these calls apart.
        return self._call(ALL_TO_ALL, opts, inputs[self._rank], inputs, outputs, identity=(), timeout=timeout)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> dist.Work:
        if not len(output_split_sizes) and not len(input_split_sizes):
            return self._call(ALL_TO_ALL, opts, input, [input], [output], timeout=timeout)
        identity = tuple(input.shape[1:])  # rows may be of any number
        return self._call(
            ALL_TO_ALL,
            opts,
            input,
            [input],
            [output],
            identity=identity,
            splits=(list(input_split_sizes), list(output_split_sizes)),
            timeout=timeout,
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        return self._call(BARRIER, opts, None, [], [], timeout=timeout)

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> dist.Work:
        (tensor,) = as_tensors(tensors)
        return self._issue(SEND, None, tensor, [tensor], [], root=self._rank, peer=dst_rank, message_tag=tag)

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> dist.Work:
        (tensor,) = as_tensors(tensors)
        return self._issue(SEND, None, tensor, [], [tensor], root=src_rank, peer=self._rank, message_tag=tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receives from whichever member sends first; ``work._source_rank()`` says who it was."""
        (tensor,) = as_tensors(tensors)
        sources = [rank for rank in range(self.size()) if rank != self._rank]
        if not sources:
            raise ValueError("there is no other rank in the group to receive from")
        request, copies, outputs, keep = self._request(
            SEND, None, tensor, [], [tensor], root=sources[0], peer=self._rank, message_tag=tag
        )
        call = self._engine.issue_any(*request, sources, keep)
        copy_back = (lambda: write_back(copies)) if copies else None
        work = CallWork(self._world, call, outputs, self._where(), request[-1], copy_back, keep)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return JoinedWork(works, [])


def create(options: Any, backend_options: Any = None) -> ProcessGroup:
    """Makes the group for `torch.distributed`; all its members must call it.

    Args:
        options: What torch says of the group.
        backend_options: `Options`, or None for those of the default group or else of the environment.

    Raises:
        CollectiveError: As `torchext.collectives.world.meet`.
    """
    if backend_options is not None and not isinstance(backend_options, Options):
        raise TypeError(f'"dfccl" takes torchext.collectives.Options as pg_options, got {backend_options!r}')
    rank: int = options.group_rank
    ranks: list[int] = list(options.global_ranks_in_group) or list(range(options.group_size))
    timeout: timedelta = options.timeout
    if dist.is_initialized():
        default = dist.distributed_c10d._get_default_group()
        if isinstance(default, ProcessGroup):
            if backend_options not in (None, default._world.options):
                raise ValueError("the options of a group within a dfccl group are those of the outer one")
            return ProcessGroup(default._world, rank, ranks, timeout, owns_world=False)
    world = meet(options.store, rank, ranks, timeout, backend_options or Options())
    return ProcessGroup(world, rank, ranks, timeout, owns_world=True)


run_as_written(ProcessGroup)
