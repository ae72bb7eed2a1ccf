"""The example hangs on gloo, within its deadline, and ends on dfccl."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "deadlock.py"


@pytest.mark.slow  # for its deadline and eight processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_it_hangs_on_gloo_and_ends_on_dfccl(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command = [sys.executable, str(EXAMPLE), "--deadline-s", "5", "--trace", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    gloo, dfccl = done.stdout.splitlines()
    assert gloo == "gloo:  no rank has finished after 5 s: they wait for each other"
    assert re.fullmatch(r"dfccl: 4 of 4 ranks finished with the right values; a step takes \d+ us", dfccl)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert "all_reduce(sum, float32, shape (1024,))" in names
    assert list(tmp_path.iterdir()) == [trace]
