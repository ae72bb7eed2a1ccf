"""Options come from arguments, else from the environment, else from defaults; all are checked."""

from __future__ import annotations

import dataclasses
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchext
from tests import leaks
from tests.ranks import Rank, run_ranks, start_ranks
from torchext.collectives import CollectiveError, Options


def test_the_defaults_are_as_documented() -> None:
    assert dataclasses.asdict(Options()) == {
        "engine": "auto",
        "on_deadlock": "raise",
        "patience": 80,
        "chunk_bytes": 131072,
        "arena_bytes": None,
        "strict": False,
    }


def test_the_environment_gives_what_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHEXT_DFCCL_ON_DEADLOCK", "defer")
    monkeypatch.setenv("TORCHEXT_DFCCL_ARENA_BYTES", "256M")
    monkeypatch.setenv("TORCHEXT_DFCCL_CHUNK_BYTES", "64k")
    monkeypatch.setenv("TORCHEXT_DFCCL_STRICT", "Yes")
    monkeypatch.setenv("TORCHEXT_DFCCL_PATIENCE", "")
    options = Options(on_deadlock="raise")
    assert options.on_deadlock == "raise"
    assert options.arena_bytes == 256 << 20
    assert options.chunk_bytes == 64 << 10
    assert options.strict is True
    assert options.patience == 80


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine", "nccl"),
        ("on_deadlock", "ignore"),
        ("patience", 0),
        ("patience", 1.5),
        ("chunk_bytes", 5000),
        ("arena_bytes", 1000),
        ("strict", "yes"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {value!r}"):
        Options(**{name: value})


@pytest.mark.parametrize(("name", "text"), [("PATIENCE", "many"), ("STRICT", "maybe"), ("ARENA_BYTES", "64X")])
def test_a_wrong_environment_variable_is_named(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TORCHEXT_DFCCL_{name}", text)
    with pytest.raises(ValueError, match=f"TORCHEXT_DFCCL_{name} must be .*, got '{text}'"):
        Options()


def test_options_of_two_ranks_are_compared() -> None:
    there = dataclasses.asdict(Options(strict=True))
    Options(strict=True).require_equal(there, 0)
    with pytest.raises(CollectiveError, match="strict is False here and True there"):
        Options().require_equal(there, 0)


def strict(rank: Rank) -> None:
    x, y = torch.ones(3), torch.ones(3)
    if rank.rank == 0:
        work = dist.all_reduce(x, async_op=True)  # in flight until the other has called it too
        with pytest.raises(ValueError, match=r"all_reduce\(sum, float32, shape \(3,\)\) is in flight already.*tag"):
            dist.all_reduce(y, async_op=True)
        with torchext.tag("y"):
            other = dist.all_reduce(y, async_op=True)
        dist.barrier()
    else:
        dist.barrier()
        work = dist.all_reduce(x, async_op=True)
        with torchext.tag("y"):
            other = dist.all_reduce(y, async_op=True)
    work.wait()
    other.wait()
    assert x[0] == y[0] == 2


def differ(rank: Rank) -> str:
    with pytest.raises(CollectiveError, match="options differ from those of rank 0: patience is 7 here and 80 there"):
        dist.init_process_group(
            "dfccl",
            store=rank.store,
            rank=rank.rank,
            world_size=2,
            timeout=timedelta(seconds=20),
            pg_options=Options(patience=7) if rank.rank else Options(),
        )
    return "told"


def small_arena(rank: Rank) -> dict[str, int]:
    """More in flight than fits into the smallest arena, in small chunks: it takes turns."""
    xs = [torch.full((200_000,), float(i)) for i in range(12)]
    works = []
    for i in range(12) if rank.rank == 0 else reversed(range(12)):
        with torchext.tag(str(i)):
            works.append(dist.all_reduce(xs[i], async_op=True))
    for work in works:
        work.wait()
    assert all(bool((x == 2 * i).all()) for i, x in enumerate(xs))
    found: dict[str, int] = dist.group.WORLD.stats()  # type: ignore[union-attr]
    return found


def more_than_fits(rank: Rank) -> int:
    """Rank 1 has made its calls when rank 0 makes them, and is stopped: no staging memory is given back."""
    xs = [torch.full((80_000,), float(i)) for i in range(40)]
    if rank.rank == 0:
        rank.wait_for("stopped")
    works = []
    for i, x in enumerate(xs):
        with torchext.tag(str(i)):
            works.append(dist.all_reduce(x, async_op=True))
    rank.announce("issued")
    while rank.rank == 0 and dist.group.WORLD.stats()["grants_deferred"] == 0:  # type: ignore[union-attr]
        works[-1].is_completed()
    rank.announce("deferred")
    for work in works:
        work.wait()
    assert all(bool((x == 2 * i).all()) for i, x in enumerate(xs))
    deferred: int = dist.group.WORLD.stats()["grants_deferred"]  # type: ignore[union-attr]
    return deferred


def test_strict_refuses_a_second_call_that_nothing_tells_from_one_in_flight() -> None:
    run_ranks(strict, 2, backend="dfccl", env={"TORCHEXT_DFCCL_STRICT": "1"})


def test_ranks_whose_options_differ_are_told_both_values() -> None:
    with start_ranks(differ, 2, store="tcp", deadline_s=60) as ranks:
        outcomes = ranks.wait()
    assert outcomes[1].value == "told", str(outcomes[1])
    assert outcomes[0].kind == "raised" or outcomes[0].value == "told"


def test_arena_and_chunk_sizes_change_how_much_moves_at_once() -> None:
    env = {"TORCHEXT_DFCCL_ARENA_BYTES": "1M", "TORCHEXT_DFCCL_CHUNK_BYTES": "4K"}
    small = run_ranks(small_arena, 2, backend="dfccl", env=env)
    usual = run_ranks(small_arena, 2, backend="dfccl")
    assert small[0]["primitives"] > 4 * usual[0]["primitives"]


def test_calls_that_find_no_staging_memory_wait_for_it() -> None:
    env = {"TORCHEXT_DFCCL_ARENA_BYTES": "1M", "TORCHEXT_DFCCL_CHUNK_BYTES": "4K"}
    with start_ranks(more_than_fits, 2, backend="dfccl", env=env, deadline_s=60) as ranks:
        ranks.wait_for(1, "issued")
        ranks.kill(1, signal.SIGSTOP)
        while leaks.state(ranks.pids[1]) != "T":
            os.sched_yield()
        ranks.release("stopped")
        ranks.wait_for(0, "deferred")
        ranks.kill(1, signal.SIGCONT)
        assert ranks.values()[0] > 0
