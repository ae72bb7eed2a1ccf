"""Speaks to the daemon of a queue."""

from __future__ import annotations

import base64
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchext.launch.errors import LaunchError
from torchext.launch.queue.types import JobState, Submission

_CHUNK = 1 << 18
_FOLLOW_S = 0.2


def default_folder() -> Path:
    """Where the queue of this user is, unless said otherwise."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "torchext" / "queue"


class QueueGoneError(LaunchError):
    """No queue answers, or no longer; it may be back later."""


class Client:
    """A connection to a queue; use it in a ``with`` block. For one thread.

    Args:
        url: ``tcp://HOST:PORT``; the folder of a queue on this machine, or its socket, with or without ``unix:``;
            ``local`` or None for the default folder.
        token: For ``tcp://``; None: from TORCHEXT_QUEUE_TOKEN.
        timeout_s: For connecting, and for each answer.

    Raises:
        QueueGoneError: Nobody answers there.
    """

    def __init__(self, url: str | None = None, *, token: str | None = None, timeout_s: float = 30.0) -> None:
        self._token = token if token is not None else os.environ.get("TORCHEXT_QUEUE_TOKEN")
        where = url or os.environ.get("TORCHEXT_QUEUE") or "local"
        try:
            self._socket = _connect(where, timeout_s)
        except (OSError, ValueError) as error:
            raise QueueGoneError(
                f"no queue answers at {where!r} ({error}); start one with: torchext queue start"
            ) from error
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        self._file.close()
        self._socket.close()

    def call(self, op: str, **fields: object) -> Any:
        """Asks the queue for something and waits for the answer.

        Raises:
            LaunchError: The queue says why it cannot be, or has gone.
        """
        request: dict[str, object] = {"op": op, **fields}
        if self._token is not None:
            request["token"] = self._token
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._file.readline()
        except OSError as error:
            raise QueueGoneError(f"lost the queue while waiting for its answer to {op!r}: {error}") from error
        if not line.endswith(b"\n"):
            raise QueueGoneError(f"the queue ended before it had answered {op!r}")
        answer = json.loads(line)
        if "error" in answer:
            raise LaunchError(answer["error"])
        return answer["result"]

    def submit(self, submission: Submission) -> int:
        """Submits a job; returns its number. Once it does, the job is kept."""
        number: int = self.call("submit", job=submission.to_json())
        return number

    def log(self, job: int, *, run: int | None = None, node: int = 0, follow: bool = False) -> Iterator[bytes]:
        """Yields what a job prints: its latest run's so far, or, following, of all its coming runs until it ends."""
        number = run or max(self.call("job", job=job, plan=False)["num_runs"], 1)
        offset = 0
        while True:
            described = self.call("job", job=job, plan=False)
            if described["num_runs"] < number:
                if run is not None or JobState(described["state"]).ended:
                    raise LaunchError(f"job {job} has no run {number}, only {described['num_runs']}")
                if not follow:
                    return
            else:
                answer = self.call("log", job=job, run=number, node=node, offset=offset, size=_CHUNK)
                if answer["again"]:  # it has to come from another machine
                    time.sleep(_FOLLOW_S)
                    continue
                data = base64.b64decode(answer["data"])
                offset += len(data)
                if data:
                    yield data
                    continue
                if not follow or (not answer["more"] and (run or JobState(described["state"]).ended)):
                    return
                if not answer["more"] and described["num_runs"] > number:
                    number, offset = number + 1, 0
                    continue
            time.sleep(_FOLLOW_S)


def _connect(where: str, timeout_s: float) -> socket.socket:
    if where.startswith("tcp://"):
        parts = urlsplit(where)
        if parts.hostname is None or parts.port is None:
            raise ValueError("expected tcp://HOST:PORT")
        return socket.create_connection((parts.hostname, parts.port), timeout=timeout_s)
    path = default_folder() if where == "local" else Path(where.removeprefix("unix:").removeprefix("//"))
    if path.is_dir():
        path = path / "queue.sock"
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(timeout_s)
    try:
        made.connect(str(path))
    except OSError:
        made.close()
        raise
    return made
