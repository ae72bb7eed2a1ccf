"""What the queue must not forget: jobs, their runs, agents and drained nodes, in SQLite.

Each method is one transaction, written ahead (WAL) and synced before it returns: what has been said to a user, or
started, is known after a crash.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchext.launch.queue.types import JobState, PartKey, Submission, Why

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    submission TEXT NOT NULL,
    submit_s REAL NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    num_runs INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    losses INTEGER NOT NULL DEFAULT 0,
    run_s REAL NOT NULL DEFAULT 0,
    end_s REAL
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state);
CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (end_s);
CREATE TABLE IF NOT EXISTS runs (
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    machines TEXT NOT NULL,
    slots TEXT,
    decided_s REAL NOT NULL,
    start_s REAL,
    end_s REAL,
    explanation TEXT NOT NULL,
    why TEXT,
    outcome TEXT,
    PRIMARY KEY (job, number)
);
CREATE INDEX IF NOT EXISTS runs_open ON runs (job) WHERE outcome IS NULL;
CREATE TABLE IF NOT EXISTS drained (machine TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS agents (machine TEXT PRIMARY KEY, agent TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS clock (id INTEGER PRIMARY KEY CHECK (id = 0), now_s REAL NOT NULL);
"""


@dataclass
class JobRow:
    """A job as stored.

    Attributes:
        id: Its number.
        submission: What was asked for.
        submit_s: When, on the clock of the queue.
        state: What it is doing.
        reason: What became of it, in words.
        num_runs: How many runs were decided.
        failures: How many of them failed by themselves.
        losses: How many were lost with their node or agent.
        run_s: How long it has held its slots, over ended runs.
        end_s: When it ended.
    """

    id: int
    submission: Submission
    submit_s: float
    state: JobState
    reason: str = ""
    num_runs: int = 0
    failures: int = 0
    losses: int = 0
    run_s: float = 0.0
    end_s: float | None = None


@dataclass
class RunRow:
    """A run as stored.

    Attributes:
        job: Of which job.
        number: From 1 on.
        machines: (name, slots) of each, rank 0's first.
        decided_s: When the policy chose it.
        explanation: Why, in words.
        slots: Which slots on each machine; None until it is started.
        start_s: When it was started.
        end_s: When all of it had ended.
        why: Why it was asked to end.
        outcome: What became of it, in words; None while it is not over.
    """

    job: int
    number: int
    machines: tuple[tuple[str, int], ...]
    decided_s: float
    explanation: str
    slots: tuple[tuple[int, ...], ...] | None = None
    start_s: float | None = None
    end_s: float | None = None
    why: Why | None = None
    outcome: str | None = None

    def keys(self) -> list[PartKey]:
        """Names its parts."""
        return [PartKey(self.job, self.number, node) for node in range(len(self.machines))]


