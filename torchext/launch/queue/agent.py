"""``torchext node join``: the agent that speaks for one machine of a cluster.

It may be killed: jobs go on, and an agent started anew within the lease finds them.
"""

from __future__ import annotations

import base64
import logging
import os
import signal
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from torchext.launch.errors import LaunchError
from torchext.launch.folders import lock, write_whole
from torchext.launch.queue.client import Client, QueueGoneError
from torchext.launch.queue.lease import write_lease
from torchext.launch.queue.node import LocalNode
from torchext.launch.queue.types import Part, PartKey, PartState

logger = logging.getLogger(__name__)

_SYNC_S = 0.2
_AGAIN_S = 1.0


def join(
    url: str, name: str, folder: Path, *, address: str | None = None, devices: tuple[str, ...] | None = None
) -> None:
    """Speaks for a machine until SIGTERM or SIGINT; jobs go on then, for as long as the lease.

    Args:
        url: The queue.
        name: Of the machine, as in the cluster file.
        folder: For the files of its jobs; one agent per folder.
        address: Where other machines reach this one; None: the address from which it reaches the queue.
        devices: What stands for each slot in CUDA_VISIBLE_DEVICES; None where slots are CPUs.

    Raises:
        LaunchError: The queue has no such machine, or it or the folder has an agent already.
    """
    folder = folder.absolute()  # jobs have other working directories
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = lock(folder / "agent.lock")
    if held is None:
        raise LaunchError(f"an agent runs in {folder} already; give this one another --folder")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        agent: _Agent | None = None
        while not stopped.is_set():
            try:
                if agent is None:
                    lease = folder / "lease"
                    node = LocalNode(folder, address=address or _address_towards(url), devices=devices, lease=lease)
                    agent = _Agent(name, node, lease, _id_of(folder))
                with Client(url) as client:
                    logger.info("machine %s has joined %s", name, url)
                    while not stopped.wait(_SYNC_S):
                        agent.sync(client)
            except (QueueGoneError, OSError) as error:  # OSError: the disk is full, or there is no network yet
                logger.warning("%s; trying again", error)
                stopped.wait(_AGAIN_S)
    finally:
        os.close(held)


class _Agent:
    def __init__(self, name: str, node: LocalNode, lease: Path, identity: str) -> None:
        self._name = name
        self._node = node
        self._lease = lease
        self._id = identity
        self._watched: list[str] = []
        self._logs: list[list[Any]] = []

    def sync(self, client: Client) -> None:
        """One exchange with the daemon."""
        reports = []
        for word in self._watched:
            report = self._node.look(PartKey.parse(word))
            reports.append([word, report.state.value, report.status, report.endpoint])
        have = [str(key) for key in self._node.started() if self._node.look(key).state is PartState.RUNNING]
        asked_s = time.clock_gettime(time.CLOCK_BOOTTIME)  # the daemon counts from when it has heard us, which is later
        told = client.call("sync", machine=self._name, agent=self._id, reports=reports, logs=self._logs, have=have)
        write_lease(self._lease, asked_s + told["lease_s"])
        for fields in told["start"]:
            self._node.start(Part.from_dict(fields))
        for word in told["end"]:
            self._node.end(PartKey.parse(word))
        self._watched = told["watch"]
        self._logs = []
        for word, offset, size in told["logs"]:
            data = self._node.read_log(PartKey.parse(word), offset, size)
            self._logs.append([word, offset, size, base64.b64encode(data).decode()])


def _id_of(folder: Path) -> str:
    """Names the agents of a folder, of which one runs at a time; the parts in the folder are theirs alone."""
    path = folder / "agent.id"
    if not path.exists():
        write_whole(path, f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
    return path.read_text()


def _address_towards(url: str) -> str:
    """The address of this machine on the way to the queue."""
    from urllib.parse import urlsplit

    host = urlsplit(url).hostname if url.startswith("tcp://") else None
    if host is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address: str = probe.getsockname()[0]
    return address
