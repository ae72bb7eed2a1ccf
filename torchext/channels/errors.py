"""What can go wrong with a channel."""

from __future__ import annotations

import os
from typing import Any


class ChannelError(RuntimeError):
    """Something about a channel or broadcast failed."""


class ChannelClosed(ChannelError):
    """The channel has ended: it was closed, or nobody is left at its other end."""


class ChannelFull(ChannelError):
    """There is no room, and the policy is "error"."""


class ChannelTimeout(ChannelError, TimeoutError):
    """What was waited for did not come in time; the message says what was missing."""


class PeerDied(ChannelError):
    """A process at the channel ended without leaving it first. The channel itself goes on.

    Attributes:
        name: What its sender or receiver was called.
        pid: Its process.
        exitcode: As `multiprocessing.Process.exitcode`, negative for a signal; None where the kernel does not tell
            (before Linux 6.15, of a process that another one has already waited for).
        more: Further deaths learnt of at the same time, as exceptions of this class.
    """

    def __init__(self, name: str, pid: int, exitcode: int | None, more: tuple[PeerDied, ...] = ()) -> None:
        code = "with an unknown exit code" if exitcode is None else f"with exit code {exitcode}"
        also = "".join(f"; {death}" for death in more)
        super().__init__(f"{name} (process {pid}) died {code}{also}")
        self.name = name
        self.pid = pid
        self.exitcode = exitcode
        self.more = more

    def __reduce__(self) -> tuple[type[PeerDied], tuple[Any, ...]]:
        return type(self), (self.name, self.pid, self.exitcode, self.more)


def peer_died(deaths: list[tuple[str, int, int, int]]) -> PeerDied:
    """One error for what the native core reports: name, process, role and wait status (-1 if unknown) of each."""
    errors = [
        PeerDied(name, pid, None if status == -1 else os.waitstatus_to_exitcode(status))
        for name, pid, _, status in deaths
    ]
    first = errors[0]
    return PeerDied(first.name, first.pid, first.exitcode, tuple(errors[1:])) if len(errors) > 1 else first
