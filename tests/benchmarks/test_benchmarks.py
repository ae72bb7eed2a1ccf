"""The benchmarks run to their end, few rounds of them, whose times mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def _run(*words: str | Path) -> str:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=100).stdout


def test_loss_reports_each_contender_and_what_it_was_run_with(tmp_path: Path) -> None:
    printed = _run(HERE / "loss.py", "--rounds", "2", "--shape", "32", "96", "7", "--json", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    losses = [row["loss"] for row in report["rows"]]
    assert losses[:4] == ["MSE", "two transforms", "torchext", "torchext, masked"]
    assert all(loss in printed for loss in losses)
    assert {"torch", "python", "commit"} <= set(report["versions"])


def test_import_time_reports_each_module() -> None:
    printed = _run(HERE / "import_time.py", "--rounds", "1", "--modules", "torchext", "torchext.losses")
    assert "import torchext " in printed
    assert "import torchext.losses" in printed
