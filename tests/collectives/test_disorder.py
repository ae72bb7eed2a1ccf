"""Programs that issue collectives in a different order on each rank, asynchronously, end with the right values."""

from __future__ import annotations

import pytest

from tests.collectives.fuzz import run_programs
from tests.ranks import run_ranks


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_programs_end_with_the_values_of_the_model(world_size: int, request: pytest.FixtureRequest) -> None:
    seed = 1_000_000 * request.config.getoption("--seed")
    results = run_ranks(run_programs, world_size, seed, 100, 30.0, backend="dfccl", deadline_s=100)
    assert sum(stats["issued"] for stats in results) > 100 * world_size
    assert all(stats["staged"] for stats in results)
