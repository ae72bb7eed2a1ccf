"""The benchmarks run to their end, few rounds of them, whose times mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import wan

HERE = Path(__file__).parent


def _run(*words: str | Path) -> str:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=200).stdout


def test_loss_reports_each_contender_and_what_it_was_run_with(tmp_path: Path) -> None:
    printed = _run(HERE / "loss.py", "--rounds", "2", "--shape", "32", "96", "7", "--json", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    losses = [row["loss"] for row in report["rows"]]
    assert losses[:4] == ["MSE", "two transforms", "torchext", "torchext, masked"]
    assert all(loss in printed for loss in losses)
    assert {"torch", "python", "commit"} <= set(report["versions"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_channels_reports_each_contender() -> None:
    printed = _run(HERE / "channels.py", "--sizes", "1024", "--explorers", "2", "--rounds", "1", "--copy")
    assert "1024 B, 2 explorers, 40 messages, copied" in printed
    assert all(f"  {name} " in printed for name in ("torchext", "torch queue", "DataLoader"))
    printed = _run(HERE / "channels.py", "--weights", "--rounds", "2")
    assert "6.7 MB to 4 receivers, torchext: median" in printed


@pytest.mark.slow  # for its processes
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="torchext.standby needs Linux")
def test_standby_reports_each_contender(tmp_path: Path) -> None:
    pytest.importorskip("torchext._native", reason="the native core was not built")
    names = ["nothing", "standby", "standby, rpo0", "only copied", "torch.save", "fork, copy on write"]
    small = ("--rounds", "2", "--steps", "1", "--width", "64", "--layers", "1", "--json", tmp_path / "out.json")
    printed = _run(HERE / "standby.py", *small, "--contenders", *names)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == names
    assert all(name in printed for name in names)
    for workload in ("LoRA", "sparse"):
        _run(HERE / "standby.py", *small, "--workload", workload, "--contenders", "nothing", "standby")
        row = json.loads((tmp_path / "out.json").read_text())["rows"][1]
        assert 0.99 <= row["bytes_per_changed_byte"] <= 1.05
    few = ("--megabytes", "13", "--every", "1", "2", "--rounds", "1", "--json", tmp_path / "out.json")
    _run(HERE / "standby_scaling.py", *few)
    assert [row["every"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]] == [1, 2]


def test_import_time_reports_each_module() -> None:
    printed = _run(HERE / "import_time.py", "--rounds", "1", "--modules", "torchext", "torchext.losses")
    assert "import torchext " in printed
    assert "import torchext.losses" in printed


@pytest.mark.slow  # four programs, each with sites of its own
def test_replication_reports_each_figure() -> None:
    program = ("-m", "tests.benchmarks.replication")
    assert "core, 64 sites, acks" in _run(*program, "predicates", "--rounds", "1")
    assert "change_predicate" in _run(*program, "change")
    assert "majority persisted, alone" in _run(*program, "latency", "--messages", "3")
    assert "to 1, together" in _run(*program, "loopback", "--receivers", "1", "--gib", "0.06", "--rounds", "1")


@pytest.mark.slow  # three hosts, and servers of each peer on each
@pytest.mark.skipif(wan.missing() != "", reason=wan.missing())
def test_replication_wan_reports_each_figure() -> None:
    program = ("-m", "tests.benchmarks.replication_wan")
    assert "persisted from all hosts, mean" in _run(
        *program, "latency", "--sites", "3", "--messages", "3", "--rounds", "1"
    )
    assert "acknowledged, while it is full" in _run(*program, "link", "--mib", "4", "--messages", "3")
    assert "change to a majority" in _run(*program, "switch", "--messages", "3")


def test_dual_compares_contenders_on_the_same_windows(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    trace = HERE.parents[1] / "examples" / "data" / "philly_2017-10-09.csv"
    words = ("--trace", trace, "--cluster", "synthetic:6", "--windows", "2", "--jobs", "20")
    printed = _run(HERE / "dual.py", *words, "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())[trace.name]
    assert {"machine mean, comparative", "RWGP, patient", "oracle*, comparative", "dual", "dual, no sd"} <= set(rows)
    assert all(len(row["jct_h"]) == 2 for row in rows.values())
    assert "JCT against machine mean, comparative" in printed


def test_speeds_times_the_model() -> None:
    printed = _run(HERE / "speeds.py", "--time", "--machines", "30", "--classes", "2")
    assert "'rows': 60.0" in printed
