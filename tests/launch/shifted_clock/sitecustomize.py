"""Lets the clock of a program jump: for those that find this folder on PYTHONPATH.

The file named by TORCHEXT_TEST_CLOCK holds by how many seconds the clock is off, and may change at any time. The clocks
that nobody can set stay as they are.
"""

from __future__ import annotations

import datetime
import os
import time

_real = time.time


def _shifted() -> float:
    try:
        with open(os.environ["TORCHEXT_TEST_CLOCK"]) as file:
            return _real() + float(file.read() or 0)
    except (KeyError, FileNotFoundError):
        return _real()


class _Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Shifted:
        return cls.fromtimestamp(_shifted(), tz)

    @classmethod
    def utcnow(cls) -> _Shifted:
        return cls.fromtimestamp(_shifted(), datetime.timezone.utc).replace(tzinfo=None)


time.time = _shifted
datetime.datetime = _Shifted  # type: ignore[misc]
