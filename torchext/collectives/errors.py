"""What can go wrong in a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


class CollectiveError(dist.DistBackendError):
    """A collective of the "dfccl" backend failed; a `RuntimeError`, as with torch's own backends.

    Attributes:
        ranks: Global ranks that are the cause as far as it is known, such as those that are missing.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type[CollectiveError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class CollectiveTimeoutError(CollectiveError):
    """Some member did not join, or did not go on, within the timeout."""


class PeerLostError(CollectiveError):
    """A member died, or left the group, before it had done its part."""


class CollectiveMismatchError(CollectiveError):
    """The members' calls do not fit together: they differ in operation, dtype, shape, root or splits."""


class DeadlockError(CollectiveError):
    """Ranks block in a circle, each in a call that another of them would make only later."""


class CollectiveAbortedError(CollectiveError):
    """The process group was aborted or destroyed, here or by a member, while the collective was in flight."""
