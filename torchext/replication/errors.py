"""What can go wrong in replication."""

from __future__ import annotations

from collections.abc import Sequence


class ReplicationError(RuntimeError):
    """The base of what `torchext.replication` raises for reasons of its own."""


class ConfigError(ReplicationError):
    """The description of the sites is wrong; the message says where."""


class PredicateError(ReplicationError, ValueError):
    """A predicate is refused.

    Attributes:
        text: The predicate.
        column: Where in it, from 1.
        reason: What is wrong there.
    """

    def __init__(self, text: str, column: int, reason: str) -> None:
        line = "".join(" " if c.isspace() else c for c in text)
        super().__init__(f"column {column}: {reason}\n  {line}\n  {' ' * (column - 1)}^")
        self.text = text
        self.column = column
        self.reason = reason

    def __reduce__(self) -> tuple[type[PredicateError], tuple[str, int, str]]:
        return type(self), (self.text, self.column, self.reason)


class StabilityTimeoutError(ReplicationError, TimeoutError):
    """A message did not become stable in time.

    Attributes:
        sites: Those that are behind.
    """

    def __init__(self, message: str, sites: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.sites = tuple(sites)

    def __reduce__(self) -> tuple[type[StabilityTimeoutError], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.sites)


class StoreError(ReplicationError):
    """A site's log cannot be used, or holds what it should not; the message names the file."""


class StoreFullError(StoreError):
    """There is no room for a message, on the disk or within ``max_log_bytes``; nothing of it was taken."""


class DivergedError(ReplicationError):
    """Another site holds something else, or more, under this site's name than this site does."""


class ClosedError(ReplicationError):
    """The node was closed."""
