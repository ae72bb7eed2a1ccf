"""How the agents of a job find each other: torch's dynamic rendezvous, mended.

Every job meets this way, also where torchrun uses its static rendezvous, which knows no failures: there the node with
``--node-rank 0`` holds the store, at ``--master-addr`` and ``--master-port``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _NodeDesc,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchext.launch.errors import LaunchError

logger = logging.getLogger(__name__)

_SEEN_S = 10.0  # for all nodes to see that all are done


@dataclass(frozen=True, repr=False)
class _Node(_NodeDesc):
    """A node that knows its place: ranks follow `place`, where torch sorts by host name and process id.

    Attributes:
        place: ``--node-rank``, then the order in which the nodes came.
    """

    place: tuple[int, int]

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, _Node)
        return (self.place, self.addr, self.pid, self.local_id) < (other.place, other.addr, other.pid, other.local_id)


class Rendezvous(RendezvousHandler):
    """The rendezvous of one agent.

    In contrast to torch's own:

    - Each round has a store of its own for the workers. (torch's hands out that of an earlier round, which nodes that
      join do not know of: both then wait for 60 s and fail.)
    - A node that is gone counts as a change of membership, as a new one does.
    - Ranks follow the order of the nodes, see `_Node`.

    Args:
        inner: torch's.
        node_rank: ``--node-rank``.
        fixed: Address and port of the workers' store in the first round; None: any free port of the node of rank 0.
    """

    def __init__(
        self, inner: DynamicRendezvousHandler, *, node_rank: int = 0, fixed: tuple[str, int] | None = None
    ) -> None:
        run_id = inner.get_run_id()
        store = inner._store
        node = inner._this_node
        self.min_nodes = inner.settings.min_nodes
        self._fixed = fixed
        self._members: frozenset[_NodeDesc] = frozenset()
        self._rank = 0
        self._store = store  # of this round, once there is one
        self._this_node = _Node(
            node.addr, node.pid, node.local_id, place=(node_rank, store.add(f"torchext/{run_id}/arrivals", 1))
        )
        self._inner = DynamicRendezvousHandler(
            self._this_node, inner.settings, inner.get_backend(), store, inner._state_holder
        )

    @property
    def round(self) -> int:
        """Number of the round; all nodes of the round agree on it, and it grows with each restart."""
        number: int = self._inner._state_holder.state.round
        return number

    @property
    def port(self) -> int:
        """Port of the store at which nodes meet."""
        number: int = self._inner._store.port  # type: ignore[attr-defined]  # a TCPStore
        return number

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers use a store that the agent of rank 0 holds."""
        return self._inner.use_agent_store

    def get_backend(self) -> str:
        """Name of the backend."""
        return self._inner.get_backend()

    def get_run_id(self) -> str:
        """Identifier of the job."""
        return self._inner.get_run_id()

    def next_rendezvous(self) -> RendezvousInfo:
        """Blocks until the nodes of the next round are there.

        Raises:
            LaunchError: The node that holds the store is gone. So do the other methods that ask others.
        """
        inner = self._inner
        inner._bootstrap_store_info = None
        inner._shared_tcp_store_server = None
        with self._store_may_be_lost():
            info = inner.next_rendezvous()
        self._members = frozenset(inner._state_holder.state.participants)
        self._rank, self._store = info.rank, info.store
        if self._fixed is not None and self.round == 0:
            return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(*self._fixed))
        return info

    def lost(self) -> list[str]:
        """Names the nodes of this round that are gone, as of the last question to the others."""
        return [str(node) for node in self._members - self._inner._state_holder.state.participants.keys()]

    def num_left(self) -> int:
        """How many nodes of this round are still there."""
        return len(self._members) - len(self.lost())

    def num_nodes_waiting(self) -> int:
        """How many nodes have come or gone since this round began."""
        with self._store_may_be_lost():
            waiting = self._inner.num_nodes_waiting()
        return waiting + len(self.lost())

    def is_closed(self) -> bool:
        """Whether the job has ended, on whichever node."""
        with self._store_may_be_lost():
            return self._inner.is_closed()

    def mark_done(self) -> None:
        """Tells the others that this node's workers have succeeded in this round."""
        with self._store_may_be_lost():
            self._store.set(f"torchext/done/{self._rank}", "")

    def all_done(self) -> bool:
        """Whether the workers of all nodes of this round have succeeded.

        Where they have, blocks until all know it, a few seconds at most: the store may end with the node that holds it.
        """
        with self._store_may_be_lost():
            if not self._all_have("done"):
                return False
        try:
            self._store.set(f"torchext/seen/{self._rank}", "")
            deadline = time.monotonic() + _SEEN_S
            while not self._all_have("seen") and time.monotonic() < deadline:
                time.sleep(0.05)
        except DistError:
            pass  # its holder has seen all it needs to
        return True

    def _all_have(self, what: str) -> bool:
        return self._store.check([f"torchext/{what}/{rank}" for rank in range(len(self._members))])

    @contextlib.contextmanager
    def _store_may_be_lost(self) -> Iterator[None]:
        try:
            yield
        except (RendezvousConnectionError, DistError) as error:
            raise LaunchError(
                f"lost the store of job {self.get_run_id()!r}: the node that holds it has ended or cannot be reached"
            ) from error

    def set_closed(self) -> None:
        """Ends the job for all nodes."""
        self._inner.set_closed()

    def shutdown(self) -> bool:
        """Ends the job for all nodes; says whether they could be told."""
        return self._inner.shutdown()


