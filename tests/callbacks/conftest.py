from __future__ import annotations

import sys

import pytest

pytest.importorskip("lightning", reason="Lightning is not installed (pip install 'torchext[lightning]')")
pytest.importorskip("torchext._native", reason="the native core was not built")
if sys.platform != "linux":
    pytest.skip("torchext.standby needs Linux", allow_module_level=True)

from tests.standby.conftest import _token, daemon, standby

__all__ = ["_token", "daemon", "standby"]
