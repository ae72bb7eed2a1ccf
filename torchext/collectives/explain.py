"""What each rank waits for right now."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from torchext.collectives.world import World, worlds


def explain() -> str:
    """Says in words what each rank of this process's "dfccl" groups waits for, and what this rank has in flight.

    From any thread and from signal handlers, also while other threads wait in a collective; it asks no other rank
    anything and never blocks. A rank is known to wait once it has done so for a tenth of a second.

    Example:
        >>> print(torchext.collectives.explain())
        ranks [0, 1], seen from rank 0:
          rank 0 has waited 12.0 s for rank 1 in all_reduce(sum, float32, shape (8,)) on group '0' ..., at train.py:31
          rank 1 waits in no collective
          in flight here for 12.0 s: all_reduce(sum, float32, shape (8,)), which needs rank 1
    """
    return "\n".join(_explain(world) for world in worlds()) or 'this process is in no "dfccl" group'


def explain_on_signal(signum: int = signal.SIGUSR1) -> None:
    """Has `explain` written to standard error whenever the signal comes, as after ``kill -USR1 PID``.

    Nothing is installed unless this is called, or the environment variable ``TORCHEXT_DFCCL_EXPLAIN_ON_SIGUSR1`` is 1
    when a process group is made in the main thread. A handler of your own that was there before is called afterwards.

    Raises:
        ValueError: Not called in the main thread, or no such signal.
    """
    before = signal.getsignal(signum)
    if getattr(before, "__name__", "") == _NAME:
        return

    def handle(number: int, frame: FrameType | None) -> None:
        sys.stderr.write(explain() + "\n")
        sys.stderr.flush()
        if callable(before):
            before(number, frame)

    handle.__name__ = _NAME
    signal.signal(signum, handle)


_NAME = "torchext_explain"


def _explain(world: World) -> str:
    def names(ranks: list[int]) -> str:
        return ", ".join(f"rank {world.ranks[p]}" for p in ranks) or "nobody: it is under way"

    me = world.engine.rank
    lines = [f"ranks {list(world.ranks)}, seen from rank {world.ranks[me]}:"]
    for p, (gone, _, calls) in enumerate(world.engine.reports()):
        for seconds, ranks, text in calls:
            lines.append(f"  rank {world.ranks[p]} has waited {seconds:.1f} s for {names(ranks)} in {text}")
        if not calls:
            lines.append(f"  rank {world.ranks[p]} {'has left or died' if gone else 'waits in no collective'}")
    for seconds, ranks, text in world.engine.pending():
        lines.append(f"  in flight here for {seconds:.1f} s: {text}, which needs {names(ranks)}")
    return "\n".join(lines)
