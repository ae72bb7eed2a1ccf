"""Traces of what the collectives of a process did, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchext.collectives.world import World, worlds


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes a trace, in Chrome's format, of this process's "dfccl" groups in the block.

    Each rank is a process of the trace, with a row for its calls from issue to end, and one for what its engine does:
    pieces of large collectives that it runs, preemptions, deadlocks. Clocks of one host agree, so `merge_traces` can
    put the files of several ranks together. Counts up to a million events; slows small calls down by about 1 us.

    Args:
        path: Of the file; ``{rank}`` in it becomes the global rank.

    Raises:
        RuntimeError: This process is in no "dfccl" group.

    Example:
        >>> with torchext.collectives.trace("trace-{rank}.json"):
        ...     train_step()
    """
    traced = worlds()
    if not traced:
        raise RuntimeError('trace: this process is in no "dfccl" group; call it after init_process_group')
    for world in traced:
        world.engine.trace(True)
    try:
        yield
    finally:
        events = [event for world in traced for event in _events(world)]
        rank = traced[0].ranks[traced[0].engine.rank]
        Path(os.fspath(path).replace("{rank}", str(rank))).write_text(json.dumps({"traceEvents": events}))


def merge_traces(paths: list[str | os.PathLike[str]], to: str | os.PathLike[str]) -> None:
    """Puts the traces of several ranks of one host into one file."""
    events = [event for path in paths for event in json.loads(Path(path).read_text())["traceEvents"]]
    Path(to).write_text(json.dumps({"traceEvents": events}))


def _events(world: World) -> list[dict[str, Any]]:
    rank = world.ranks[world.engine.rank]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 1, "args": {"name": "engine"}},
    ]
    for what, text, call, begin_s, end_s in world.engine.trace(False):
        begin, end = 1e6 * begin_s, 1e6 * end_s
        if what in ("call", "failed call"):
            shared = {"name": text, "cat": what, "pid": rank, "id": f"{rank}/{call}"}
            events.append({**shared, "ph": "b", "ts": begin})
            events.append({**shared, "ph": "e", "ts": end})
        else:
            name = text if what == "run" else f"{what}: {text}"
            events.append(
                {"ph": "X", "name": name, "cat": what, "pid": rank, "tid": 1, "ts": begin, "dur": end - begin}
            )
    return events
