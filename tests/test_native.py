from __future__ import annotations

import sys

from torchext import _native


def test_it_says_how_it_was_built() -> None:
    info = _native.build_info()
    assert set(info) == {"compiler", "standard", "flags", "assertions", "pybind11", "python"}
    assert all(info.values())
    assert int(info["standard"]) >= 202002
    assert info["python"].split(".")[:2] == [str(part) for part in sys.version_info[:2]]


def test_it_is_built_to_run_on_other_machines() -> None:
    assert "-march" not in _native.build_info()["flags"]
