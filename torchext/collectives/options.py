"""What users and operators may choose about a process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from torchext.collectives.errors import CollectiveError

T = TypeVar("T")

_PREFIX = "TORCHEXT_DFCCL_"
_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _option(name: str, default: T, convert: Callable[[str], Any]) -> T:
    """A field that an environment variable gives where the caller does not."""
    variable = f"{_PREFIX}{name.upper()}"

    def read() -> T:
        text = os.environ.get(variable, "").strip()
        if not text:
            return default
        try:
            value: T = convert(text)
        except (KeyError, ValueError) as error:
            raise ValueError(f"the environment variable {variable} must be {_WORDS[name]}, got {text!r}") from error
        return value

    made: T = field(default_factory=read)
    return made


def _bytes(text: str) -> int:
    """A size such as ``65536``, ``64K``, ``2M`` or ``1G``."""
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1].lower(), 1)
    return int(text if factor == 1 else text[:-1]) * factor


def _truth(text: str) -> bool:
    return _TRUTH[text.lower()]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the "dfccl" groups of a world work: ``dist.init_process_group("dfccl", pg_options=Options(...))``.

    They belong to the default group, or to the first group of a set of ranks, and hold for all groups made within it.
    All ranks must give the same. What is not given comes from the environment variable ``TORCHEXT_DFCCL_`` and the
    name of the option in capitals, say ``TORCHEXT_DFCCL_ON_DEADLOCK=defer``, and otherwise from the default.

    Args:
        engine: ``"preemptive"`` moves CPU tensors between processes of one host through shared memory; ``"ordered"``
            puts the collectives of another backend in order; ``"auto"`` takes the first where it is possible.
        on_deadlock: What becomes of ranks that block in a circle, each in a call that another would make only later.
            ``"raise"``: each gets a `DeadlockError` that tells the whole circle. ``"defer"``: the blocked calls return,
            and the first use of their tensors waits; `torchext.collectives.deferral` says which uses it cannot see.
            The ordered engine always raises.
        patience: Polls in vain after which a collective is preempted, at the least; ranks adapt it (see
            `ProcessGroup`).
        chunk_bytes: The largest piece in which a large collective moves, in multiples of 4096.
        arena_bytes: Shared memory of each rank for large collectives; more in flight than fits there takes turns. None:
            64 MiB, or more for many ranks. Only what is used takes memory.
        strict: Two calls in flight that agree in group, operation, dtype, shape, root and tag raise an error on the
            rank that makes the second. Otherwise they pair in the order of issue.

    Raises:
        ValueError: A value, or an environment variable, makes no sense.
    """

    engine: Literal["auto", "preemptive", "ordered"] = _option("engine", "auto", str)
    on_deadlock: Literal["raise", "defer"] = _option("on_deadlock", "raise", str)
    patience: int = _option("patience", 80, int)
    chunk_bytes: int = _option("chunk_bytes", 128 << 10, _bytes)
    arena_bytes: int | None = _option("arena_bytes", None, _bytes)
    strict: bool = _option("strict", False, _truth)

    def __post_init__(self) -> None:
        right: dict[str, bool] = {
            "engine": self.engine in ("auto", "preemptive", "ordered"),
            "on_deadlock": self.on_deadlock in ("raise", "defer"),
            "patience": _is_int(self.patience) and 1 <= self.patience <= 1_000_000,
            "chunk_bytes": _is_int(self.chunk_bytes) and self.chunk_bytes >= 4096 and self.chunk_bytes % 4096 == 0,
            "arena_bytes": self.arena_bytes is None or (_is_int(self.arena_bytes) and self.arena_bytes >= 1 << 20),
            "strict": isinstance(self.strict, bool),
        }
        for name, ok in right.items():
            if not ok:
                raise ValueError(
                    f"{name} must be {_WORDS[name]}, got {getattr(self, name)!r} (from the argument, or from the "
                    f"environment variable {_PREFIX}{name.upper()})"
                )

    def require_equal(self, other: Mapping[str, Any], rank: int) -> None:
        """Checks that the options of another rank, as a mapping from name to value, are these.

        Raises:
            CollectiveError: They differ.
        """
        differ = [
            f"{f.name} is {getattr(self, f.name)!r} here and {other.get(f.name)!r} there"
            for f in fields(self)
            if getattr(self, f.name) != other.get(f.name)
        ]
        if differ:
            raise CollectiveError(f"its options differ from those of rank {rank}: {'; '.join(differ)}", [rank])


def explains_on_sigusr1() -> bool:
    """Whether the operator has asked for `explain_on_signal` by ``TORCHEXT_DFCCL_EXPLAIN_ON_SIGUSR1``."""
    name = f"{_PREFIX}EXPLAIN_ON_SIGUSR1"
    text = os.environ.get(name, "0").lower()
    if text not in _TRUTH:
        raise ValueError(f"the environment variable {name} must be true or false, got {text!r}")
    return _TRUTH[text]


_WORDS = {
    "engine": '"auto", "preemptive" or "ordered"',
    "on_deadlock": '"raise" or "defer"',
    "patience": "a whole number from 1 to 1,000,000",
    "chunk_bytes": "a multiple of 4096",
    "arena_bytes": "at least 1 MiB (1M), or None",
    "strict": "true or false",
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
