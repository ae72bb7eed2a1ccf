"""The time of a queue."""

from __future__ import annotations

import time


class Clock:
    """Seconds since 1970 that never go back or jump: not when the system's clock is set, nor over a restart.

    Args:
        not_before_s: The latest time of an earlier life.
    """

    def __init__(self, not_before_s: float = 0.0) -> None:
        self._base_s = max(time.time(), not_before_s) - time.monotonic()

    def now_s(self) -> float:
        """Returns the time."""
        return self._base_s + time.monotonic()