class Store:
    """The database of one queue. For one thread.

    Args:
        path: The file; made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # environments of jobs may hold secrets
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything within is kept or nothing is."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk may have ended it already
                self._connection.execute("ROLLBACK")
            raise

    def add_job(self, submission: Submission, submit_s: float) -> JobRow:
        """Keeps a new job and gives it a number."""
        cursor = self._connection.execute(
            "INSERT INTO jobs (submission, submit_s, state) VALUES (?, ?, ?)",
            (submission.to_json(), submit_s, JobState.WAITING.value),
        )
        assert cursor.lastrowid is not None
        return JobRow(cursor.lastrowid, submission, submit_s, JobState.WAITING)

    def save_job(self, job: JobRow) -> None:
        """Keeps what has changed of a job."""
        self._connection.execute(
            "UPDATE jobs SET state=?, reason=?, num_runs=?, failures=?, losses=?, run_s=?, end_s=? WHERE id=?",
            (job.state.value, job.reason, job.num_runs, job.failures, job.losses, job.run_s, job.end_s, job.id),
        )

    def save_run(self, run: RunRow) -> None:
        """Keeps a new run, or what has changed of one."""
        self._connection.execute(
            "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                run.job,
                run.number,
                json.dumps(run.machines),
                None if run.slots is None else json.dumps(run.slots),
                run.decided_s,
                run.start_s,
                run.end_s,
                run.explanation,
                None if run.why is None else run.why.value,
                run.outcome,
            ),
        )

    def job(self, number: int) -> JobRow | None:
        """Finds a job."""
        return next(self._jobs("WHERE id = ?", number), None)

    def jobs(self, *states: JobState) -> list[JobRow]:
        """Lists jobs in these states, all without any, in the order of their numbers."""
        marks = ", ".join("?" * len(states))
        return list(self._jobs(f"WHERE state IN ({marks})" if states else "", *(state.value for state in states)))

    def recent_jobs(self, since_s: float) -> list[JobRow]:
        """Lists jobs that have not ended before this time."""
        return list(self._jobs("WHERE end_s IS NULL OR end_s >= ?", since_s))

    def _jobs(self, where: str, *values: object) -> Iterator[JobRow]:
        for row in self._connection.execute(f"SELECT * FROM jobs {where} ORDER BY id", values):
            fields = dict(row)
            fields["submission"] = Submission.from_json(fields["submission"])
            fields["state"] = JobState(fields["state"])
            yield JobRow(**fields)

    def runs(self, job: int) -> list[RunRow]:
        """Lists the runs of a job, the first first."""
        return self._runs("WHERE job = ? ORDER BY number", job)

    def open_runs(self) -> list[RunRow]:
        """Lists runs that are not over."""
        return self._runs("WHERE outcome IS NULL ORDER BY decided_s, job, number")

    def _runs(self, where: str, *values: object) -> list[RunRow]:
        found = []
        for row in self._connection.execute(f"SELECT * FROM runs {where}", values):
            fields = dict(row)
            fields["machines"] = tuple((name, slots) for name, slots in json.loads(fields["machines"]))
            if fields["slots"] is not None:
                fields["slots"] = tuple(tuple(some) for some in json.loads(fields["slots"]))
            fields["why"] = None if fields["why"] is None else Why(fields["why"])
            found.append(RunRow(**fields))
        return found

    def drained(self) -> set[str]:
        """Names the machines that take no new jobs."""
        return {row["machine"] for row in self._connection.execute("SELECT machine FROM drained")}

    def set_drained(self, machine: str, drained: bool) -> None:
        """Keeps whether a machine takes new jobs."""
        if drained:
            self._connection.execute("INSERT OR IGNORE INTO drained VALUES (?)", (machine,))
        else:
            self._connection.execute("DELETE FROM drained WHERE machine = ?", (machine,))

    def agents(self) -> dict[str, str]:
        """Names the agent that speaks for each machine."""
        return {row["machine"]: row["agent"] for row in self._connection.execute("SELECT machine, agent FROM agents")}

    def set_agent(self, machine: str, agent: str) -> None:
        """Keeps which agent speaks for a machine."""
        self._connection.execute("INSERT OR REPLACE INTO agents VALUES (?, ?)", (machine, agent))

    def clock_s(self) -> float:
        """The latest time that the queue has seen; 0 if it is new."""
        (latest_s,) = self._connection.execute(
            "SELECT max(t) FROM (SELECT max(now_s) AS t FROM clock UNION ALL SELECT max(submit_s) FROM jobs "
            "UNION ALL SELECT max(end_s) FROM jobs UNION ALL SELECT max(decided_s) FROM runs "
            "UNION ALL SELECT max(start_s) FROM runs UNION ALL SELECT max(end_s) FROM runs)"
        ).fetchone()
        return 0.0 if latest_s is None else float(latest_s)

    def save_clock(self, now_s: float) -> None:
        """Keeps the time."""
        self._connection.execute("INSERT OR REPLACE INTO clock VALUES (0, ?)", (now_s,))
