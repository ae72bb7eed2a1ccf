"""Where the recorded traces are, which the repository does not contain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def recorded(name: str) -> Path:
    """Finds a file in $TORCHEXT_DATA, or in shared/data beside the checkout; skips the test that lacks it."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    path = Path(os.environ.get("TORCHEXT_DATA", beside)) / name
    if not path.exists():
        pytest.skip(f"needs {name} in the folder that TORCHEXT_DATA names, or in ../shared/data")
    return path
