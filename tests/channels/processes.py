"""Starts the other ends of channels as processes of their own, by multiprocessing as users do."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from typing import Any

DEADLINE_S = 60.0  # for what takes milliseconds, on a machine that is very busy


@contextlib.contextmanager
def process(target: Callable[..., None], *args: Any, method: str = "fork") -> Iterator[Any]:
    """Runs ``target(*args)`` in another process; killed at the end of the block if it still runs."""
    started = multiprocessing.get_context(method).Process(target=target, args=args, name=target.__name__)  # type: ignore[attr-defined]
    started.start()
    try:
        yield started
    finally:
        if started.is_alive():
            started.kill()
        started.join(DEADLINE_S)
        started.close()


def ends(started: Any, within_s: float = DEADLINE_S) -> int:
    """Waits for its end and gives its exit code."""
    started.join(within_s)
    assert started.exitcode is not None, f"{started.name} still runs after {within_s} s"
    return int(started.exitcode)


def die() -> None:
    """Ends this process on the spot, as the out-of-memory killer would."""
    signal.raise_signal(signal.SIGKILL)
