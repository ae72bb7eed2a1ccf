from __future__ import annotations

import sys

import pytest

from torchext._optional import require_native


def test_a_core_that_is_there_is_no_error() -> None:
    require_native()
    from torchext import _native

    assert int(_native.build_info()["standard"]) >= 202002


def test_without_the_core_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchext._native", None)  # as if it could not be imported
    with pytest.raises(ImportError, match=r"lacks .*install a C\+\+20 compiler .* pip install -e"):
        require_native()