def meet(params: RendezvousParameters, *, node_rank: int) -> RendezvousHandler:
    """Makes the rendezvous that the parameters ask for.

    Args:
        params: As torch reads them from the command line.
        node_rank: ``--node-rank``.

    Raises:
        LaunchError: The store cannot be held or reached; says where, and what to try.
    """
    fixed: tuple[str, int] | None = None
    if params.backend == "static":
        host, port = parse_rendezvous_endpoint(params.endpoint, default_port=29500)
        fixed = (host, port)
        params = RendezvousParameters(
            "c10d",
            params.endpoint,
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            # The workers' store is reached at the address that the user has given.
            host if node_rank == 0 else params.local_addr,
            **{
                "read_timeout": params.get("timeout", 900),
                "join_timeout": params.get("timeout", 900),
                **params.config,
                "is_host": node_rank == 0,
            },
        )
    if params.backend != "c10d" or params.get("store_type", "tcp") != "tcp":
        import torch.distributed.elastic.rendezvous.registry as registry

        handler = registry.get_rendezvous_handler(params)
        return Rendezvous(handler, node_rank=node_rank) if isinstance(handler, DynamicRendezvousHandler) else handler
    if params.max_nodes == 1:
        backend, store, fixed = _alone(params, fixed)
    else:
        backend, store = _together(params)
    return Rendezvous(create_handler(store, backend, params), node_rank=node_rank, fixed=fixed)


def _alone(
    params: RendezvousParameters, fixed: tuple[str, int] | None
) -> tuple[c10d.C10dRendezvousBackend, Store, tuple[str, int] | None]:
    """Holds the store of a job of one node: where the user says if nobody else is there, else at a free port."""
    params.config["is_host"] = True
    try:
        return *c10d.create_backend(params), fixed
    except RendezvousConnectionError as error:
        logger.warning(
            "%s is in use (%s); this job of one node takes a free port instead", params.endpoint, _why(error)
        )
    params.endpoint = "localhost:0"
    return *c10d.create_backend(params), None


def _together(params: RendezvousParameters) -> tuple[c10d.C10dRendezvousBackend, Store]:
    endpoint = params.endpoint
    try:
        backend, store = c10d.create_backend(params)
    except RendezvousConnectionError as error:
        if params.get_as_bool("is_host"):
            raise LaunchError(
                f"cannot hold the store of job {params.run_id!r} at {endpoint}: {_why(error)}. Is another job using "
                "that port? Give this one another, the same on all nodes (--master-port or --rdzv-endpoint)"
            ) from error
        raise LaunchError(
            f"cannot reach the store of job {params.run_id!r} at {endpoint}: {_why(error)}. Has its node been started, "
            "and may this one connect to it?"
        ) from error
    owner = store.compare_set("torchext/job", "", params.run_id).decode()
    if owner != params.run_id:
        raise LaunchError(
            f"the store at {endpoint} is held by job {owner!r} and will end with it; give job {params.run_id!r} "
            "another port, the same on all its nodes (--rdzv-endpoint)"
        )
    return backend, store


def _why(error: BaseException) -> str:
    """The reason in the words of the store, without the C++ stack that torch may add."""
    cause = error.__cause__
    words = str(cause if isinstance(cause, (DistError, OSError, ValueError, RuntimeError)) else error)
    return words.split(os.linesep)[0].split(" port: ")[0].rstrip(".")
