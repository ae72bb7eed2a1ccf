"""The standby process: holds the images of several jobs and serves their training processes."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import Any

from torchext.standby import wire
from torchext.standby.errors import NoStateError, StandbyError, StateMismatchError
from torchext.standby.images import Budget
from torchext.standby.jobs import Job
from torchext.standby.persist import Persister
from torchext.standby.promote import Promoter
from torchext.standby.session import Session

logger = logging.getLogger(__name__)

_MAX_STRANGERS = 32
_PAUSE_S = 0.2


class Daemon:
    """Serves connections until `stop`; use it in a ``with`` block.

    Args:
        listen: Address, ``host:port`` or "local"; port 0 takes a free one (see `address`).
        max_jobs: How many jobs it holds at most.
        memory_bytes: What their images may take together; None: no limit.
        linger_s: Ends by itself once all trainings are over, or nobody has been connected for so long; None: never.
        heartbeat_s: Takes a training process for lost after so long a silence; None: once its connection ends, which
            the host of a process that is killed sees to, and for a host that is gone takes about 20 s.
        promote: Command of a warm worker, which takes over when a training process is lost; see promote.py.
    """

    def __init__(
        self,
        listen: str,
        *,
        max_jobs: int = 16,
        memory_bytes: int | None = None,
        linger_s: float | None = None,
        heartbeat_s: float | None = None,
        promote: str | None = None,
    ) -> None:
        self.jobs: dict[str, Job] = {}  # guarded by changed
        self.changed = threading.Condition()
        self.budget = Budget(memory_bytes)
        self.max_jobs = max_jobs
        self._linger_s = linger_s
        self._last_used = time.monotonic()
        self._sessions: set[Session] = set()  # guarded by changed
        self._discarded: list[Job] = []  # guarded by changed; their memory is freed without it
        self._stopping = threading.Event()
        self.strangers = threading.BoundedSemaphore(_MAX_STRANGERS)  # one for each connection until it is greeted
        self._listener = wire.listen(listen)
        self._listener.settimeout(_PAUSE_S)  # here, as `stop` may come before `serve`
        self.heartbeat_s = heartbeat_s
        self.promoter = None if promote is None else Promoter(promote, self.address)

    @property
    def address(self) -> str:
        """What clients connect to."""
        if self._listener.family == socket.AF_UNIX:
            return wire.LOCAL
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def serve(self) -> None:
        """Accepts connections, each in a thread of its own, until `stop` is called or `linger_s` has passed."""
        if self.promoter is not None:
            self.promoter.start()
        while not self._stopping.is_set() and not self._is_idle():
            if self.strangers.acquire(timeout=_PAUSE_S) and not self._accept():
                self.strangers.release()
        self.stop()

    def _accept(self) -> bool:
        """Starts the session of the next connection; false if none comes within a moment."""
        try:
            sock, _ = self._listener.accept()
        except TimeoutError:
            return False
        except OSError as error:
            if not self._stopping.is_set():  # else closed by stop
                logger.warning("cannot accept a connection: %s", error)
                self._stopping.wait(_PAUSE_S)
            return False
        session = Session(self, sock)
        with self.changed:
            self._sessions.add(session)
        try:
            session.start()
        except RuntimeError as error:  # no more threads
            logger.warning("cannot serve a connection: %s", error)
            sock.close()
            self.forget(session)
            self._stopping.wait(_PAUSE_S)
            return False
        return True

    def stop(self) -> None:
        """Closes all connections, waits for their threads and frees all memory. Idempotent."""
        self._stopping.set()
        self._listener.close()
        if self.promoter is not None:
            self.promoter.stop()
        with self.changed:
            sessions = list(self._sessions)
            self.changed.notify_all()
        for session in sessions:
            session.close()
        for session in sessions:
            session.join()
        with self.changed:
            jobs = [*self.jobs.values(), *self._discarded]
            self.jobs.clear()
            self._discarded.clear()
        for job in jobs:
            job.close()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def forget(self, session: Session) -> None:
        """A session has ended."""
        with self.changed:
            self._sessions.discard(session)
            if session.hello:  # a stranger keeps nothing alive
                self._last_used = time.monotonic()
            self.changed.notify_all()

    def _is_idle(self) -> bool:
        with self.changed:
            if self._linger_s is None or any(session.hello for session in self._sessions):
                return False
            if self.jobs and all(job.is_finished for job in self.jobs.values()):
                return True
            return time.monotonic() - self._last_used > self._linger_s

    def job(self, name: str, world_size: int | None = None) -> Job:
        """Finds a job; makes it, where a world size is given. Call it with `changed` held."""
        job = self.jobs.get(name)
        if job is None:
            if world_size is None:
                raise NoStateError(f"the standby has no job {name!r}, only {sorted(self.jobs) or 'none at all'}")
            if len(self.jobs) >= self.max_jobs:
                raise StandbyError(
                    f"the standby holds {len(self.jobs)} jobs already, its limit: {sorted(self.jobs)}; "
                    "remove one (torchext standby remove) or allow more (--jobs)"
                )
            job = self.jobs[name] = Job(name, world_size, self.budget)
        elif world_size is not None and job.world_size != world_size:
            if job.book.latest() is not None:
                raise StateMismatchError(
                    f"job {name!r} at the standby has a world size of {job.world_size}, this program one of "
                    f"{world_size}; go on with {job.world_size} ranks, or use another job name"
                )
            self._discard(job)
            return self.job(name, world_size)
        return job

    def remove(self, name: str) -> None:
        """Forgets a job; its training process, if there is one, loses its standby."""
        with self.changed:
            job = self.job(name)
            sessions = [rank.session for rank in job.ranks if rank.session is not None]
        for session in sessions:
            session.close()
            session.join()
        with self.changed:
            if self.jobs.get(name) is job:
                self._discard(job)
        self.free_discarded()

    def free_discarded(self) -> None:
        """Frees the memory of jobs that are no more, once their last write has ended; do not hold `changed`."""
        with self.changed:
            jobs, self._discarded = self._discarded, []
        for job in jobs:
            job.close()

    def persister(self, job: Job, wanted: dict[str, Any] | None) -> Persister | None:
        """Lets states of a job be written to disk as its processes want it; returns what did so until now, to close.

        Call it with `changed` held.
        """
        before = job.persister
        if wanted is None or (before is not None and before.is_for(wanted["directory"], wanted["every_n_commits"])):
            return None

        def tell(sentence: str) -> None:
            with self.changed:
                sessions = [rank.session for rank in job.ranks if rank.session is not None]
            for session in sessions:
                session.notify(sentence)

        job.persister = Persister(
            job, wanted["directory"], wanted["every_n_commits"], budget=self.budget, changed=self.changed, tell=tell
        )
        return before

    def _discard(self, job: Job) -> None:
        del self.jobs[job.name]
        self._discarded.append(job)
        for rank in job.ranks:
            if rank.session is not None:
                rank.session.close()

    def status(self) -> dict[str, Any]:
        """What it holds: see `torchext standby status --json`."""
        with self.changed:
            jobs = {}
            for name, job in self.jobs.items():
                latest = job.book.latest()
                ranks = []
                for number, rank in enumerate(job.ranks):
                    newest = job.book.newest(number)
                    published = rank.stats["published"]
                    ranks.append(
                        {
                            "rank": number,
                            "step": None if newest is None else newest.step,
                            "published": published,
                            "lag": None if published is None or latest is None else published - latest,
                            "connected": rank.session is not None,
                            "lost": number in job.heirs_wanted,
                            "peer": None if rank.session is None else rank.session.peer,
                            "transport": None if rank.session is None else rank.session.transport,
                            "term": job.book.term,
                            "size_bytes": rank.images.size_bytes(),
                            "commits": rank.stats["commits"],
                            "bytes": rank.stats["bytes"],
                            "last_commit_unix_s": rank.stats["at"],
                        }
                    )
                jobs[name] = {"world_size": job.world_size, "step": latest, "steps": job.book.steps(), "ranks": ranks}
            return {
                "address": self.address,
                "pid": os.getpid(),
                "memory": {"used_bytes": self.budget.used_bytes, "limit_bytes": self.budget.limit_bytes},
                "max_jobs": self.max_jobs,
                "warm": None if self.promoter is None else self.promoter.warm_pid,
                "waiting": sum(session.is_waiting for session in self._sessions),
                "jobs": jobs,
            }
