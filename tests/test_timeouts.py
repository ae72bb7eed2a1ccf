"""No test can hang the suite, wherever it is stuck: tried in pytest runs of their own with this project's settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

STUCK_IN_PYTHON = """
import threading

def test_stuck():
    threading.Event().wait()

def test_next():
    pass
"""

# A lock taken twice: no signal ends the wait. PyDLL keeps Python's lock meanwhile, so no thread of Python runs either.
STUCK_IN_NATIVE_CODE = """
import ctypes

def test_stuck():
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
"""


def _run(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    return subprocess.run(
        [*command, *options, "--rootdir", str(folder), str(folder / "test_it.py")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_test_stuck_in_python_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    result = _run(tmp_path, STUCK_IN_PYTHON, "--timeout=1")
    assert "1 failed, 1 passed" in result.stdout
    assert "Timeout" in result.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where a mutex may start as zeros")
def test_a_test_stuck_in_native_code_ends_the_run_and_shows_where(tmp_path: Path) -> None:
    result = _run(tmp_path, STUCK_IN_NATIVE_CODE, "--timeout=1", "-o", "faulthandler_timeout=3")
    assert result.returncode == 1
    assert "in test_stuck" in result.stderr
