"""What a standby holds of each training job."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchext.standby.book import Book
from torchext.standby.images import Budget, Images

if TYPE_CHECKING:
    from torchext.standby.persist import Persister
    from torchext.standby.session import Session


@dataclass
class Rank:
    """What the standby has of one rank of a job.

    Attributes:
        images: Its two images.
        busy: Held while an image is written or read out; by the training process through `hold`.
        wanted_since: When the training process began to wait for a reader, of `time.monotonic`.
        session: The connection of the process that owns the rank, while there is one.
        stats: For `status`.
        released: The last output that a process of this rank has let out (see ``commit_outputs``).
    """

    images: Images
    busy: threading.Lock = field(default_factory=threading.Lock)
    wanted_since: float | None = None
    session: Session | None = None
    stats: dict[str, Any] = field(default_factory=lambda: {"commits": 0, "bytes": 0, "published": None, "at": None})
    released: int = -1

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Holds `busy` for the training process: a reader that has it ends soon."""
        self.wanted_since = time.monotonic()
        with self.busy:
            self.wanted_since = None
            yield


class Job:
    """One training job. All fields are guarded by the daemon's condition, but for the images (see `Rank.busy`).

    Attributes:
        finished: Ranks whose training is over.
        heirs_wanted: Ranks that a warm worker is to take over, since one of the job was lost.
        num_counted: How many steps have come to count.
        persister: Writes some of them to disk, if one of the processes has asked for it.
    """

    def __init__(self, name: str, world_size: int, budget: Budget) -> None:
        self.name = name
        self.world_size = world_size
        self.book = Book(world_size)
        self.ranks = [Rank(Images(budget)) for _ in range(world_size)]
        self.finished: set[int] = set()
        self.heirs_wanted: set[int] = set()
        self.num_counted = 0
        self.persister: Persister | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the training is over."""
        return len(self.finished) == self.world_size

    def close(self) -> None:
        """Frees the memory, once nobody reads or writes it; do not hold the daemon's condition."""
        if self.persister is not None:
            self.persister.close()
        for rank in self.ranks:
            with rank.busy:
                rank.images.close()

    def progress(self) -> str:
        """How far its ranks are, for messages."""
        newest = [self.book.newest(rank) for rank in range(self.world_size)]
        return ", ".join(
            f"rank {rank} has {'nothing' if record is None else f'step {record.step}'}"
            for rank, record in enumerate(newest)
        )
