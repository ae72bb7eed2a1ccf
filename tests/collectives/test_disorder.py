"""Random programs that issue collectives in a different order on each rank end as a model says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.collectives import sanitize
from tests.collectives.fuzz import run_programs
from tests.collectives.fuzz_blocking import run_programs as run_blocking
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("engine", "world_size"),
    [("preemptive", 2), ("preemptive", 3), ("preemptive", 4), ("ordered", 2), ("ordered", 4)],
)
def test_random_programs_end_with_the_values_of_the_model(
    engine: str, world_size: int, request: pytest.FixtureRequest
) -> None:
    seed = 1_000_000 * request.config.getoption("--seed")
    num_programs = 100 if engine == "preemptive" else 40  # gloo takes its time
    env = {"TORCHEXT_DFCCL_ENGINE": engine}
    results = run_ranks(run_programs, world_size, seed, num_programs, 30.0, backend="dfccl", env=env, deadline_s=200)
    assert sum(stats["issued"] for stats in results) > num_programs * world_size
    assert all(stats.get("staged", True) for stats in results)


@pytest.mark.parametrize(
    ("world_size", "on_deadlock", "engine"),
    [(3, "raise", "preemptive"), (2, "defer", "preemptive"), (3, "raise", "ordered")],
)
def test_blocking_programs_end_as_the_model_says(
    world_size: int, on_deadlock: str, engine: str, request: pytest.FixtureRequest
) -> None:
    seed = 1_000_000 * request.config.getoption("--seed")
    num_programs = 30 if engine == "preemptive" else 15
    results = run_ranks(run_blocking, world_size, seed, num_programs, on_deadlock, engine, store="tcp", deadline_s=200)
    assert sum(counts["stuck"] for counts in results) > 0 or on_deadlock == "defer"
    assert sum(counts["deferred"] for counts in results) > 0 or on_deadlock == "raise"


@pytest.mark.slow
@pytest.mark.timeout(3100)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ten_thousand_programs_end_with_the_values_of_the_model(world_size: int) -> None:
    run_ranks(run_programs, world_size, 5_000_000, 10_000, 60.0, backend="dfccl", deadline_s=3000)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", sanitize.PROGRAMS)
@pytest.mark.parametrize("sanitizer", sanitize.SANITIZERS)
def test_sanitizers_find_nothing_in_the_core(program: str, sanitizer: str, tmp_path: Path) -> None:
    for tool in ("g++", "setarch"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    try:
        binary = sanitize.build(program, sanitizer, tmp_path)
    except subprocess.CalledProcessError as error:
        if "san" in error.stderr and "cannot find" in error.stderr:
            pytest.skip(f"needs the libraries of -fsanitize={sanitizer}")
        pytest.fail(error.stderr)
    for num_ranks in sanitize.NUM_RANKS:
        try:
            sanitize.run(binary, num_ranks, 20)
        except subprocess.CalledProcessError as error:
            pytest.fail(f"{num_ranks} ranks: {error.stdout}{error.stderr}")
