"""Many independent training runs: what each one is, where its result is kept, and running them side by side.

Results go to a JSON-lines journal, one line per finished run, written by the parent process as each run ends. A job
that is killed and started again reads the journal and does only what is missing; a torn last line is a missing run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Progress = Callable[[str, int], None]  # a line on the run in hand, epochs finished since the last call


@dataclass(frozen=True)
class Run:
    """What decides the result of one training.

    Attributes:
        data: path of the CSV file.
        loss: a name or spec, see `forecast.make_loss`.
        limit_batches: training batches per epoch, None for all; for quick trials.
    """

    data: str
    backbone: str
    lookback: int
    horizon: int
    loss: str
    lr: float
    seed: int
    epochs: int = 10
    patience: int = 3
    batch_size: int = 32
    limit_batches: int | None = None

    @property
    def dataset(self) -> str:
        return Path(self.data).stem

    def __str__(self) -> str:
        return f"{self.dataset}/{self.horizon} {self.backbone} {self.loss} lr {self.lr:g} seed {self.seed}"


class Journal:
    """Finished runs on disk, one JSON line each, found again by the `config` that decided them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> dict[str, Record]:
        """The finished runs, the latest of each, by `Journal.key` of their config. Torn lines are passed over."""
        if not self.path.exists():
            return {}
        found = {}
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                found[self.key(record["config"])] = record
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
        return found

    @staticmethod
    def key(config: Record) -> str:
        return json.dumps(config, sort_keys=True)

    def append(self, record: Record) -> None:
        """Add a result, durable on return."""
        line = json.dumps(record, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a torn line must not swallow this one
                    line = "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def run_all(
    runs: Sequence[Run],
    train: Callable[[Run, Progress], Any],
    jobs: int,
    progress: Progress,
) -> Iterator[tuple[Run, Any]]:
    """Train each run and yield it with its result as it ends.

    Args:
        runs: all independent of each other.
        train: called as `train(run, progress)`; with more than one job in a spawned process, so it must pickle.
        jobs: processes to use; 1 trains in this process, in order.
        progress: called in this process, from one thread at a time.

    Raises:
        RuntimeError: some runs failed; raised at the end, after the others finished, from the first failure.
    """
    if jobs == 1 or len(runs) <= 1:
        for run in runs:
            yield run, train(run, progress)
        return

    failures: list[tuple[Run, BaseException]] = []
    context = multiprocessing.get_context("spawn")
    reports: multiprocessing.Queue[tuple[str, int] | None] = context.Queue()
    with _listen(reports, progress):
        pool = ProcessPoolExecutor(min(jobs, len(runs)), context, initializer=_start_worker, initargs=(reports,))
        try:
            futures: dict[Future[Any], Run] = {pool.submit(_train_in_worker, train, run): run for run in runs}
            for future in as_completed(futures):
                error = future.exception()
                if error is None:
                    yield futures[future], future.result()
                else:
                    failures.append((futures[future], error))
        finally:
            pool.shutdown(cancel_futures=True)
    if failures:
        names = "; ".join(f"{run}: {error!r}" for run, error in failures[:5])
        raise RuntimeError(f"{len(failures)} of {len(runs)} runs failed: {names}") from failures[0][1]


_reports: multiprocessing.Queue[tuple[str, int] | None] | None = None  # set once, in workers only


def _start_worker(reports: multiprocessing.Queue[tuple[str, int] | None]) -> None:
    global _reports
    _reports = reports
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed outright cannot stop its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _train_in_worker(train: Callable[[Run, Progress], Any], run: Run) -> Any:
    assert _reports is not None
    reports = _reports
    return train(run, lambda text, epochs: reports.put((text, epochs)))


@contextmanager
def _listen(reports: multiprocessing.Queue[tuple[str, int] | None], progress: Progress) -> Iterator[None]:
    """Pass the workers' reports on to `progress` until the block ends."""

    def pass_on() -> None:
        while (report := reports.get()) is not None:
            progress(*report)

    listener = threading.Thread(target=pass_on, name="progress-listener")
    listener.start()
    try:
        yield
    finally:
        reports.put(None)
        listener.join()
        reports.close()
        reports.join_thread()
