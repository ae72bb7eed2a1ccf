"""Types of the C++ core. It is absent where no C++20 compiler was at hand at installation."""

from collections.abc import Callable, Sequence
from typing import Any

def build_info() -> dict[str, str]:
    """Says how this core was built.

    Returns:
        ``compiler``, ``standard`` (value of ``__cplusplus``), ``flags`` (what torchext adds to Python's own),
        ``pybind11``, ``python`` (version of the headers) and ``assertions`` (``on`` or ``off``).
    """

class collectives:  # a submodule
    """The engine of torchext.collectives; Linux only."""

    class Arena:
        """Shared memory of one world."""

        @staticmethod
        def create(
            world_size: int, ring_bytes: int, pool_bytes: int, chunk_bytes: int, nonce: int
        ) -> collectives.Arena: ...
        @staticmethod
        def attach(pid: int, descriptor: int, nonce: int) -> collectives.Arena: ...
        @property
        def descriptor(self) -> int: ...
        def close_descriptor(self) -> None: ...

    class Group:
        """The members of one process group."""

    class Call:
        """One collective that was issued."""

        @property
        def id(self) -> int: ...
        @property
        def text(self) -> str: ...
        @property
        def code(self) -> int: ...
        @property
        def error(self) -> str: ...
        @property
        def culprits(self) -> list[int]: ...
        @property
        def elapsed_s(self) -> float: ...
        def done(self) -> bool: ...
        def wait(self, timeout_s: float, deferrable: bool) -> int: ...

    class World:
        """The engine of this rank; sizes in bytes, codes as in csrc/collectives/signature.hpp."""

        def __init__(
            self, arena: collectives.Arena, rank: int, patience: int, defer: bool, strict: bool, names: list[int]
        ) -> None: ...
        def meet(self, timeout_s: float, failed: Callable[[], bool]) -> list[int]: ...
        def group(self, ranks: Sequence[int], uid: int) -> collectives.Group: ...
        def issue(
            self,
            group: collectives.Group,
            kind: int,
            reduce_op: int,
            dtype: int,
            item_bytes: int,
            root: int,
            peer: int,
            shape: tuple[int, ...],
            identity: tuple[int, ...] | None,
            tag: str,
            inputs: Sequence[tuple[int, int]],
            outputs: Sequence[tuple[int, int]],
            uneven: bool,
            timeout_s: float,
            keepalive: object,
        ) -> collectives.Call: ...
        def run(
            self,
            group: collectives.Group,
            kind: int,
            reduce_op: int,
            dtype: int,
            item_bytes: int,
            root: int,
            peer: int,
            shape: tuple[int, ...],
            identity: tuple[int, ...] | None,
            tag: str,
            inputs: Sequence[tuple[int, int]],
            outputs: Sequence[tuple[int, int]],
            uneven: bool,
            timeout_s: float,
        ) -> collectives.Call | None: ...
        def run_all_reduce(
            self,
            group: collectives.Group,
            reduce_op: int,
            dtype: int,
            item_bytes: int,
            shape: tuple[int, ...],
            tag: str,
            data: int,
            bytes: int,
            timeout_s: float,
        ) -> collectives.Call | None: ...
        def cancel(self, call: collectives.Call, text: str) -> None: ...
        def abort(self, group_uid: int, text: str) -> None: ...
        def close(self, text: str) -> None: ...
        def finished(self, timeout_s: float) -> list[int]: ...
        def watch(self, call: collectives.Call) -> bool: ...
        def set_look(self, function: Callable[[int, list[int], list[tuple[int, int]]], tuple[str, bool]]) -> None: ...
        def reports(self) -> list[tuple[bool, bool, list[tuple[float, list[int], str]]]]: ...
        def pending(self) -> list[tuple[float, list[int], str]]: ...
        def unanswered(self) -> list[tuple[int, str]]: ...
        def stats(self) -> dict[str, int]: ...
        def closed(self) -> bool: ...
        def release(self) -> None: ...
        @property
        def rank(self) -> int: ...
        @property
        def eager_bytes(self) -> int: ...

    class OrderGroup:
        """The links of one ordered group."""

        @staticmethod
        def over_memory(
            ranks: Sequence[int], me: int, arena: collectives.Arena, pids: Sequence[int], doorbells: Sequence[int]
        ) -> collectives.OrderGroup: ...
        @staticmethod
        def over_sockets(ranks: Sequence[int], me: int, sockets: Sequence[int]) -> collectives.OrderGroup: ...
        @property
        def id(self) -> int: ...

    class Ordered:
        """One collective that was given to the orderer."""

        @property
        def text(self) -> str: ...
        @property
        def code(self) -> int: ...
        @property
        def error(self) -> str: ...
        @property
        def culprits(self) -> list[int]: ...
        @property
        def elapsed_s(self) -> float: ...
        @property
        def agreed_s(self) -> float: ...

    class Orderer:
        """Puts collectives that all members have issued into one order; codes as in csrc/collectives/signature.hpp."""

        def __init__(self) -> None: ...
        @property
        def doorbell(self) -> int: ...
        def add(self, group: collectives.OrderGroup) -> None: ...
        def issue(
            self,
            group: collectives.OrderGroup,
            kind: int,
            reduce_op: int,
            dtype: int,
            root: int,
            peer: int,
            shape: Sequence[int],
            identity: Sequence[int] | None,
            tag: str,
            members: Sequence[int],
            send_bytes: Sequence[int],
            recv_bytes: Sequence[int],
            timeout_s: float,
            will_wait: bool,
            work: object,
        ) -> collectives.Ordered: ...
        def wait(self, ordered: collectives.Ordered, timeout_s: float) -> bool: ...
        def pop(self) -> tuple[Any, collectives.Ordered] | None: ...
        def background(self) -> bool: ...
        def stop_background(self) -> None: ...
        def fallen(self) -> list[tuple[int, int]]: ...
        def cancel(self, ordered: collectives.Ordered, text: str) -> None: ...
        def leave(self, group: collectives.OrderGroup, text: str, aborted: bool) -> None: ...
        def forget(self) -> None: ...
        def counts(self) -> tuple[int, int]: ...
