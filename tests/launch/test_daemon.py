"""The daemon's answers, without a process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchext.launch.errors import LaunchError
from torchext.launch.queue import remote
from torchext.launch.queue.daemon import Daemon
from torchext.launch.queue.store import RunRow, Store
from torchext.launch.queue.submit import describe
from torchext.scheduling import Cluster, Machine

_PING = json.dumps({"op": "ping"}).encode()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "q", cluster=Cluster((Machine("a", 2),)))
    yield made
    made.close()


def test_a_token_that_was_lost_lets_nobody_in_and_is_made_anew(daemon: Daemon, tmp_path: Path) -> None:
    token = tmp_path / "q" / "token"
    token.touch()  # as a daemon leaves it that is killed, or has no room, when it makes it

    async def listen() -> None:
        (await daemon._listen("127.0.0.1:0")).close()

    assert daemon._answer(_PING, daemon._token())["refused"]
    asyncio.run(listen())
    assert len(token.read_text()) > 30
    assert token.stat().st_mode & 0o777 == 0o600
    assert daemon._answer(_PING, daemon._token())["refused"]
    assert "result" in daemon._answer(json.dumps({"op": "ping", "token": token.read_text()}).encode(), daemon._token())


def test_a_log_is_not_read_from_before_its_beginning(daemon: Daemon) -> None:
    answer = daemon._answer(b'{"op": "log", "job": 1, "run": 1, "node": 0, "offset": -1, "size": 9}', None)
    assert "from an offset and for a size of at least 0, got -1 and 9" in answer["error"]


def test_a_daemon_that_cannot_start_lets_go_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "q"
    Daemon(Path("q"), cluster=Cluster((Machine("a", 2),))).close()
    store = Store(folder / "queue.sqlite")
    number = store.add_job(describe([__file__]), 1.0).id
    run = RunRow(number, 1, (("z", 1),), 1.0, "because")
    store.save_run(run)
    with pytest.raises(LaunchError, match="the cluster has no machine 'z'"):
        Daemon(folder, cluster=Cluster((Machine("a", 2),)))
    run.outcome = "done"
    store.save_run(run)
    store.close()
    Daemon(folder, cluster=Cluster((Machine("a", 2),))).close()


class _Still:
    """Stands in for the module `time`: no time goes by."""

    def monotonic(self) -> float:
        return 1000.0


def test_a_daemon_knows_after_a_restart_who_spoke_for_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "time", _Still())

    def hear(daemon: Daemon, agent: str) -> dict[str, Any]:
        request = {"op": "sync", "machine": "a", "agent": agent, "reports": [], "logs": [], "have": []}
        return daemon._answer(json.dumps(request).encode(), None)

    for life in range(2):
        daemon = Daemon(tmp_path / "q", cluster=Cluster((Machine("a", 2),)), engine="nodes")
        try:
            if life:  # before the first is heard again, whose jobs may run still
                assert "machine 'a' has an agent already" in hear(daemon, "two")["error"]
                assert daemon._remote["a"].away
            assert "result" in hear(daemon, "one")
            assert not daemon._remote["a"].away
        finally:
            daemon.close()
