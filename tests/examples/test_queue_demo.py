"""The example ends with all jobs done and a picture."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "queue_demo.py"


@pytest.mark.slow
@pytest.mark.timeout(390)
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_all_jobs_get_done_though_one_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--jobs", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    all_done, order, _ = done.stdout.splitlines()[-3:]
    assert re.fullmatch(r"all 3 jobs are done; linear-\d was killed once and started anew", all_done)
    assert sorted(order.split()[-3:]) == ["linear-1", "linear-2", "linear-3"]
    assert (tmp_path / "gantt.png").stat().st_size > 5000
