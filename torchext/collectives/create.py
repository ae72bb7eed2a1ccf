"""Which engine a new group of the backend "dfccl" gets."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch.distributed as dist

from torchext.collectives import process_group
from torchext.collectives.explain import explain_on_signal
from torchext.collectives.mesh import Meeting, fresh
from torchext.collectives.options import Options, explains_on_sigusr1
from torchext.collectives.ordered import OrderedProcessGroup
from torchext.collectives.world import _host
from torchext.collectives.wrapping import Wrapped, create_ordered


def create(options: Any, backend_options: Any = None) -> dist.ProcessGroup:
    """Makes the group for `torch.distributed`; all its members must call it.

    Args:
        options: What torch says of the group.
        backend_options: `Options`; `Wrapped`, from `wrap`; or None for those of the default group, or of the
            environment.

    Raises:
        TypeError: ``backend_options`` is something else.
        CollectiveError: The group cannot be made, as where a rank does not come.
    """
    if explains_on_sigusr1() and threading.current_thread() is threading.main_thread():
        explain_on_signal()
    if isinstance(backend_options, Wrapped):
        return create_ordered(options, backend_options)
    if backend_options is not None and not isinstance(backend_options, Options):
        raise TypeError(f'"dfccl" takes torchext.collectives.Options as pg_options, got {backend_options!r}')
    default = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    if backend_options is None and isinstance(default, OrderedProcessGroup) and default.owns_inner:
        return create_ordered(options, None)
    within = backend_options is None and isinstance(default, process_group.ProcessGroup)
    engine = "preemptive" if within else (backend_options or Options()).engine
    if engine == "ordered" or (engine == "auto" and not _on_one_host(options)):
        return create_ordered(options, None)
    return process_group.create(options, backend_options)


def _on_one_host(options: Any) -> bool:
    """Whether the members can share memory."""
    if sys.platform != "linux":
        return True  # and the engine for it says what it needs
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    store = fresh(options.store, "hosts", options.group_rank)
    hosts = Meeting(store, options.group_rank, ranks, options.timeout).exchange("host", _host())
    return len(set(hosts)) == 1
