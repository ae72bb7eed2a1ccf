"""The channels need Linux: memfds, futexes, pidfds."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _linux() -> None:
    if sys.platform != "linux":
        pytest.skip(f"needs Linux, this is {sys.platform}")
