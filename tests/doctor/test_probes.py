from __future__ import annotations

import importlib.metadata
import os
import re
import stat
import sys
from pathlib import Path

import pytest
import torch

from torchext.doctor import Finding, default_probes, examine, probes


@pytest.fixture(scope="module")
def findings() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(default_probes())}


def test_each_row_says_what_it_is_for_and_how_to_get_what_lacks(findings: dict[str, Finding]) -> None:
    assert len(findings) == len(default_probes())  # no name twice
    for finding in findings.values():
        assert finding.detail
        assert finding.enables
        assert finding.ok or finding.remedy
        assert "could not be tried" not in finding.detail


def test_what_torchext_requires_is_found(findings: dict[str, Finding]) -> None:
    assert findings["python"].detail == ".".join(map(str, sys.version_info[:3]))
    assert findings["torch"].detail == torch.__version__
    assert findings["numpy"].ok
    assert findings["einops"].ok


def test_the_extras_that_remedies_name_exist() -> None:
    provided = set(importlib.metadata.metadata("torchext").get_all("Provides-Extra") or [])
    named = {extra for probe in default_probes() for extra in re.findall(r"extra: (\w+)", probe.remedy)}
    assert named
    assert named <= provided


def test_a_native_core_that_lacks_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchext._native", None)  # as if it could not be imported
    finding = _examine("torchext._native")
    assert not finding.ok
    assert "g++" in finding.remedy


def test_rdma_devices_are_listed_with_the_state_of_their_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_INFINIBAND", tmp_path)
    assert "is empty" in _examine("RDMA devices").detail
    for port, state in (("1", "4: ACTIVE\n"), ("2", "1: DOWN\n")):
        (tmp_path / "mlx5_0" / "ports" / port).mkdir(parents=True)
        (tmp_path / "mlx5_0" / "ports" / port / "state").write_text(state)
    (tmp_path / "rxe0").mkdir()
    assert _examine("RDMA devices").detail == "mlx5_0: port 1 active, port 2 down; rxe0: no ports"


def test_slurm_is_found_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _program(tmp_path / "sinfo", "echo slurm 24.05")
    assert _examine("Slurm").detail == "not on PATH: sbatch"
    _program(tmp_path / "sbatch", "exit 1")
    assert _examine("Slurm").detail == f"slurm 24.05 ({tmp_path})"
    _program(tmp_path / "sinfo", "echo 'sinfo: error: first'; echo 'sinfo: fatal: no configuration' >&2; exit 1")
    assert _examine("Slurm").detail == "sinfo does not work: fatal: no configuration"
    _program(tmp_path / "sinfo", "exit 3")
    assert _examine("Slurm").detail == "sinfo does not work: it ended with status 3"


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert _examine("GPUs").detail == "card 0, card 1 (CUDA 13.0)"


@pytest.mark.gpu
def test_a_real_gpu_is_named(findings: dict[str, Finding]) -> None:
    assert torch.cuda.get_device_name(0) in findings["GPUs"].detail


@pytest.mark.rdma
def test_real_rdma_devices_are_listed(findings: dict[str, Finding]) -> None:
    assert all(name in findings["RDMA devices"].detail for name in os.listdir("/sys/class/infiniband"))


def _examine(name: str) -> Finding:
    (finding,) = examine(probe for probe in default_probes() if probe.name == name)
    return finding


def _program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
