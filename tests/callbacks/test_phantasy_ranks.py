"""Lightning jobs of two ranks that are killed at random points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.lightning_ranks import train
from tests.ranks import run_ranks
from tests.standby.sharded import be_killed

pytestmark = pytest.mark.timeout(300)


def test_ddp_killed_at_random_points_ends_as_if_undisturbed(standby: Any, tmp_path: Path) -> None:
    run_ranks(be_killed, 1, str(tmp_path), train, "ddp", "lag1", standby[1], 2, 0, deadline_s=240)
