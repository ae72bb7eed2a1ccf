"""Importing torchext registers the backend and loads nothing of it; without the native core, its use says so."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

import torchext
from torchext.collectives import Options, world

PROGRAM = """
import sys
import torch.distributed as dist
import torchext
assert dist.is_backend_available("dfccl")
assert dist.Backend.DFCCL == "dfccl"
assert "torchext._native" not in sys.modules
assert "torchext.collectives" not in sys.modules
with torchext.tag("name"):
    pass
"""


def test_importing_torchext_registers_the_backend_and_loads_nothing_of_it() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


def test_without_the_native_core_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchext._native", None)
    with pytest.raises(ImportError, match=r"C\+\+20 compiler"):
        world.meet(dist.HashStore(), 0, [0], timedelta(seconds=5), Options())


def test_a_tag_that_is_no_text_is_refused_where_it_is_given() -> None:
    with pytest.raises(TypeError, match="tag: the name must be a string, got 3"), torchext.tag(3):  # type: ignore[arg-type]
        pass
