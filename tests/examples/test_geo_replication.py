"""The example trains across three sites, one of which dies, and restores its last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "geo_replication.py"


@pytest.mark.slow  # half a minute, and four processes that import torch
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_it_goes_on_without_a_site_and_restores(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--plot", str(tmp_path / "plot.png")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=env)
    assert done.stdout.splitlines()[-1] == "restored from what all sites hold: step 200"
    events = ["tokyo is killed", "safe: a majority", "tokyo is back", "safe: all sites"]
    assert [line for line in done.stdout.splitlines() if line in events] == events
    assert (tmp_path / "plot.png").stat().st_size > 10_000
