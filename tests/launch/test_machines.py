"""Machines of a queue: what one is told to start, and what the daemon believes of one that an agent speaks for."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from torchext.launch.queue.agent import _Agent
from torchext.launch.queue.client import Client, QueueGoneError
from torchext.launch.queue.node import LocalNode
from torchext.launch.queue.types import Part, PartKey, PartState

_KEY = PartKey(1, 1, 0)


def _part(slots: tuple[int, ...] = (0,), **env: str) -> Part:
    return Part(_KEY, ("train.py",), sys.executable, "/", env, 1.0, slots, holds_store=False)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (_part(slots=(0, 2)), "slots (0, 2) are asked for, but this machine has 2 GPUs"),
        (_part(A="\0"), "embedded null byte"),
    ],
)
def test_a_part_that_cannot_be_started_has_failed_and_says_why(part: Part, words: str, tmp_path: Path) -> None:
    node = LocalNode(tmp_path, devices=("0", "1"))
    node.start(part)
    report = node.look(_KEY)
    assert (report.state, report.status) == (PartState.ENDED, 1)
    assert words in node.read_log(_KEY, 0, 1000).decode()
    (log,) = tmp_path.glob("1/run-1/node-0/output.log")
    assert log.stat().st_mode & 0o777 == 0o600


def test_half_an_answer_is_no_answer(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(b'{"result"')

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            with Client(str(tmp_path / "s"), timeout_s=60) as client, pytest.raises(QueueGoneError, match="ended before"):
                client.call("ping")
        finally:
            answering.join()


class _SlowDaemon:
    """Answers when the clock has gone on."""

    def call(self, op: str, **told: Any) -> dict[str, Any]:
        self.answered_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return {"start": [], "watch": [], "end": [], "logs": [], "lease_s": 100.0}


def test_a_lease_counts_from_before_the_daemon_was_asked(tmp_path: Path) -> None:
    agent = _Agent("a", LocalNode(tmp_path), tmp_path / "lease", "me")
    daemon = _SlowDaemon()
    agent.sync(daemon)  # type: ignore[arg-type]
    assert json.loads((tmp_path / "lease").read_text())["until_s"] <= daemon.answered_s + 100.0
    assert os.listdir(tmp_path) == ["lease"]
