"""Options come from arguments, else from the environment, else from defaults; all are checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

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
