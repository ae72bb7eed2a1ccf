"""What each rank waits for right now."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from torchext.collectives.order import current_sequencer
from torchext.collectives.world import worlds


def explain() -> str:
    """Says in words what each rank of this process's "dfccl" groups waits for, and what this rank has in flight.

    From any thread and from signal handlers, also while other threads wait in a collective; it asks no other rank
    anything and never blocks. A rank is known to wait once it has done so for a tenth of a second. Of the ordered
    engine, it tells of the time until a collective is launched on the inner group.

    Example:
        >>> print(torchext.collectives.explain())
        ranks [0, 1], seen from rank 0:
          rank 0 has waited 12.0 s for rank 1 in all_reduce(sum, float32, shape (8,)) on group '0' ..., at train.py:31
          rank 1 waits in no collective
          in flight here for 12.0 s: all_reduce(sum, float32, shape (8,)), which needs rank 1
    """
    parts = [_explain(world.ranks[world.engine.rank], world.reports(), world.pending()) for world in worlds()]
    sequencer = current_sequencer()
    if sequencer is not None:
        parts.append(_explain(sequencer.rank, sequencer.native.reports(), sequencer.native.pending()))
    return "\n".join(parts) or 'this process is in no "dfccl" group'


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


def _explain(
    me: int,
    reports: Sequence[tuple[int, bool, Sequence[tuple[float, Sequence[int], str]]]],
    pending: Sequence[tuple[float, Sequence[int], str]],
) -> str:
    def names(ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank}" for rank in ranks) or "nobody: it is under way"

    lines = [f"ranks {[rank for rank, _, _ in reports]}, seen from rank {me}:"]
    for rank, gone, calls in reports:
        for seconds, ranks, text in calls:
            lines.append(f"  rank {rank} has waited {seconds:.1f} s for {names(ranks)} in {text}")
        if not calls:
            lines.append(f"  rank {rank} {'has left or died' if gone else 'waits in no collective'}")
    for seconds, ranks, text in pending:
        lines.append(f"  in flight here for {seconds:.1f} s: {text}, which needs {names(ranks)}")
    return "\n".join(lines)
