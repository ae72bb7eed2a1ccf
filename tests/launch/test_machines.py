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

from torchext.launch.errors import LaunchError
from torchext.launch.queue import node as node_module
from torchext.launch.queue import remote
from torchext.launch.queue.agent import _Agent
from torchext.launch.queue.client import Client, QueueGoneError
from torchext.launch.queue.node import LocalNode
from torchext.launch.queue.remote import NotYet, RemoteNode
from torchext.launch.queue.types import Part, PartKey, PartState

_KEY = PartKey(1, 1, 0)


def _part(slots: tuple[int, ...] = (0,), **env: str) -> Part:
    return Part(_KEY, ("train.py",), sys.executable, "/", env, 1.0, slots, ("a",), holds_store=False)


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


def test_what_has_been_lost_and_is_gone_is_not_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = LocalNode(tmp_path)
    folder = tmp_path / "1" / "run-1" / "node-0"
    folder.mkdir(parents=True)  # its lock is free, and there is no result
    assert node.started() == [_KEY]
    assert node.look(_KEY).state is PartState.LOST
    assert node.started() == []
    monkeypatch.setattr(node_module, "_kill_marked", lambda folder: pytest.fail("looked through all processes again"))
    assert node.look(_KEY).state is PartState.LOST


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
            with (
                Client(str(tmp_path / "s"), timeout_s=60) as client,
                pytest.raises(QueueGoneError, match="ended before"),
            ):
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


class _Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(remote, "time", made)
    return made


def _sync(node: RemoteNode, agent: str = "one", state: str | None = None, logs: list[list[Any]] | None = None) -> Any:
    reports = [] if state is None else [[str(_KEY), state, 0 if state == "ended" else None, None]]
    return node.sync(agent=agent, reports=reports, logs=logs or [], have=[], open_parts={_KEY})


def test_another_agent_has_to_wait_until_nothing_of_the_first_can_be_left(clock: _Clock) -> None:
    node = RemoteNode("a", 100.0)
    _sync(node)
    node.start(_part())
    assert len(_sync(node, state="absent")["start"]) == 1
    _sync(node, state="running")
    for silent_s in (1.0, 90.0, 26.0):  # lease, grace and spare time are 116 s
        clock.now_s += silent_s
        if silent_s != 26.0:
            with pytest.raises(LaunchError, match=r"machine 'a' has an agent already.* may go on for 100 s"):
                _sync(node, agent="two")
    _sync(node, agent="two", state="absent")
    assert node.look(_KEY).state is PartState.LOST  # and is not started by the new agent
    assert _sync(node, agent="two")["start"] == []
    with pytest.raises(LaunchError, match="has an agent already"):
        _sync(node, agent="one")


def test_an_agent_that_comes_back_is_heard_at_once(clock: _Clock) -> None:
    node = RemoteNode("a", 100.0)
    node.start(_part())
    _sync(node, state="running")
    clock.now_s += 90.0
    _sync(node, state="running")
    assert node.look(_KEY).state is PartState.RUNNING


def _ask(node: RemoteNode, offset: int = 0) -> bytes | None:
    try:
        return node.read_log(_KEY, offset, 10)
    except NotYet:
        return None


def test_what_was_read_of_a_log_before_the_end_does_not_count_after_it(clock: _Clock) -> None:
    node = RemoteNode("a", 100.0)
    node.start(_part())
    _sync(node, state="running")
    assert _ask(node) is None
    asked = _sync(node)["logs"]
    assert asked == [[str(_KEY), 0, 10]]
    assert _sync(node, state="ended", logs=[[str(_KEY), 0, 10, ""]])["logs"] == asked
    assert _ask(node) is None
    _sync(node, state="ended", logs=[[str(_KEY), 0, 10, "bGFzdA=="]])
    assert _ask(node) == b"last"


def test_logs_of_a_machine_that_is_away_are_refused_and_none_are_kept_for_ever(clock: _Clock) -> None:
    node = RemoteNode("a", 100.0)
    _sync(node)
    assert _ask(node) is None
    clock.now_s += 31.0
    with pytest.raises(LaunchError, match="machine 'a' is away, and what job 1 has printed there is on it"):
        _ask(node)
    node.forget({_KEY})
    assert _sync(node)["logs"] == []
