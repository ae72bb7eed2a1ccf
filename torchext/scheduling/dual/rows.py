"""Rows of tables for jobs that come and go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from torchext.scheduling.types import Job

_ID = attrgetter("id")
_FEWEST = 256


class Rows:
    """Numbers known jobs, from 0; a number that has been given back is used again, so that tables stay small.

    Attributes:
        capacity: Tables need so many rows; it only grows.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._of: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._of

    def get(self, job_id: str) -> int:
        """Returns the row of a job, or -1 if it is not known."""
        return self._of.get(job_id, -1)

    def of(self, jobs: Sequence[Job]) -> np.ndarray:
        """Returns the rows of known jobs, (Q,) int64.

        Raises:
            KeyError: One is not known.
        """
        return np.fromiter(map(self._of.__getitem__, map(_ID, jobs)), dtype=np.int64, count=len(jobs))

    def all(self) -> np.ndarray:
        """Returns the rows of all known jobs, int64."""
        return np.fromiter(self._of.values(), dtype=np.int64, count=len(self._of))

    def add(self, job_id: str) -> int:
        """Gives a row to a job that is not known."""
        if not self._free:
            more = max(self.capacity, _FEWEST)
            self._free = list(range(self.capacity + more - 1, self.capacity - 1, -1))
            self.capacity += more
        row = self._of[job_id] = self._free.pop()
        return row

    def forget(self, job_ids: Iterable[str]) -> None:
        """Takes the rows of jobs back, of those that are known."""
        for job_id in job_ids:
            row = self._of.pop(job_id, None)
            if row is not None:
                self._free.append(row)


def grown(table: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns the table, longer if it has fewer rows; new ones are 0."""
    if len(table) >= num_rows:
        return table
    return np.concatenate([table, np.zeros((num_rows - len(table), *table.shape[1:]), dtype=table.dtype)])
