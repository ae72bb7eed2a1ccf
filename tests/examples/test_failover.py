"""The example's disturbed run ends with the losses of the undisturbed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchext._native", reason="the native core was not built")

EXAMPLE = Path(__file__).parents[2] / "examples" / "failover.py"


@pytest.mark.slow  # for its six processes that load torch
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_two_curves_are_one() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout.count("killed in step") == 3
    assert done.stdout.endswith("all 60 losses are equal, bit for bit\n")
