"""How ordered groups are made: around a group that there is, or with inner groups of their own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from torchext.collectives.mesh import connect, fresh
from torchext.collectives.order import join_sequencer, leave_sequencer
from torchext.collectives.ordered import OrderedProcessGroup
from torchext.collectives.process_group import ProcessGroup


@dataclass(frozen=True)
class Wrapped:
    """As ``pg_options``: the group to put in order."""

    inner: dist.ProcessGroup


def wrap(group: dist.ProcessGroup | None = None, *, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Makes a group of the same members whose collectives run on ``group``, in an order that cannot deadlock.

    Every member must call it, and issue through the result, not through ``group``, from then on. Groups that overlap
    must all be wrapped; what is not is not in the order. Blocks until all members have called it. The result ends with
    `dist.destroy_process_group`, or with that of the default group; ``group`` stays as it is.

    Args:
        group: Any group of `torch.distributed`, of any backend. None: the default group.
        timeout: Of each collective until it is launched. None: half an hour, as torch has it.

    Returns:
        An `OrderedProcessGroup`; ``group`` itself if it cannot deadlock anyway.

    Raises:
        ValueError: This rank is not a member.
        CollectiveError: As `torchext.collectives.mesh.connect`.

    Example:
        >>> pg = torchext.collectives.wrap(dist.new_group([0, 1], backend="nccl"))
        >>> work = dist.all_reduce(tensor, group=pg, async_op=True)
    """
    inner = dist.group.WORLD if group is None else group
    if not isinstance(inner, dist.ProcessGroup):
        raise ValueError("wrap: this rank is not a member of the group, or init_process_group has not been called")
    if isinstance(inner, (OrderedProcessGroup, ProcessGroup)):
        return inner
    ranks = dist.get_process_group_ranks(inner)
    rank = inner.rank()
    # What dist.new_group does, but for its two ways to find a name: one must be called by all ranks, and the other
    # counts the groups that the process has, of which members may have different numbers. Here it is that of the inner
    # group and how often that has been wrapped, which each member counts in the store.
    torch_groups = dist.distributed_c10d
    store = torch_groups._get_default_store()
    count = store.add(f"torchext/wraps/{inner.group_name}/{ranks[rank]}", 1)
    made, _ = torch_groups._new_process_group_helper(
        len(ranks),
        rank,
        ranks,
        dist.Backend("dfccl"),
        store,
        torch_groups.GroupName(f"{inner.group_name}/ordered/{count}"),
        backend_options=Wrapped(inner),
        timeout=timeout or torch_groups._get_default_timeout(dist.Backend("dfccl")),
        group_desc=f"ordered {inner.group_desc}",
    )
    torch_groups._world.pg_group_ranks[made] = {r: place for place, r in enumerate(ranks)}
    assert isinstance(made, OrderedProcessGroup)
    return made


def create_ordered(options: Any, wrapped: Wrapped | None) -> OrderedProcessGroup:
    """Makes the group for `torch.distributed`; all its members must call it.

    Args:
        options: What torch says of the group.
        wrapped: The group to put in order. None: one of its own, gloo for CPU tensors, and NCCL for CUDA tensors where
            there are any.

    Raises:
        CollectiveError: As `torchext.collectives.mesh.connect`.
    """
    rank: int = options.group_rank
    ranks: list[int] = list(options.global_ranks_in_group) or list(range(options.group_size))
    store = fresh(options.store, "order", rank)
    sequencer = join_sequencer()
    try:
        # Before the inner group: it names those who do not come.
        links = connect(store, rank, ranks, options.timeout, sequencer.native.doorbell)
        inner = _make_inner(store, rank, len(ranks), options.timeout) if wrapped is None else wrapped.inner
        return OrderedProcessGroup(inner, sequencer, links, rank, ranks, options.timeout, owns_inner=wrapped is None)
    except BaseException:
        leave_sequencer(sequencer)
        raise


def _make_inner(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    inner = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    inner._set_default_backend(kinds.GLOO)
    gloo = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, size, timeout=timeout)
    inner._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        own = dist.ProcessGroupNCCL.Options()
        own._timeout = timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("cuda", store), rank, size, own)
        inner._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return inner
